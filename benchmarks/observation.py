"""What watching a run takes away from training: steps with everything that is looked at, against steps with nothing.

Starts the ranks once and runs the profile in turns. With: image statistics, distances, memory, score table, alarms,
TensorBoard, the live display drawn into a terminal that is not there. Without: none of these, the row of metrics alone.
Held-out evaluations and grids are left out of both: they are asked for by cadence and not paid by every step. A step's
time is from its report to the next one's. Prints medians, and the cost as a share of a step.

    python benchmarks/observation.py [--profile tiny_t2i_cpu] [--set KEY=VALUE ...] [--steps 30] [--turns 4]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nftctl.engine.group import Group
from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.engine.worker import Worker
from nftctl.profile.load import Resolved, bundled_profiles, load_profile
from nftctl.profile.preflight import refuse_if_wrong

WARM = 3
"""First intervals of a run that are left out."""


class Clock:
    """A reporter that keeps the moment of every step, and hands it on to one that draws."""

    def __init__(self, drawn: Any) -> None:
        self.moments: list[float] = []
        self.drawn = drawn

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def evaluated(self, row: Mapping[str, Any]) -> None:
        pass

    def step(self, row: Mapping[str, Any], total: int) -> None:
        if self.drawn is not None:
            self.drawn.step(row, total)
        self.moments.append(time.perf_counter())

    def done(self) -> None:
        if self.drawn is not None:
            self.drawn.done()

    @property
    def intervals(self) -> list[float]:
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)][WARM:]


def blind(worker: Worker) -> None:
    """Have this rank look at nothing until `see`."""
    from nftctl.roles import policy, rollout

    kept = (rollout.look_at, policy.PolicyRole._distance, type(worker)._system)
    worker.__dict__["_kept"] = kept
    rollout.look_at = lambda image: None  # type: ignore[assignment,return-value]
    policy.PolicyRole._distance = lambda self: {}  # type: ignore[method-assign]
    type(worker)._system = lambda self: {}  # type: ignore[method-assign]


def see(worker: Worker) -> None:
    """Take back `blind`."""
    from nftctl.roles import policy, rollout

    rollout.look_at, policy.PolicyRole._distance, type(worker)._system = worker.__dict__.pop("_kept")  # type: ignore[method-assign]


def resolve(options: argparse.Namespace, folder: Path, turn: int, seen: bool) -> Resolved:
    sets = [*options.set, 'eval.prompt_file=""', "samples.prompts=0", "checkpoint.every=0"]
    if not seen:
        sets += ["alarms.enabled=false", "logging.tensorboard=false"]
    flags = {"rl.max_steps": options.steps, "job.name": f"turn{turn}_{seen}", "job.run_dir": str(folder)}
    path = bundled_profiles().get(options.profile, Path(options.profile))
    resolved = load_profile(path, sets=sets, flags=flags, env={})
    refuse_if_wrong(resolved)
    return resolved


class Screen(io.StringIO):
    """A terminal of memory."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def drawing() -> Any:
    """The live display."""
    from nftctl.cli.console import Console
    from nftctl.cli.progress import LiveReporter

    return LiveReporter(Console(), stream=Screen())


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds per step without and with observation, all turns together."""
    started: list[Group] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    try:
        group = Group.start(resolve(options, folder, 0, False).profile, None, started.append)
        for turn in range(options.turns):
            for seen in (False, True) if turn % 2 else (True, False):
                clock = Clock(drawing() if seen else None)
                if not seen:
                    group.call("apply", blind)
                run_job(plan_launch(resolve(options, folder, turn, seen), argv=[]), clock, group)
                if not seen:
                    group.call("apply", see)
                seconds[seen] += clock.intervals
    finally:
        for group in started:
            group.shutdown()
    without, with_ = statistics.median(seconds[False]), statistics.median(seconds[True])
    return {
        "step_s": round(without, 4),
        "step_observed_s": round(with_, 4),
        "cost_s": round(with_ - without, 4),
        "share": round(with_ / without - 1, 4),
        "quartiles_s": [[round(q, 4) for q in statistics.quantiles(seconds[seen], n=4)] for seen in (False, True)],
        "steps": [len(seconds[seen]) for seen in (False, True)],
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="tiny_t2i_cpu")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder))))


if __name__ == "__main__":
    main()
