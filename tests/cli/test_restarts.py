"""`--max-restarts`: which endings another attempt may outlive, how often, and how long room is waited for.

The attempts themselves are played: real ones are killed in tests/soak/test_nodes.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nftctl.cli import restarts
from nftctl.cli.console import Console
from nftctl.cli.restarts import Attempts
from nftctl.engine import cluster
from nftctl.engine.lost import RanksLost, noted, read_loss
from nftctl.errors import EnvironmentUnfit, TrainingFailed
from nftctl.profile.schema import Grid, Profile

from .program import nftctl


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[list[str]]]]:
    """`played(endings, restarts)`: attempts that end as listed, (exit code, what was lost); the code and all calls."""
    monkeypatch.setattr(restarts, "PAUSE_S", 0.05)

    def play(
        endings: Sequence[tuple[int, str]], allowed: int, *, wait: float = 5, stop: bool = False
    ) -> tuple[int, list[list[str]]]:
        calls: list[list[str]] = []
        run, left = tmp_path / "run", list(endings)
        (run / "logs").mkdir(parents=True)

        def attempt(self: Attempts, words: Sequence[str]) -> int:
            calls.append(list(words))
            code, lost = left.pop(0)
            self.spoken.append(f"output {len(calls)}\n")
            if lost == "no attempt":
                return code
            folder = run / "logs" / f"attempt_{len(calls)}"
            folder.mkdir()
            (run / "logs" / "latest").unlink(missing_ok=True)
            (run / "logs" / "latest").symlink_to(folder.name)
            if lost:
                (folder / "lost.json").write_text(json.dumps({"message": lost}))
            if stop:
                self.stopped = signal.SIGTERM
            return code

        monkeypatch.setattr(Attempts, "_try", attempt)
        profile = Profile(grid=Grid(restart_wait_s=wait))
        code = Attempts(Console(), run, profile, allowed, ["--set", "a=1"]).go(["launch", "x"])
        assert left == []
        return code, calls

    return play


def test_a_loss_is_gone_on_from_as_often_as_allowed(played: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, calls = played([(7, "node b is gone"), (7, "rank 1 died"), (0, "")], 3)
    assert code == 0
    resume = ["resume", calls[1][1], "--set", "a=1", "--restart"]
    assert calls == [["launch", "x"], [*resume, "node b is gone"], [*resume, "rank 1 died"]]
    said = capsys.readouterr()
    assert "warning: node b is gone; restart 1 of 3" in said.err
    assert "warning: rank 1 died; restart 2 of 3" in said.err
    assert said.out == "output 3\n"  # what was asked for, once


def test_no_restart_is_left(played: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, calls = played([(7, "rank 1 died"), (7, "rank 0 died")], 1)
    assert (code, len(calls)) == (7, 2)
    assert "no restart is left of 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ending",
    [
        (0, ""),
        (7, ""),  # a gradient that is not finite, an alarm: it would only be repeated
        (8, "no attempt"),
        (3, "no attempt"),
        (4, ""),
        (5, ""),
        (130, ""),
        (143, ""),
        (-9, "no attempt"),  # killed before it was a run
    ],
)
def test_everything_else_ends_the_run(played: Any, ending: tuple[int, str]) -> None:
    code, calls = played([ending], 5)
    assert (code, len(calls)) == (ending[0], 1)


def test_a_driver_that_was_killed_is_a_loss(played: Any) -> None:
    code, calls = played([(-6, ""), (0, "")], 1)
    assert (code, len(calls)) == (0, 2)
    assert calls[1][-1] == "the process of the run was ended by SIGABRT"


def test_a_stopped_run_is_not_gone_on_with(played: Any) -> None:
    assert played([(7, "rank 1 died")], 5, stop=True) == (143, [["launch", "x"]])


def test_room_is_waited_for_and_the_wait_is_said(
    played: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [EnvironmentUnfit("no room yet"), EnvironmentUnfit("no room yet"), None, None]

    def find(*_: Any) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(cluster, "find_cluster", find)
    # The place turns out unfit once more, which costs no restart.
    code, calls = played([(7, "node b is gone"), (8, "no attempt"), (0, "")], 1)
    assert (code, len(calls), answers) == (0, 3, [])
    assert capsys.readouterr().err.count("waiting for room, 5 s at the most: no room yet") == 1


def test_the_wait_ends(played: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def find(*_: Any) -> None:
        raise EnvironmentUnfit("4 ranks need 4 CPU", hint="wait")

    monkeypatch.setattr(cluster, "find_cluster", find)
    code, calls = played([(7, "node b is gone")], 3, wait=0.2)
    assert (code, len(calls)) == (8, 1)
    assert "no room to go on within 0 s: 4 ranks need 4 CPU" in capsys.readouterr().err


def test_only_losses_leave_word(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed), noted(tmp_path):
        raise TrainingFailed("step 3: the gradient norm is nan")
    assert read_loss(tmp_path) is None
    with pytest.raises(RanksLost), noted(tmp_path):
        raise RanksLost("rank 1 died", rank=1)
    loss = read_loss(tmp_path)
    assert loss is not None
    assert loss.message == "rank 1 died"


def test_what_cannot_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    answer = nftctl("launch", "-", "--max-restarts", "1", cwd=tmp_path)
    assert answer.returncode == 2
    assert "give it as a file and not as `-`" in answer.stderr
    answer = nftctl("resume", "x", "--fork", "y", "--max-restarts", "1", cwd=tmp_path)
    assert answer.returncode == 2
    assert "fork without it" in answer.stderr
