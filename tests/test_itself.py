"""Processes that the program starts are of the program itself, whatever lies in the working folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nftctl import __version__, itself
from tests.cli.program import nftctl
from tests.conftest import ROOT, clean_environment

FOREIGN = 'raise SystemExit("another nftctl")\n'


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with another nftctl, and a file that is called like a module of Python's own."""
    (tmp_path / "nftctl").mkdir()
    (tmp_path / "nftctl" / "__init__.py").write_text(FOREIGN)
    (tmp_path / "random.py").write_text('raise SystemExit("my random")\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_lies_in_the_working_folder_is_not_run(foreign: Path) -> None:
    command = itself.command("nftctl", "--version")
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, __version__ in done.stdout) == (0, True), done.stderr
    plain = [word for word in command if word != "-P"]
    other = subprocess.run(plain, env=clean_environment(), capture_output=True, text=True, check=False)
    assert other.stderr == "another nftctl\n"


def test_a_source_tree_is_run_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(itself.folder().parent)
    assert "-P" not in itself.command("nftctl")
    assert itself.folder() == ROOT / "nftctl"


def test_a_scorer_of_a_run_is_the_programs_own(foreign: Path) -> None:
    answer = nftctl("reward-ping", "tiny_t2i_cpu", cwd=foreign)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("restarts", [[], ["--max-restarts", "1"]])
def test_a_launch_beside_another_nftctl_is_refused_before_anything_is_there(foreign: Path, restarts: list[str]) -> None:
    answer = nftctl("launch", "tiny_t2i_cpu", "--steps", "1", *restarts, cwd=foreign)
    assert answer.returncode == 8, answer.stderr
    assert f"the working folder, {foreign / 'nftctl'}" in answer.stderr
    assert not (foreign / "runs").exists()
