"""Killed from outside at any moment and resumed, a run is to the bit the run that nobody touched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.manifest import verify
from tests.engine.test_runs import QUIET, start, wait_for
from tests.engine.test_world import promised, tensors_of

pytestmark = [pytest.mark.soak, pytest.mark.ray]

STEPS = 12
SETS = ("checkpoint.every=1", "checkpoint.keep_last=20", 'rl.old.decay="linear"', "data.shuffle=true")
LAUNCH = ("launch", "--steps", str(STEPS), "--name", "killed", *QUIET, *(part for s in SETS for part in ("--set", s)))
KILLS = [
    # who, by what, after which finished step, and how far into the next one
    ("driver", signal.SIGKILL, 3, 0.0),
    ("driver", signal.SIGKILL, 6, 0.12),
    ("rank 0", signal.SIGKILL, 4, 0.05),
    ("rank 1", signal.SIGKILL, 8, 0.2),
    ("driver", signal.SIGTERM, 3, 0.15),
    ("driver", signal.SIGTERM, 7, 0.0),
    ("everybody", signal.SIGINT, 5, 0.08),
    ("driver", signal.SIGINT, 9, 0.0),
]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
Cli = Callable[..., subprocess.CompletedProcess[str]]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [promised(json.loads(line)) for line in (run / "metrics.jsonl").open()]


def newest(run: Path) -> tuple[int, dict[str, bytes]]:
    step, folder = list_steps(run / "checkpoints")[-1]
    return step, tensors_of(folder)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody touched."""
    folder = tmp_path_factory.mktemp("straight")
    process = start(folder, *LAUNCH)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder / "runs" / "killed"


def family_of(process: subprocess.Popen[str], run: Path) -> tuple[list[int], dict[int, str]]:
    """Process ids of both ranks, and name by id of every process of the run."""
    ranks = []
    for n in (0, 1):
        match = None
        while match is None:
            assert process.poll() is None, process.communicate()
            log = run / "logs" / "attempt_1" / f"rank_{n}.log"
            match = re.search(rf"rank {n} of 2 on cpu, pid (\d+)", log.read_text() if log.exists() else "")
            time.sleep(0.05)
        ranks.append(int(match[1]))
    children = psutil.Process(process.pid).children(recursive=True)
    return ranks, {p.pid: " ".join(p.cmdline()).strip() for p in (psutil.Process(process.pid), *children)}


def strike(process: subprocess.Popen[str], run: Path, who: str, signum: int, step: int, delay: float) -> str:
    """Send the signal at the chosen moment, wait for the end of every process of the run, return its stderr."""
    ranks, family = family_of(process, run)
    assert set(ranks) <= set(family)
    wait_for(run / "metrics.jsonl", rf'"step":{step},', timeout=180)
    time.sleep(delay)
    if who == "everybody":
        os.killpg(process.pid, signum)
    else:
        os.kill(process.pid if who == "driver" else ranks[int(who[-1])], signum)
    _, err = process.communicate(timeout=120)
    if signum == signal.SIGKILL and who == "driver":
        # Two helpers of Ray find out by themselves, more than a minute later, that their Ray has gone.
        family = {pid: name for pid, name in family.items() if not name.endswith("Agent")}
    end = time.monotonic() + 30
    while (left := {pid: name for pid, name in family.items() if alive(pid)}) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left
    return err


def resume(cli: Cli, run: Path) -> str:
    """Go on from the newest checkpoint, or, when that one was cut off, by the command that the refusal names."""
    result = cli("resume", "killed")
    if result.returncode == 5:
        assert list_partials(run / "checkpoints")
        named = re.search(r"the newest complete one is nftctl resume (\S+)", result.stderr)
        assert named, result.stderr
        result = cli("resume", named[1])
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.parametrize(("who", "signum", "step", "delay"), KILLS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, cli: Cli, straight: Path, who: str, signum: signal.Signals, step: int, delay: float
) -> None:
    process, run = start(tmp_path, *LAUNCH), tmp_path / "runs" / "killed"
    err = strike(process, run, who, signum, step, delay)
    before = rows_of(run)
    saved = list_steps(run / "checkpoints")
    partials = list_partials(run / "checkpoints")
    print(f"{who} {signum.name}: exit {process.returncode}, {len(before)} rows, newest {saved[-1][0]}, cut {partials}")
    if signum in CODES:
        assert process.returncode == CODES[signum], err
        assert saved[-1][0] == len(before)
        assert not partials
    else:
        assert process.returncode == (7 if who.startswith("rank") else -signal.SIGKILL), err
    assert step <= len(before) < STEPS, "the signal came too late to interrupt anything"
    assert all(verify(folder) == [] for _, folder in saved)
    resume(cli, run)
    assert [row["step"] for row in rows_of(run)] == list(range(1, STEPS + 1))
    assert rows_of(run) == rows_of(straight)
    assert newest(run) == newest(straight)
    assert list_partials(run / "checkpoints") == []
