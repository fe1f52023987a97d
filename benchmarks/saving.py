"""What saving takes away from training: steps with a checkpoint after each, against steps without any.

Starts the ranks once and then runs the profile in turns, without and with `checkpoint.every = 1`, each run from the
same base. A step's time is from its report to the next one's, so it holds whatever a save adds: the snapshot, waiting
for the save before, hashing, the manifest, the rename. Prints medians, and the cost of one save as a share of a step.

Where the machine has other work too, `--alternate` saves after every second step instead, and tells each step with a
save from its two neighbours without: a second apart, they are disturbed alike. It takes for granted that a save has
ended before the second step after it does.

    python benchmarks/saving.py [--profile tiny_t2i_cpu] [--set KEY=VALUE ...] [--steps 12] [--turns 3] [--alternate]
"""

from __future__ import annotations

import argparse
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
from nftctl.profile.load import Resolved, bundled_profiles, load_profile
from nftctl.profile.preflight import refuse_if_wrong

WARM = 2
"""First intervals of a run that are left out."""


class Clock:
    """A reporter that keeps the moment of every step."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        print(text)

    def step(self, row: Mapping[str, Any], total: int) -> None:
        self.moments.append(time.perf_counter())

    def evaluated(self, row: Mapping[str, Any]) -> None:
        pass

    def done(self) -> None:
        pass

    @property
    def intervals(self) -> dict[int, float]:
        """Seconds by the step that an interval begins with."""
        pairs = enumerate(zip(self.moments, self.moments[1:], strict=False), 1)
        return {step: after - before for step, (before, after) in pairs if step > WARM}


def resolve(options: argparse.Namespace, folder: Path, turn: int, every: int) -> Resolved:
    sets = [*options.set, 'eval.prompt_file=""', "samples.prompts=0", f"checkpoint.every={every}"]
    flags = {"rl.max_steps": options.steps, "job.name": f"turn{turn}_{every}", "job.run_dir": str(folder)}
    path = bundled_profiles().get(options.profile, Path(options.profile))
    resolved = load_profile(path, sets=sets, flags=flags, env={})
    refuse_if_wrong(resolved)
    return resolved


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds per step without and with a save, all turns together, and the size of a checkpoint."""
    started: list[Group] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    beyond: list[float] = []
    try:
        group = Group.start(resolve(options, folder, 0, 0).profile, None, started.append)
        for turn in range(options.turns):
            for every in (2,) if options.alternate else (0, 1):
                clock = Clock()
                run_job(plan_launch(resolve(options, folder, turn, every), argv=[]), clock, group)
                taken = clock.intervals
                for step, interval in taken.items():
                    seconds[bool(every) and step % every == 0].append(interval)
                    if every == 2 and step % 2 == 0 and {step - 1, step + 1} <= set(taken):
                        beyond.append(interval - (taken[step - 1] + taken[step + 1]) / 2)
    finally:
        for group in started:
            group.shutdown()
    saved = max(folder.glob("turn*/checkpoints/step_*"), key=lambda path: path.stat().st_mtime)
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    without, with_ = statistics.median(seconds[False]), statistics.median(seconds[True])
    neighbours: dict[str, Any] = {"beyond_neighbours_s": round(statistics.median(beyond), 4)} if beyond else {}
    return neighbours | {
        "step_s": round(without, 4),
        "step_with_save_s": round(with_, 4),
        "cost_s": round(with_ - without, 4),
        "share": round(with_ / without - 1, 4),
        "checkpoint_bytes": size,
        "quartiles_s": [[round(q, 4) for q in statistics.quantiles(seconds[saves], n=4)] for saves in (False, True)],
        "steps": [len(seconds[saves]) for saves in (False, True)],
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="tiny_t2i_cpu")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--alternate", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder))))


if __name__ == "__main__":
    main()
