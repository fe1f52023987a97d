"""Every profile in `profiles/` through the installed command: alone, it lacks exactly what the operator has to give."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.profile.conftest import write_base, write_sd3_base, write_shards
from tests.profile.test_shipped import VARIABLES, operator_values

from .program import ROOT, environment, nftctl

NAMES = sorted(path.stem for path in (ROOT / "profiles").glob("*.toml"))


def validate(
    name: str, cwd: Path, env: Mapping[str, str], *, installed: bool = False
) -> tuple[int, list[tuple[str, str]]]:
    """Exit code, and key and code of each finding; `installed`: by the script that was installed."""
    if installed:
        command = [Path(sys.executable).with_name("nftctl"), "validate", name, "--json"]
        answer = subprocess.run(
            command, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=120, check=False
        )
    else:
        answer = nftctl("validate", name, "--json", cwd=cwd, env=env)
    document: dict[str, Any] = json.loads(answer.stdout)
    assert document["exit_code"] == answer.returncode
    return answer.returncode, [(found["key"], found["code"]) for found in document["diagnostics"]]


@pytest.mark.parametrize("name", NAMES)
def test_alone_it_lacks_what_the_operator_gives_and_with_that_it_is_valid(name: str, tmp_path: Path) -> None:
    left = operator_values(name)
    assert validate(name, tmp_path, {}, installed=True) == (3 if left else 0, list(left.items()))
    if not left:
        return
    base = (write_base if name.startswith("cosmos3") else write_sd3_base)(tmp_path / "base")
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {n}\n" for n in range(48)))
    values = {
        "rl.init_from": "base", "model.vae": "base/vae", "data.prompt_file": "prompts.txt",
        "reward.providers.0.url": "http://127.0.0.1:8000", "reward.providers.0.revision": "r1",
    }  # fmt: skip
    env = {VARIABLES[key]: values[key] for key in left}
    assert validate(name, tmp_path, env) == (0, [])
    # The same as a distributed checkpoint brings neither VAE nor tokenizer, and text encoders can come from nowhere.
    write_shards(base, tmp_path / "shards")
    env[VARIABLES["rl.init_from"]] = "shards"
    if name.startswith("cosmos3"):
        assert validate(name, tmp_path, env) == (3, [("model.tokenizer", "tokenizer-missing")])
        assert validate(name, tmp_path, env | {"NFTCTL_MODEL__TOKENIZER": "base/tokenizer"}) == (0, [])
    else:
        assert validate(name, tmp_path, env) == (3, [("rl.init_from", "text-encoder-missing")])
