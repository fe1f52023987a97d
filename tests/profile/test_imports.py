"""What is loaded to answer: nothing heavy, ever, and the diagnostics' own tools only when there is something to say."""

import subprocess
import sys
from pathlib import Path

import nftctl

HEAVY = ("torch", "ray", "diffusers", "peft", "transformers", "aiohttp", "numpy", "filelock", "stamina")
TALKATIVE = ("rich", "tree_sitter", "typer")

PROGRAM = """
import sys
from pathlib import Path
from nftctl.errors import ProfileRefused
from nftctl.profile.diagnose import format_finding
from nftctl.profile.load import find_profile, load_profile
from nftctl.profile.preflight import check
try:
    path, _ = find_profile(sys.argv[1], {}, Path.cwd())
    findings = check(load_profile(path, env={}))
except ProfileRefused as refused:
    findings = refused.findings
print(len(findings))
print(*sys.modules)
"""


def loaded_by(argument: str) -> tuple[int, set[str]]:
    root = Path(nftctl.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, check=True, cwd=root
    )
    count, modules = done.stdout.splitlines()
    return int(count), set(modules.split())


def test_a_valid_profile_loads_little() -> None:
    count, modules = loaded_by("tiny_t2i_cpu")
    assert count == 0
    assert not modules & {*HEAVY, *TALKATIVE}
    assert {"pydantic", "pydantic_settings"} <= modules


def test_a_wrong_profile_loads_the_grammar_and_nothing_heavy(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[rl]\nkl_bta = 0\n")
    count, modules = loaded_by(str(file))
    assert count == 1
    assert "tree_sitter" in modules
    assert not modules & {*HEAVY, "rich", "typer"}
