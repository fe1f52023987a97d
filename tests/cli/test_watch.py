"""A run seen from outside: the installed command on run folders that are finished, that grow, and that are taken up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nftctl.cli.console import Console
from nftctl.cli.progress import PlainReporter
from nftctl.errors import RewardFailed
from nftctl.run.directory import RunDirectory
from nftctl.run.ending import recorded
from nftctl.run.rows import JsonLines
from tests.run.make import snapshot, write_checkpoint

from .program import environment, nftctl, the_object
from .terminal import plain, read_terminal


def row(step: int, reward: float = 0.5, **more: float) -> dict[str, Any]:
    values = {"train/reward_mean": reward, "train/loss": 2.0, "timer/step": 0.5, "reward/dropped_groups": 0.0}
    return {"step": step, **values, **more}


ALARM = {"alarm": "clamp", "message": "60% are at the clamp", "advice": "widen it", "value": 0.6, "limit": 0.5}


class Growing:
    """A run folder as a run writes it, an attempt at a time."""

    def __init__(self, path: Path, total: int = 4) -> None:
        resolved = {"data": {"rows_per_step": 4}, "rl": {"group_size": 2}}
        self.run = RunDirectory.create(
            path.parent, path.name, profile_text="", resolved=resolved, record={"total_steps": total}
        )
        self.begin(0)

    def begin(self, step: int) -> None:
        """An attempt that goes on from `step`."""
        self.attempt = self.run.new_attempt()
        self.metrics, self.alarms, self.evaluations = (
            JsonLines(self.run.path / f"{name}.jsonl", keep_through=step)
            for name in ("metrics", "alarms", "evaluations")
        )

    def steps(self, *numbers: int, reward: float = 0.5) -> None:
        for number in numbers:
            self.metrics.append(row(number, reward))


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    return Growing(tmp_path / "runs" / "first")


def finished(growing: Growing) -> None:
    """Four steps with everything that can be said of them."""
    growing.evaluations.append({"step": 0, "eval/reward": 0.25})
    with recorded(growing.attempt):
        growing.steps(1)
        growing.metrics.append(row(2, 0.625, **{"reward/dropped_groups": 1.0}))
        growing.alarms.append({"step": 2, **ALARM})
        growing.evaluations.append({"step": 2, "eval/reward": 0.375})
        growing.alarms.append({"step": 2, **ALARM, "alarm": "reward-hacking"})
        growing.steps(3, 4)


FINISHED = [
    "held-out reward 0.250 at step 0",
    "step 1/4  reward 0.5  loss 2  0.50 s/step  eta 0:02",
    "step 2/4  reward 0.625  loss 2  0.50 s/step  eta 0:01",
    "warning: step 2: 1 groups dropped, their scores failed",
    "warning: step 2: clamp: 60% are at the clamp; widen it",
    "held-out reward 0.375 at step 2",
    "warning: step 2: reward-hacking: 60% are at the clamp; widen it",
    "step 3/4  reward 0.5  loss 2  0.50 s/step  eta 0:00",
    "step 4/4  reward 0.5  loss 2  0.50 s/step  eta 0:00",
    "finished after step 4 of 4",
]


def test_a_finished_run_is_told_from_its_beginning(growing: Growing, tmp_path: Path) -> None:
    finished(growing)
    before = snapshot(tmp_path)
    for target in ("first", "runs/first", "runs/first/"):
        answer = nftctl("watch", target, cwd=tmp_path)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert answer.stdout.splitlines() == FINISHED
    assert snapshot(tmp_path) == before


def test_once_shows_how_it_stands(growing: Growing, tmp_path: Path) -> None:
    finished(growing)
    answer = nftctl("watch", "first", "--once", cwd=tmp_path)
    assert answer.stdout.splitlines() == [
        "step 4/4  reward 0.5  loss 2  0.50 s/step  eta 0:00",
        "held-out reward 0.375 at step 2",
        "warning: step 2: reward-hacking: 60% are at the clamp; widen it",
        "finished after step 4 of 4",
    ]


def test_once_as_an_object(growing: Growing, tmp_path: Path) -> None:
    finished(growing)
    document = the_object(nftctl("watch", "first", "--once", "--json", cwd=tmp_path))
    assert {key: document[key] for key in list(document)[5:]} == {
        "run": "runs/first",
        "state": "finished",
        "reason": None,
        "run_exit_code": 0,
        "attempt": 1,
        "steps": {"done": 4, "total": 4},
        "seconds_per_step": 0.5,
        "train": row(4),
        "eval": {"before": {"step": 0, "eval/reward": 0.25}, "last": {"step": 2, "eval/reward": 0.375}},
        "warning": "step 2: reward-hacking: 60% are at the clamp; widen it",
    }


def test_a_run_that_has_said_nothing_yet(growing: Growing, tmp_path: Path) -> None:
    with growing.run.lock():
        document = the_object(nftctl("watch", "first", "--once", "--json", cwd=tmp_path))
        text = nftctl("watch", "first", "--once", cwd=tmp_path).stdout
    assert (document["state"], document["steps"]) == ("running", {"done": 0, "total": 4})
    assert [document[key] for key in ("train", "eval", "warning", "run_exit_code")] == [None] * 4
    assert text.splitlines() == ["step 0/4", "running, after step 0 of 4"]


def refused() -> None:
    raise RewardFailed("the service at http://x does not answer")


def interrupted() -> None:
    raise KeyboardInterrupt


def broken() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("how", "line", "facts"),
    [
        (refused, "failed after step 2 of 4: the service at http://x does not answer", ("failed", 4)),
        (interrupted, "stopped at once after step 2 of 4", ("stopped", 130)),
        (broken, "failed after step 2 of 4: ZeroDivisionError", ("failed", 1)),
        (None, "stopped by SIGTERM after step 2 of 4", ("stopped", 143)),
    ],
)
def test_how_a_run_ended_is_said_and_is_not_the_exit_code(
    growing: Growing, tmp_path: Path, how: Callable[[], None] | None, line: str, facts: tuple[str, int]
) -> None:
    growing.steps(1, 2)
    try:
        with recorded(growing.attempt) as ending:
            if how is None:
                ending.state, ending.reason = "stopped", "SIGTERM"
            else:
                how()
    except (RewardFailed, KeyboardInterrupt, ZeroDivisionError):
        pass
    answer = nftctl("watch", "first", cwd=tmp_path)
    assert answer.returncode == 0
    assert answer.stdout.splitlines()[-1] == line
    document = the_object(nftctl("watch", "first", "--once", "--json", cwd=tmp_path))
    assert (document["state"], document["run_exit_code"]) == facts


def test_a_run_without_a_word_has_crashed_unless_its_last_checkpoint_is_there(growing: Growing, tmp_path: Path) -> None:
    growing.steps(1, 2, 3, 4)
    crashed = "crashed after step 4 of 4: the process that held the run is gone and left no word"
    for arguments in (("watch", "first"), ("watch", "first", "--once")):
        answer = nftctl(*arguments, cwd=tmp_path)
        assert (answer.returncode, answer.stdout.splitlines()[-1]) == (0, crashed)
    write_checkpoint(growing.run.checkpoints, 4)
    assert nftctl("watch", "first", cwd=tmp_path).stdout.splitlines()[-1] == "finished after step 4 of 4"


@pytest.mark.parametrize("garbage", ["", "[]", "{}", '{"state": 3', "null"])
def test_a_damaged_ending_is_none(growing: Growing, tmp_path: Path, garbage: str) -> None:
    growing.steps(1)
    (growing.attempt / "ending.json").write_text(garbage)
    answer = nftctl("watch", "first", "--once", cwd=tmp_path)
    assert answer.stdout.splitlines()[-1].startswith("crashed after step 1 of 4")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere",), 5, "no run folder and no run named nowhere"),
        (("frist",), 5, "did you mean first?"),
        (("runs",), 5, "runs is not a run folder"),
        (("first", "--json"), 2, "--json needs --once"),
        (("",), 2, "is empty"),
        ((), 2, "Missing argument"),
    ],
)
def test_what_is_no_run_is_refused(
    growing: Growing, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    answer = nftctl("watch", *arguments, cwd=tmp_path)
    assert answer.returncode == code
    assert message in answer.stderr


# ---- while it runs


@pytest.fixture
def watching(growing: Growing, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command on the run, which this test holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nftctl", "watch", "first"],
        cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def test_a_run_is_followed_to_its_end(growing: Growing, request: pytest.FixtureRequest) -> None:
    with growing.run.lock():
        growing.steps(1)
        process = request.getfixturevalue("watching")
        assert lines(process, 1) == ["step 1/4  reward 0.5  loss 2  0.50 s/step  eta 0:02"]
        with recorded(growing.attempt):
            growing.steps(2, 3)
            assert [line[:8] for line in lines(process, 2)] == ["step 2/4", "step 3/4"]
            # Half a line is of a row that is being written.
            whole = json.dumps(row(4)).encode() + b"\n"
            with growing.run.metrics.open("ab", buffering=0) as file:
                file.write(whole[:20])
                growing.evaluations.append({"step": 3, "eval/reward": 0.5})
                assert lines(process, 1) == ["held-out reward 0.500 at step 3"]
                file.write(whole[20:])
            assert lines(process, 1)[0].startswith("step 4/4")
        assert process.poll() is None
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "finished after step 4 of 4\n", "")


def test_a_resume_takes_steps_back_and_tells_them_again(growing: Growing, request: pytest.FixtureRequest) -> None:
    with growing.run.lock():
        growing.steps(1, 2, 3)
        growing.evaluations.append({"step": 1, "eval/reward": 0.25})
        growing.evaluations.append({"step": 3, "eval/reward": 0.125})
        process = request.getfixturevalue("watching")
        assert len(lines(process, 5)) == 5
        growing.begin(1)
        growing.steps(2, 3, reward=0.75)
        growing.evaluations.append({"step": 3, "eval/reward": 0.5})
        with recorded(growing.attempt):
            growing.steps(4)
        assert lines(process, 5) == [
            "attempt 2 goes on from step 1",
            "step 2/4  reward 0.75  loss 2  0.50 s/step  eta 0:01",
            "step 3/4  reward 0.75  loss 2  0.50 s/step  eta 0:00",
            "held-out reward 0.500 at step 3",
            "step 4/4  reward 0.5  loss 2  0.50 s/step  eta 0:00",
        ]
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "finished after step 4 of 4\n")


def test_a_run_that_is_removed_is_no_run_any_more(growing: Growing, request: pytest.FixtureRequest) -> None:
    with growing.run.lock():
        growing.steps(1)
        process = request.getfixturevalue("watching")
        assert len(lines(process, 1)) == 1
        growing.run.path.rename(growing.run.path.with_name("elsewhere"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, "")
    assert err == "error: cannot read runs/first: No such file or directory\n"


def test_an_attempt_that_takes_nothing_back(growing: Growing, request: pytest.FixtureRequest) -> None:
    with growing.run.lock():
        growing.steps(1, 2)
        process = request.getfixturevalue("watching")
        assert len(lines(process, 2)) == 2
        growing.begin(2)
        assert lines(process, 1) == ["attempt 2 goes on from step 2"]
        growing.steps(3)
        assert lines(process, 1)[0].startswith("step 3/4")


def test_a_run_that_is_killed_has_crashed(growing: Growing, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code = (
        "import sys, time; from pathlib import Path; from nftctl.run.directory import RunDirectory\n"
        "with RunDirectory(Path('runs/first')).lock(): print('held', flush=True); time.sleep(300)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    growing.steps(1)
    process = request.getfixturevalue("watching")
    assert lines(process, 1)[0].startswith("step 1/4")
    document = the_object(nftctl("watch", "first", "--once", "--json", cwd=tmp_path))
    assert document["state"] == "running"
    holder.kill()
    holder.communicate()
    out, _ = process.communicate(timeout=60)
    words = "crashed after step 1 of 4: the process that held the run is gone and left no word\n"
    assert (process.returncode, out) == (0, words)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_watching_and_not_the_run(
    growing: Growing, tmp_path: Path, request: pytest.FixtureRequest, signum: int, code: int
) -> None:
    with growing.run.lock():
        growing.steps(1)
        before = snapshot(tmp_path)
        process = request.getfixturevalue("watching")
        assert len(lines(process, 1)) == 1
        process.send_signal(signum)
        process.communicate(timeout=60)
        assert process.returncode == code
        assert snapshot(tmp_path) == before
        assert growing.run.holder() == f"a running nftctl (process {os.getpid()})"


def test_a_reader_that_has_enough_is_no_failure(growing: Growing, tmp_path: Path) -> None:
    finished(growing)
    command = f"{sys.executable} -m nftctl watch first | head -1"
    answer = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, FINISHED[0] + "\n", "")


# ---- on a terminal

SETTINGS = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}


def test_the_display_follows_a_run(growing: Growing, tmp_path: Path) -> None:
    told: list[int] = []

    def meanwhile(process: subprocess.Popen[bytes], seen: str) -> tuple[int, int] | None:
        """Goes on as soon as what came before is drawn."""
        text = plain(seen)
        if not told and "2/4" in text:
            told.append(3)
            growing.steps(3)
            growing.alarms.append({"step": 3, **ALARM})
        elif told == [3] and "! step 3: clamp" in text:
            told.append(4)
            with recorded(growing.attempt):
                growing.steps(4)
            lock.__exit__(None, None, None)
        return None

    finished_before = {"step": 1, "eval/reward": 0.25}
    growing.steps(1, 2)
    growing.evaluations.append(finished_before)
    lock = growing.run.lock()
    lock.__enter__()
    command = [sys.executable, "-m", "nftctl", "watch", "first"]
    seen = read_terminal(command, tmp_path, environment(SETTINGS), stdout=True, meanwhile=meanwhile, size=(24, 80))
    text = plain(seen)
    assert told == [3, 4]
    assert text.count("warning: step 3: clamp: 60% are at the clamp; widen it") == 1
    assert "─ first · running ─" in text
    last = text[text.rindex("╭") :].splitlines()
    assert last[0].startswith("╭─ first · finished ─")
    assert last[1].startswith("│ step      4/4  ━━━")
    assert "16 samples/s" in text
    assert last[-1] == "finished after step 4 of 4"
    # Nothing is wider than the terminal, or it would be torn.
    assert max(len(line) for line in text.replace("\r", "\n").split("\n")) <= 80
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


def test_the_display_takes_up_another_width(growing: Growing, tmp_path: Path) -> None:
    def meanwhile(process: subprocess.Popen[bytes], seen: str) -> tuple[int, int] | None:
        text = plain(seen)
        if not told and "1/4" in text:
            told.append(2)
            growing.steps(2)
            return 24, 64
        if told == [2] and "2/4" in text:
            told.append(3)
            with recorded(growing.attempt):
                growing.steps(3, 4)
            lock.__exit__(None, None, None)
        return None

    told: list[int] = []
    growing.steps(1)
    lock = growing.run.lock()
    lock.__enter__()
    command = [sys.executable, "-m", "nftctl", "watch", "first"]
    seen = read_terminal(command, tmp_path, environment(SETTINGS), stdout=True, meanwhile=meanwhile, size=(24, 90))
    frames = [line.strip() for line in plain(seen).replace("\r", "\n").split("\n") if line.startswith("╭")]
    assert len(frames[0]) == 90
    assert len(frames[-1]) == 64


def test_once_on_a_terminal_is_one_picture(growing: Growing, tmp_path: Path) -> None:
    finished(growing)
    command = [sys.executable, "-m", "nftctl", "watch", "first", "--once"]
    text = plain(read_terminal(command, tmp_path, environment(SETTINGS), stdout=True))
    assert "0.2500 -> 0.3750  +0.1250  step 0 -> 2" in text
    assert text.rstrip().endswith("finished after step 4 of 4")


def test_ctrl_c_gives_the_terminal_its_cursor_back(growing: Growing, tmp_path: Path) -> None:
    def meanwhile(process: subprocess.Popen[bytes], seen: str) -> tuple[int, int] | None:
        if "1/4" in seen and not asked:
            asked.append(1)
            process.send_signal(signal.SIGINT)
        return None

    asked: list[int] = []
    command = [sys.executable, "-m", "nftctl", "watch", "first"]
    growing.steps(1)
    with growing.run.lock():
        seen = read_terminal(
            command, tmp_path, environment(SETTINGS), code=130, stdout=True, meanwhile=meanwhile, size=(24, 80)
        )
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


# ---- beside the run itself


@pytest.mark.ray
def test_it_says_what_the_run_said(world4: Any, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nftctl.engine.loop import run_job
    from nftctl.engine.plan import plan_launch

    # Advantages that are all clamped, so that there is an alarm.
    sets = ('job.name="first"', "eval.samples_per_prompt=1", "eval.steps=2", "eval.every=2", "samples.prompts=0",
            "rl.advantage_low=-0.001", "rl.advantage_high=0.001")  # fmt: skip
    plan = plan_launch(tiny(4, sets, look=True), run_dir=tmp_path / "runs")
    run_job(plan, PlainReporter(Console()), world4)
    said = capsys.readouterr().err.splitlines()
    answer = nftctl("watch", "first", cwd=tmp_path)
    heard = answer.stdout.splitlines()
    assert heard[-1] == "finished after step 4 of 4"
    assert heard[:-1] == [line for line in said if line.startswith(("step ", "held-out ", "warning: "))]
    assert sum(line.startswith("warning: step 3: clamp: ") for line in heard) == 1
    assert sum(line.startswith("held-out ") for line in heard) == 3
    # Each evaluation is said to have begun, and what it found comes after.
    looks = [line for line in said if line.startswith(("evaluating ", "held-out "))]
    assert looks[::2] == [
        f"evaluating {when}: 12 held-out samples" for when in ("before the first step", "after step 2", "after step 4")
    ]
