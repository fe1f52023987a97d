"""Runs that are struck from outside, exactly in a stage that a rank's own log names, and that go on as a person would.

Shared by the two strikes of every test run and by the soak that deals out many more. A strike counts only when the
victim's log proves that it hit: otherwise it is dealt again in the attempt that follows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.manifest import read_manifest, verify
from tests.engine.test_runs import start
from tests.engine.test_world import promised, tensors_of

STAGES = ("rollout", "prepare", "reward", "backward", "optimizer", "save")
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
TRIES = 3
NAME = "killed"
_STAGE = re.compile(r"nftctl\.stage: step (\d+): (.+)\n")
_ROWS = re.compile(r"nftctl\.stage: step (\d+): rollout\n.*: rows (\d+) to (\d+)\n")
_numbers = itertools.count()


@dataclass(frozen=True)
class Strike:
    """Who is struck, by what, in which stage, from which step on.

    `who`: driver; rank N; group: the driver's process group, as a terminal does it; everybody: all processes at once.
    """

    who: str
    signum: signal.Signals
    stage: str
    step: int

    @property
    def log(self) -> str:
        """The log that shows the moment: the victim's, or rank 0's."""
        return f"rank_{self.who[5:] if self.who.startswith('rank') else 0}.log"


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def stages_of(log: Path) -> list[tuple[int, str]]:
    """(step, stage) in the order in which the rank began them."""
    return [(int(step), stage) for step, stage in _STAGE.findall(log.read_text())]


@dataclass
class Attempt:
    """One launch or resume: its process, and a mark in the environment of everything it started."""

    folder: Path
    arguments: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = f"kill-{os.getpid()}-{next(_numbers)}"
        self.process: subprocess.Popen[str] = start(self.folder, *self.arguments, TEST_MARK=self.mark, **self.env)
        self.run = self.folder / "runs" / NAME
        self.out = self.err = ""

    def family(self) -> dict[int, str]:
        """Command line by process id of everything that belongs to this attempt and lives."""
        found = {}
        for process in psutil.process_iter():
            if environment_of(process).get("TEST_MARK") == self.mark:
                with contextlib.suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found[process.pid] = " ".join(process.cmdline()).strip()
        return found

    def pid_of(self, rank: int) -> int:
        """The process id that the rank's log tells, once it is one of this attempt."""
        while self.process.poll() is None:
            log = self.run / "logs" / "latest" / f"rank_{rank}.log"
            with contextlib.suppress(OSError, psutil.Error):
                match = re.search(rf"rank {rank} of \d+ on cpu, pid (\d+)\n", log.read_text())
                if match and psutil.Process(int(match[1])).environ().get("TEST_MARK") == self.mark:
                    return int(match[1])
            time.sleep(0.1)
        raise AssertionError(f"ended with {self.finish()} before there were ranks: {self.err}")

    def finish(self, timeout: float = 180) -> int:
        """Wait for the end; returns the exit code."""
        try:
            out, err = self.process.communicate(timeout=timeout)
            self.out, self.err = self.out + out, self.err + err
        finally:
            if self.process.poll() is None:
                self.end()
        return self.process.returncode

    def end(self) -> None:
        """Kill what is left of this attempt, so that a failed test leaves nothing behind."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self, but: str = "nothing", timeout: float = 30) -> dict[int, str]:
        """What of this attempt is alive after its end, when it had some time to go."""
        end = time.monotonic() + timeout
        while left := {pid: name for pid, name in self.family().items() if not name.endswith(but)}:
            if time.monotonic() > end:
                return left
            time.sleep(0.2)
        return {}


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Watch with precedence over the busy ranks, where the system allows it."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -15)
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, usual)


def wait_for_stage(log: Path, stage: str, step: int, process: subprocess.Popen[str]) -> str | None:
    """Return when the rank has just begun `stage` of `step` or a later one; None when the run ends before."""
    tail = b""
    with log.open("rb") as file:
        for turn in itertools.count():
            chunk = file.read()
            if chunk:
                tail = (tail + chunk)[-4096:]
                found = _STAGE.findall(tail.decode(errors="replace"))
                if found and int(found[-1][0]) >= step and found[-1][1].split()[0] == stage:
                    return f"{found[-1][1]} {found[-1][0]}"
            elif turn % 1000 == 0 and process.poll() is not None:
                return None
            time.sleep(0.0003)
    raise AssertionError("never")


def last_stage(log: Path) -> str:
    step, stage = stages_of(log)[-1]
    return f"{stage} {step}"


@dataclass(frozen=True)
class Blow:
    """What a strike came to.

    at        the stage the victim was in when the signal had been sent; it hit when this is the aimed one
    end       the last stage in the victim's log
    """

    strike: Strike
    run: str
    resumed_from: str
    aimed: str
    at: str
    end: str
    code: int
    rows: int
    saved: int
    partials: list[int]
    out: str
    err: str
    seconds: float

    @property
    def hit(self) -> bool:
        """A dead rank says no more; a driver's ranks, in groups of their own, may finish the call that they are in."""
        dead = self.strike.who not in ("driver", "group") and self.strike.signum == signal.SIGKILL
        return self.aimed == self.at and (not dead or self.aimed == self.end)

    def cells(self) -> list[str]:
        s = self.strike
        partial = ",".join(map(str, self.partials)) or "-"
        return [
            self.run, s.who, s.signum.name[3:], self.aimed, self.at, self.end, "hit" if self.hit else "missed",
            str(self.rows), str(self.saved or "-"), partial, str(self.code), self.resumed_from,
        ]  # fmt: skip


COLUMNS = (
    "run", "victim", "signal", "aimed", "at the signal", "last in log", "", "steps", "saved", "partial", "exit", "from"
)  # fmt: skip


def table(blows: Sequence[Blow]) -> str:
    rows = [list(COLUMNS), *(blow.cells() for blow in blows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def begin(folder: Path, launch: tuple[str, ...], **env: str) -> tuple[Attempt, str]:
    """Start, or go on, as the program's own messages say; returns the attempt and what it goes on from."""
    run = folder / "runs" / NAME
    if not run.exists():
        return Attempt(folder, launch, env), "start"
    saved, partials = list_steps(run / "checkpoints"), list_partials(run / "checkpoints")
    if not saved:
        refused = Attempt(folder, ("resume", NAME))
        assert refused.finish() == 5, refused.err
        assert "--auto-resume" in refused.err, refused.err
        return Attempt(folder, (*launch, "--auto-resume"), env), "start"
    if partials and partials[-1][0] > saved[-1][0]:
        refused = Attempt(folder, ("resume", NAME))
        assert refused.finish() == 5, refused.err
        named = re.search(r"go on from the newest complete one: nftctl resume (\S+)", refused.err)
        assert named, refused.err
        assert named[1].endswith(saved[-1][1].name), refused.err
        return Attempt(folder, ("resume", named[1]), env), str(saved[-1][0])
    return Attempt(folder, ("resume", NAME), env), str(saved[-1][0])


def send(attempt: Attempt, strike: Strike, ranks: dict[int, int], family: dict[int, str]) -> None:
    if strike.who == "group":
        os.killpg(attempt.process.pid, strike.signum)
        return
    victims = {"driver": [attempt.process.pid], "everybody": [attempt.process.pid, *family]}.get(strike.who)
    for pid in victims or [ranks[int(strike.who[5:])]]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, strike.signum)


def deal(folder: Path, launch: tuple[str, ...], strike: Strike, world: int, label: str) -> Blow:
    """One attempt, struck; everything of it is gone afterwards."""
    attempt, origin = begin(folder, launch)
    try:
        ranks = {rank: attempt.pid_of(rank) for rank in range(world)}
        family = attempt.family()
        assert set(ranks.values()) <= set(family)
        logs = (attempt.run / "logs" / "latest").resolve()
        log = logs / strike.log
        with eager():
            aimed = wait_for_stage(log, strike.stage, strike.step, attempt.process)
            assert aimed, f"{strike} came too late: the run ended\n{attempt.err}"
            send(attempt, strike, ranks, family)
            at = last_stage(log)
        sent = time.monotonic()
        code = attempt.finish()
        seconds = time.monotonic() - sent
        # Two helpers of Ray find out by themselves, more than a minute later, that their Ray has gone.
        alone = strike.who in ("driver", "group") and strike.signum == signal.SIGKILL
        left = attempt.left(but="Agent" if alone else "nothing")
        assert not left, left
    finally:
        attempt.end()
    checkpoints = attempt.run / "checkpoints"
    saved = list_steps(checkpoints)
    assert all(verify(path) == [] for _, path in saved)
    expected = CODES.get(strike.signum, 7 if strike.who.startswith("rank") else -signal.SIGKILL)
    assert code == expected, attempt.err
    return Blow(
        strike=strike, run=label, resumed_from=origin, aimed=aimed, at=at, end=last_stage(log), code=code,
        rows=len(rows_of(attempt.run)), saved=saved[-1][0] if saved else 0,
        partials=[step for step, _ in list_partials(checkpoints)], out=attempt.out, err=attempt.err, seconds=seconds,
    )  # fmt: skip


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Finished steps without timings and machine figures; a row that was cut off does not count."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [promised(json.loads(line)) for line in lines if line.endswith("\n")]


def check_blow(blow: Blow, world: int) -> None:
    """What every strike that hit has to leave: words about the victim, or a finished and saved step."""
    strike = blow.strike
    stage, step = blow.aimed.rsplit(" ", 1)
    assert "(raylet)" not in blow.err
    assert "Traceback" not in blow.err
    if strike.signum in CODES:
        assert blow.saved == blow.rows, blow
        assert blow.rows >= int(step), blow
        assert blow.partials == [], blow
        assert "nftctl resume" in blow.err
        assert "press again to stop now" in blow.err
    elif strike.who.startswith("rank"):
        said = rf"rank {strike.who[5:]} died in step {step}, {stage} \(pid \d+ on \S+\)"
        assert re.search(said, blow.err), blow.err
        assert re.search(rf"\| .*nftctl\.stage: step {step}: {stage}\n", blow.err), blow.err
        assert re.search(rf"log: \S+{strike.log}\n", blow.err), blow.err
        if blow.saved:
            assert f"the last checkpoint is of step {blow.saved}; go on with: nftctl resume" in blow.err
        assert blow.out == ""
    if strike.stage not in ("save", "commit"):
        assert blow.rows >= int(step) - 1, blow


def play(folder: Path, launch: tuple[str, ...], strikes: Sequence[Strike], *, world: int, label: str) -> list[Blow]:
    """Deal the strikes one after the other to one run; then let it come to its end."""
    blows: list[Blow] = []
    folder.mkdir()
    for strike in strikes:
        for attempt in range(TRIES):
            done = blows[-1].saved if blows else 0
            aimed = Strike(strike.who, strike.signum, strike.stage, max(strike.step + attempt, done + 1))
            blows.append(deal(folder, launch, aimed, world, label))
            print("  ".join(blows[-1].cells()), f"  {blows[-1].seconds:.1f} s", flush=True)
            if blows[-1].hit:
                check_blow(blows[-1], world)
                break
        else:
            raise AssertionError(f"{strike} did not hit in {TRIES} tries:\n{table(blows)}")
    last, _ = begin(folder, launch)
    assert last.finish() == 0, last.err
    assert not last.left()
    return blows


def straight(folder: Path, launch: tuple[str, ...]) -> Path:
    """The run that nobody touched."""
    folder.mkdir()
    attempt = Attempt(folder, launch)
    assert attempt.finish(300) == 0, attempt.err
    assert not attempt.left()
    return attempt.run


PARTS = frozenset({"policy", "old", "optim"})


def check_same(run: Path, clean: Path, steps: int, parts: Set[str] = PARTS) -> None:
    """To the bit: metrics, policy, old, optimizer (and EMA, if it is among the `parts`), and every counter."""
    assert [row["step"] for row in rows_of(run)] == list(range(1, steps + 1))
    assert rows_of(run) == rows_of(clean)
    (step, mine), (other, theirs) = (list_steps(path / "checkpoints")[-1] for path in (run, clean))
    assert step == other == steps
    first, second = tensors_of(mine), tensors_of(theirs)
    assert {name.split(".")[0] for name in first} == parts
    assert first == second
    assert read_manifest(mine).state == read_manifest(theirs).state
    assert list_partials(run / "checkpoints") == []


def check_prompts(folder: Path, steps: int, rows_per_step: int) -> None:
    """Whatever attempt and rank made a step, it trained the same rows; together they have no gap and no repeat."""
    trained: dict[int, set[tuple[int, int]]] = {}
    for log in sorted(folder.glob("runs/*/logs/attempt_*/rank_*.log")):
        for step, first, last in _ROWS.findall(log.read_text()):
            trained.setdefault(int(step), set()).add((int(first), int(last)))
    assert all(len(rows) == 1 for rows in trained.values()), trained
    used = [n for step in range(1, steps + 1) for a, b in trained[step] for n in range(a, b + 1)]
    assert used == list(range(steps * rows_per_step))
