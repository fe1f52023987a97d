"""Two ranks against a reward service that begins to misbehave in their second step: what is run, what must come of it.

Shared by the cases of every test run and by the soak that takes all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.profile.load import load_profile
from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.manifest import verify
from tests.conftest import Quiet
from tests.engine.test_runs import QUIET, start
from tests.engine.test_world import promised, tensors_of

STEPS = 4
AFTER = 3
"""The first score request that misbehaves: one request per rank and step, so this is step 2."""
DEADLINE_S = 4.0
SLACK_S = 5.0
SERVER = Path(__file__).parents[1] / "reward" / "fault_server.py"

HARMLESS = ("slow", "reordered", "close-after-reply")
"""Odd, but every score is there and can be trusted."""
PASSING = ("reset", "truncated-body", "status-408", "status-425", "status-429", "status-500", "status-503")
"""Worth another attempt."""
SAID = {
    "hang": r"the deadline passed while waiting for the answer \(phase read",
    "reset": r"the connection was lost before the answer was complete .*\(phase read",
    "truncated-body": r"the connection was lost before the answer was complete .*\(phase read",
    "html": r"not JSON .*Bad gateway.*\(phase parse",
    "truncated-json": r"not JSON.*\(phase parse",
    "not-an-object": r"not an object.*\(phase parse",
    "error-field": r"holds an error.*no memory.*\(phase parse",
    "wrong-revision": r"swapped/2.*\(phase parse",
}
"""What a fault without end has to be called; a score fault is found in the reply, a status is named."""


@dataclass(frozen=True)
class Outcome:
    """How a run against a faulty service ended."""

    code: int
    err: str
    run: Path
    url: str
    seconds: float
    """From the moment the service saw the first request that it spoilt; negative when it never came."""
    requests: int
    images: int
    """What the service says that it was asked for, and scored, in all."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Finished steps, without timings and machine figures."""
        return [promised(json.loads(line)) for line in (self.run / "metrics.jsonl").open()]

    @property
    def tensors(self) -> dict[str, bytes]:
        """The newest checkpoint's tensors."""
        return tensors_of(list_steps(self.run / "checkpoints")[-1][1])


@contextmanager
def serving(fault: str, times: int = 0, after: int = AFTER) -> Iterator[str]:
    """The fault server in a process of its own; yields its URL."""
    command = [sys.executable, str(SERVER), "--fault", fault, "--after", str(after), "--times", str(times)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def run(folder: Path, fault: str, *, times: int = 0) -> Outcome:
    """Launch against the service that shows `fault` from the third score request on, for ever or `times` times."""
    with serving(fault, times) as url:
        process = start(folder, "launch", str(_profile(folder, url)), "--steps", str(STEPS), "--name", "faulty", *QUIET)
        spoilt = _first_spoilt(process, url)
        _, err = process.communicate(timeout=120)
        seconds = time.monotonic() - spoilt if spoilt else -1.0
        health = _health(url)
    run = folder / "runs" / "faulty"
    return Outcome(process.returncode, err, run, url, seconds, health["requests"], health["images"])


def run_on(world: Any, folder: Path, fault: str, *, times: int = 0) -> Outcome:
    """The same on ranks that have been started, for a run that ends well; spoilt from the second step's first on."""
    with serving(fault, times, len(world.members) + 1) as url:
        sets = [*QUIET[1::2], f"rl.group_size={len(world.members)}"]
        resolved = load_profile(
            _profile(folder, url), sets=sets, flags={"rl.max_steps": STEPS, "job.name": "faulty"}, env={}
        )
        run_job(plan_launch(resolved, run_dir=folder / "runs"), Quiet(), world)
        health = _health(url)
    return Outcome(0, "", folder / "runs" / "faulty", url, 0.0, health["requests"], health["images"])


def _profile(folder: Path, url: str) -> Path:
    path = folder / "faulty.toml"
    path.write_text(
        f'extends = "tiny_t2i_cpu"\n[reward]\ndeadline_s = {DEADLINE_S}\nretries = 3\n[checkpoint]\nevery = 1\n'
        f'[[reward.providers]]\nname = "mean"\nkind = "http"\nurl = "{url}"\nrevision = "fault/1"\n'
    )
    return path


def _health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/healthz", timeout=5) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def _first_spoilt(process: subprocess.Popen[str], url: str) -> float:
    """When the service had been asked for scores often enough; 0 when the run ended before."""
    while process.poll() is None:
        if _health(url)["requests"] >= AFTER:
            return time.monotonic()
        time.sleep(0.05)
    return 0.0


def check_recovered(outcome: Outcome, clean: Outcome) -> None:
    """The run is, to the bit, the one that saw no fault."""
    assert outcome.code == 0, outcome.err
    assert outcome.requests >= clean.requests > AFTER
    assert [row["step"] for row in outcome.rows] == list(range(1, STEPS + 1))
    assert outcome.rows == clean.rows
    assert outcome.tensors == clean.tensors


def check_failed(outcome: Outcome, fault: str, clean: Outcome | None = None) -> None:
    """The reward's own words and code, in time, with the step before it safe and nothing half done."""
    assert outcome.code == 4, outcome.err
    assert 0 < outcome.seconds <= DEADLINE_S + SLACK_S, f"{outcome.seconds:.1f} s after the fault"
    error = next(line for line in outcome.err.splitlines() if line.startswith("error: "))
    default = rf"HTTP {fault[7:]}.*\(phase status" if fault.startswith("status-") else r"\(phase parse"
    assert re.search(SAID.get(fault, default), error), error
    assert outcome.url in error
    assert "nftctl resume" in outcome.err
    assert "did not finish" not in outcome.err
    assert "Traceback" not in outcome.err
    assert [row["step"] for row in outcome.rows] == [1]
    assert clean is None or outcome.rows == clean.rows[:1]
    assert (outcome.run / "report.html").is_file()
    checkpoints = outcome.run / "checkpoints"
    assert [step for step, _ in list_steps(checkpoints)] == [1]
    assert list_partials(checkpoints) == []
    assert verify(checkpoints / "step_000001") == []
