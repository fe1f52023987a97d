"""docs/ci.sh as it stands: clean by shellcheck, honest about failures, and right on a real run of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .program import ROOT, environment, nftctl, the_object

SCRIPT = ROOT / "docs" / "ci.sh"
ORDER = ["reward-ping", "validate", "launch", "inspect-checkpoint", "resume"]


def program(folder: Path, name: str, body: str) -> None:
    """An executable shell script `name` in `folder`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run_script(bin_folder: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The script by the strictest shell there is, with `bin_folder` in front of PATH."""
    env = environment({"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"})
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    answer = subprocess.run([shellcheck, "--shell", "sh", SCRIPT], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, "")
    assert os.access(SCRIPT, os.X_OK)


def test_the_first_failing_command_ends_it_with_its_own_code(tmp_path: Path, bin_folder: Path) -> None:
    program(bin_folder, "jq", "exit 0")
    for place, failing in enumerate(ORDER):
        calls = tmp_path / f"calls-{failing}"
        program(bin_folder, "nftctl", f'echo "$1" >> {calls}\ntest "$1" != {failing} || exit {place + 3}')
        answer = run_script(bin_folder, "out", cwd=tmp_path)
        assert answer.returncode == place + 3
        assert calls.read_text().split() == ORDER[: place + 1]
        assert answer.stdout.count("is fine") == place


def test_an_answer_that_is_not_as_expected_ends_it(tmp_path: Path, bin_folder: Path) -> None:
    program(bin_folder, "nftctl", "echo '{\"ok\": true}'")
    program(bin_folder, "jq", 'for file; do :; done\ntest "$file" != launch.json')
    answer = run_script(bin_folder, "out", cwd=tmp_path)
    assert answer.returncode == 1
    assert "ci: launch.json is not as expected: .ok and .summary.steps ==" in answer.stderr
    assert answer.stdout.splitlines() == ["ci: ping is fine", "ci: validate is fine"]


def test_without_a_folder_nothing_stays(tmp_path: Path, bin_folder: Path) -> None:
    program(bin_folder, "nftctl", f'pwd > {tmp_path}/where\ntest "$1" != validate')
    program(bin_folder, "jq", "exit 0")
    assert run_script(bin_folder, cwd=tmp_path).returncode == 1
    assert not Path((tmp_path / "where").read_text().strip()).exists()


@pytest.mark.ray
def test_the_script_as_it_stands(tmp_path: Path, bin_folder: Path) -> None:
    program(bin_folder, "nftctl", f'exec {sys.executable} -m nftctl "$@"')
    answer = run_script(bin_folder, "out", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        f"ci: {name} is fine" for name in ("ping", "validate", "launch", "inspect", "resume")
    ]
    # The same conditions again, for machines without jq.
    documents = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert all(document["ok"] for document in documents.values())
    assert documents["launch"]["summary"]["steps"] == {"from": 0, "to": 5, "total": 5}
    assert documents["inspect"]["checkpoint"]["world_size"] == 2
    assert documents["resume"]["summary"]["steps"] == {"from": 5, "to": 7, "total": 7}
    rows = (tmp_path / "out/runs/ci/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    shown = the_object(nftctl("inspect-checkpoint", "ci", "--verify", "--json", cwd=tmp_path / "out"))
    assert (shown["complete"], shown["checkpoint"]["step"]) == (True, 7)
    assert {path.name for path in (tmp_path / "out/runs/ci/logs").iterdir()} == {"attempt_1", "attempt_2", "latest"}
