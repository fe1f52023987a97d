"""`--max-restarts`: which endings another attempt may outlive, how often, and how long room is waited for.

The attempts themselves are played: real ones are killed in tests/soak/test_nodes.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nftctl.cli import restarts
from nftctl.cli.console import Console
from nftctl.cli.restarts import Attempts
from nftctl.cli.signals import RESTARTS_LEFT, TYPED
from nftctl.engine import cluster
from nftctl.engine.lost import RanksLost, noted, read_loss
from nftctl.errors import EnvironmentUnfit, TrainingFailed
from nftctl.profile.schema import Grid, Profile

from .program import environment, nftctl


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[list[str]]]]:
    """`played(endings, restarts)`: attempts that end as listed, (exit code, what was lost); the code and all calls."""
    monkeypatch.setattr(restarts, "PAUSE_S", 0.05)

    def play(
        endings: Sequence[tuple[int, str]], allowed: int, *, wait: float = 5, stop: bool = False, json_: bool = False
    ) -> tuple[int, list[list[str]]]:
        calls: list[list[str]] = []
        run, left = tmp_path / "run", list(endings)
        (run / "logs").mkdir(parents=True)

        def attempt(self: Attempts, words: Sequence[str]) -> int:
            calls.append(list(words))
            code, lost = left.pop(0)
            said = {"command": words[0], "ok": not code, "exit_code": code, "own": len(calls)}
            said |= {"error": {"message": lost}} if code == 8 else {}
            self.spoken.append("" if code < 0 else json.dumps(said) if json_ else f"output {len(calls)}\n")
            if lost == "no attempt" or code == 8:
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
        code = Attempts(Console(json=json_), run, profile, allowed, ["--set", "a=1"]).go(["launch", "x"])
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


def test_the_object_says_how_many_restarts_there_were(
    played: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played([(7, "node b is gone"), (7, "rank 1 died"), (0, "")], 3, json_=True)
    document = json.loads(capsys.readouterr().out)
    assert document == {"command": "launch", "ok": True, "exit_code": 0, "own": 3, "restarts": 2}


def test_a_run_that_needs_no_restart_says_so(played: Any, capsys: pytest.CaptureFixture[str]) -> None:
    played([(7, "")], 3, json_=True)
    document = json.loads(capsys.readouterr().out)
    assert document == {"command": "launch", "ok": False, "exit_code": 7, "own": 1, "restarts": 0}


def test_an_attempt_that_was_killed_leaves_an_object_all_the_same(
    played: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    played([(7, "rank 1 died"), (-9, "")], 1, json_=True)
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["command"], document["ok"], document["exit_code"]) == ("launch", False, 137)
    assert document["restarts"] == 1
    assert document["error"]["message"] == "the process of the run was ended by SIGKILL"
    # It had no time to say how to go on.
    assert "nftctl resume" in document["error"]["hint"]
    assert "nftctl resume" in said.err


def test_the_way_back_is_said_when_there_is_no_room(
    played: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def find(*_: Any) -> None:
        raise EnvironmentUnfit("4 ranks need 4 CPU", hint="wait")

    monkeypatch.setattr(cluster, "find_cluster", find)
    (tmp_path / "run/checkpoints/step_000004").mkdir(parents=True)
    played([(7, "node b is gone")], 3, wait=0.1, json_=True)
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["exit_code"], document["restarts"]) == (8, 0)
    assert document["error"]["message"] == "no room to go on within 0 s: 4 ranks need 4 CPU"
    way = f"go on with: nftctl resume {tmp_path}/run --set a=1"
    assert document["error"]["hint"] == f"wait; {way}"
    assert said.err.count(way) == 1


def test_the_way_back_is_said_when_a_lost_run_was_stopped(played: Any, capsys: pytest.CaptureFixture[str]) -> None:
    played([(7, "rank 1 died")], 5, stop=True)
    assert capsys.readouterr().err.count("go on with: nftctl resume") == 1


@pytest.mark.parametrize(
    ("error", "left", "expected"),
    [
        (RanksLost("rank 1 died"), "2", True),
        (RanksLost("rank 1 died"), "0", False),
        (RanksLost("rank 1 died"), None, False),
        (TrainingFailed("the gradient is nan"), "2", False),
    ],
)
def test_only_a_loss_that_is_gone_on_from_leaves_out_the_way_back(
    error: TrainingFailed, left: str | None, expected: bool
) -> None:
    assert restarts.goes_on_by_itself(error, {} if left is None else {RESTARTS_LEFT: left}) is expected


def test_an_attempt_knows_how_many_may_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Process:
        returncode = 0

        def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
            found.append(env[RESTARTS_LEFT])
            assert json.loads(env[TYPED]) == sys.argv

        def communicate(self) -> tuple[str, None]:
            return "", None

    monkeypatch.setattr(subprocess, "Popen", Process)
    attempts = Attempts(Console(), tmp_path, Profile(), 2)
    for used in (0, 1, 2):
        attempts.used = used
        attempts._try(["launch"])
    assert found == ["2", "1", "0"]


TREE = """
import os, sys
from pathlib import Path
from nftctl.cli import restarts
from nftctl.cli.console import Console
from nftctl.profile.schema import Profile

sys.executable = sys.argv[1]
attempts = restarts.Attempts(Console(), Path("run"), Profile(), 1)
sys.exit(attempts.go(["launch"]))
"""

ATTEMPT = """#!{python}
import os, time
from nftctl.cli.signals import StopSignals

asked = []
with StopSignals() as signals:
    signals.arm(asked.append, lambda: 11)
    open("ready", "w").write(str(os.getpid()))
    while not os.path.exists("step-done"):
        time.sleep(0.01)
    open("saved", "w").write(str(asked))
raise SystemExit(128 + asked[0])
"""


@pytest.mark.parametrize("twice", [False, True])
def test_a_job_servers_stop_lets_the_run_save(tmp_path: Path, twice: bool) -> None:
    """It tells the whole tree of processes at once, and the attempt hears the same word from above once more."""
    attempt = tmp_path / "attempt"
    attempt.write_text(ATTEMPT.format(python=sys.executable))
    attempt.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", TREE, str(attempt)], cwd=tmp_path, env=environment(), text=True, stderr=subprocess.PIPE
    )
    while not (tmp_path / "ready").exists() or not (tmp_path / "ready").read_text():
        time.sleep(0.01)
    assert process.stderr
    try:
        for pid in (int((tmp_path / "ready").read_text()), process.pid):
            os.kill(pid, signal.SIGTERM)
        while "finishing step 12, then saving" not in process.stderr.readline():
            pass
        if twice:
            # A person who means it tells the process that they started, and may have to again: a signal that comes
            # before the former one was looked at is the same one to the kernel.
            end = time.monotonic() + 20
            while process.poll() is None and time.monotonic() < end:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
        else:
            time.sleep(0.2)  # for the same word from above
            (tmp_path / "step-done").touch()
        process.communicate(timeout=30)
        # One more that comes when it has left already ends it as it ends any process.
        assert process.returncode in ((143, -signal.SIGTERM) if twice else (143,))
        assert (tmp_path / "saved").exists() is not twice
    finally:
        (tmp_path / "step-done").touch()  # also where it heard nothing
        process.kill()


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


def test_a_place_that_has_room_and_stays_unfit_is_given_up(
    played: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A GPU that fell off its bus, say: a Ray of one's own always has room."""
    monkeypatch.setattr(restarts, "PAUSE_S", 0.6)
    (tmp_path / "run/checkpoints/step_000004").mkdir(parents=True)
    endings = [(7, "rank 1 died"), (8, "4 GPUs are needed"), (8, "4 GPUs are needed")]
    code, calls = played(endings, 3, wait=1, json_=True)
    assert (code, len(calls)) == (8, 3)
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["error"]["message"] == "no attempt could go on within 1 s: 4 GPUs are needed"
    assert document["restarts"] == 0
    assert said.err.count("go on with: nftctl resume") == 1


def test_the_first_attempt_of_a_run_that_took_another_ones_place_is_one(tmp_path: Path) -> None:
    """--auto-resume moves a run without a checkpoint away, and begins at attempt_1 again."""
    attempts = Attempts(Console(), tmp_path / "run", Profile(), 1)

    def begin(message: str) -> None:
        folder = tmp_path / "run/logs/attempt_1"
        folder.mkdir(parents=True)
        (folder.parent / "latest").symlink_to(folder.name)
        (folder / "lost.json").write_text(json.dumps({"message": message}))

    begin("yesterday")
    before = attempts._attempt()
    assert attempts._lost(7, before) == ""
    (tmp_path / "run").rename(tmp_path / "run.unsaved-1")
    assert attempts._lost(7, before) == ""
    begin("today")
    assert attempts._lost(7, before) == "today"


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
