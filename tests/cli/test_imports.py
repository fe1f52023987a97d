"""Which modules a command pulls in, since that is what makes it slow. Milliseconds are never asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run.make import make_run

from .program import HEAVY, python

PROBE = """
import json, sys
sys.argv = ["nftctl", *sys.argv[2:]]
import pathlib
target = pathlib.Path("modules.json")
import io, contextlib
code = None
try:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from nftctl.cli.main import main
        code = main()
except SystemExit as ending:
    code = ending.code
target.write_text(json.dumps({"code": code or 0, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""

QUICK = ("aiohttp", "rich", "filelock", "numpy", "tree_sitter", "asyncio")
LIGHT = (*QUICK, "pydantic_settings", "orjson")


def modules(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, set[str]]:
    answer = python(PROBE, "-", *arguments, cwd=folder, env=env)
    assert answer.returncode == 0, answer.stderr
    found = json.loads((folder / "modules.json").read_text())
    return found["code"], set(found["modules"])


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (("--version",), (*LIGHT, "pydantic")),
        (("--help",), (*LIGHT, "pydantic")),
        (("launch", "--help"), LIGHT),
        (("bench", "--help"), LIGHT),
        (("validate",), ("aiohttp", "rich", "filelock", "tree_sitter")),
        (("validate", "--show-resolved"), ("aiohttp", "rich", "filelock")),
        (("launch", "--dry-run"), ("aiohttp", "rich")),
        (("inspect-checkpoint", "tiny", "--verify", "--tensors"), (*QUICK, "pydantic", "pydantic_settings")),
        (("watch", "tiny"), ("aiohttp", "rich", "filelock", "numpy", "pydantic", "pydantic_settings")),
        (("watch", "tiny", "--once", "--json"), ("aiohttp", "rich", "filelock", "numpy", "pydantic")),
        (("reward-ping",), ("rich", "filelock")),
        (("profiles",), ("aiohttp", "rich", "filelock", "numpy", "tree_sitter")),
        (("profiles", "--schema"), ("aiohttp", "rich", "filelock", "numpy", "tree_sitter")),
        (("init",), ("aiohttp", "rich", "filelock")),
        (("submit", "--help"), LIGHT),
        (("submit", "--to", "slurm"), ("aiohttp", "rich", "filelock")),
        (
            ("submit", "--to", "kubernetes", "--image", "i", "--volume", "v:/v"),
            ("aiohttp", "rich", "filelock", "yaml"),
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_commands_do_not_import(tmp_path: Path, arguments: tuple[str, ...], without: tuple[str, ...]) -> None:
    make_run(tmp_path / "runs", steps=(5,))
    code, found = modules(tmp_path, *arguments)
    assert code == 0
    assert "nftctl" in found
    assert not found & {*HEAVY, *without}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("validate", "--set", "rl.beta=-1"), 3),
        (("launch", "--set", "grid.backend=slurm"), 3),
        (("resume", "nowhere"), 5),
        (("init", "--from", "nothing"), 2),
        (("export", "nowhere", "out", "--to", "lora"), 5),
        (("sample", "nowhere"), 5),
        (("watch", "nowhere"), 5),
        (("convert", "nowhere", "out"), 2),
        (("bench", "--set", "rl.beta=-1"), 3),
        (("bench", "--write-base", "nothing", "out"), 2),
        (("reward-ping", "--url", "http://127.0.0.1:1"), 4),
        (("submit", "--status", "x", "--address", "http://127.0.0.1:1"), 8),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_refusals_do_not_load_the_engine(tmp_path: Path, arguments: tuple[str, ...], expected: int) -> None:
    code, found = modules(tmp_path, *arguments)
    assert code == expected
    assert not found & {*HEAVY, "rich"}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("nftctl validate ", 2),
        ("nftctl resume ", 2),
        ("nftctl validate --set rl.", 3),
        ("nftctl la", 1),
        ("nftctl init --from t", 3),
        ("nftctl submit --to ", 3),
    ],
)
def test_completion_imports_little(tmp_path: Path, words: str, count: int) -> None:
    env = {"_NFTCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    _, found = modules(tmp_path, env=env)
    assert not found & {*HEAVY, "aiohttp", "rich", "filelock", "numpy", "pydantic"}
