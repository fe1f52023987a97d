"""The shipped completion scripts are what the program prints, and TAB offers what exists."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nftctl.cli.completion import SCRIPTS, script
from nftctl.profile.load import bundled_profiles
from nftctl.reward.scorers import SCORERS
from tests.run.make import make_run

from .program import ROOT, environment, nftctl


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_shipped_script_is_the_program_s_own(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert (ROOT / "completions" / SCRIPTS[shell]).read_text() == script(shell)


def test_zsh_finds_its_mark_on_the_first_line() -> None:
    assert (ROOT / "completions" / "_nftctl").read_text().startswith("#compdef nftctl\n")


def offers(folder: Path, line: str) -> list[str]:
    """What TAB at the end of `line` offers."""
    env = {"_NFTCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return nftctl(cwd=folder, env=env).stdout.split()


def test_commands_and_options(tmp_path: Path) -> None:
    assert offers(tmp_path, "nftctl re") == ["resume", "reward-ping", "reward-serve", "report"]
    assert offers(tmp_path, "nftctl launch --d") == ["--dry-run"]
    assert offers(tmp_path, "nftctl reward-serve --par") == []


def test_profiles_and_files(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "minefield").mkdir()
    assert set(offers(tmp_path, "nftctl validate ")) == {*bundled_profiles(), "mine.toml", "minefield/"}
    assert offers(tmp_path, "nftctl launch mine") == ["mine.toml", "minefield/"]
    assert offers(tmp_path, f"nftctl launch {tmp_path}/mine") == [f"{tmp_path}/mine.toml", f"{tmp_path}/minefield/"]
    assert offers(tmp_path, "nftctl launch nowhere/x") == []
    # Where only a bundled profile will do, no file is offered.
    assert offers(tmp_path, "nftctl profiles ") == list(bundled_profiles())
    assert offers(tmp_path, "nftctl init --from t") == ["tiny_t2i_cpu"]


def test_runs_keys_and_scorers(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "first")
    make_run(tmp_path / "runs", "second")
    assert offers(tmp_path, "nftctl resume f") == ["first"]
    assert offers(tmp_path, "nftctl inspect-checkpoint runs/s") == ["runs/second/"]
    assert offers(tmp_path, "nftctl inspect-checkpoint first --diff s") == ["second"]
    assert offers(tmp_path, "nftctl export f") == ["first"]
    assert offers(tmp_path, "nftctl export first --to ") == ["lora", "merged", "diffusers"]
    assert offers(tmp_path, "nftctl export first --weights e") == ["ema"]
    assert offers(tmp_path, "nftctl sample first --device c") == ["cpu", "cuda"]
    assert offers(tmp_path, "nftctl validate --set rl.bet") == ["rl.beta="]
    assert "model.lora.rank=" in offers(tmp_path, "nftctl validate --set model.lora.")
    assert offers(tmp_path, "nftctl reward-serve --scorer ") == sorted(SCORERS)


def test_bash_completes_with_the_shipped_script(tmp_path: Path) -> None:
    command = tmp_path / "nftctl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m nftctl "$@"\n')
    command.chmod(0o755)
    program = """
source "$1"
COMP_WORDS=(nftctl inspect-checkpoint --ver); COMP_CWORD=2
_nftctl_completion nftctl
printf '%s\\n' "${COMPREPLY[@]}"
complete -p nftctl
"""
    env = environment({"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    script_file = ROOT / "completions" / "nftctl.bash"
    arguments = ["bash", "--norc", "-c", program, "bash", str(script_file)]
    answer = subprocess.run(arguments, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == ["--verify", "complete -o default -F _nftctl_completion nftctl"]
