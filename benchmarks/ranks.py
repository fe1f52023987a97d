"""What a run costs its driver as ranks are added: time, bytes through Ray, and the start.

Starts a private Ray with 2, 4, 8 and 16 ranks, processes on the CPU, and takes steps of the profile. Counts the bytes
of every call's arguments and answers as Ray would pickle them, and refuses to find a tensor or an array among them. The
driver's time is the processor time of its own process, Ray's threads included; `call` is an empty call of all ranks and
back. More ranks than cores slow the ranks down, and an empty call waits for them.

    python benchmarks/ranks.py [--profile tiny_t2i_cpu] [--set KEY=VALUE ...] [--ranks 2 4 8 16] [--steps 6]
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from nftctl.engine import services
from nftctl.engine.group import Group
from nftctl.engine.loop import spec_of, take_step
from nftctl.engine.plan import JobPlan, plan_launch
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.run.state import RunState

WARM = 2
"""First steps that are left out: they fill caches."""
CALLS = 20
"""Empty calls whose median is told."""


class Counted(Group):
    """A group that counts what passes between the driver and its ranks."""

    sent = 0
    answered = 0

    def call(self, method: str, *args: Any) -> list[Any]:
        """Count the arguments once per rank, since each is sent its own, and every answer."""
        answers = super().call(method, *args)
        self._refuse_arrays(args, answers)
        self.sent += len(self.actors) * len(pickle.dumps((method, args)))
        self.answered += sum(len(pickle.dumps(answer)) for answer in answers)
        return answers

    def _refuse_arrays(self, *values: Any) -> None:
        found = [type(value).__name__ for value in _leaves(values) if _is_array(value)]
        if found:
            raise SystemExit(f"these went through Ray: {', '.join(found)}")


def _is_array(value: object) -> bool:
    return type(value).__module__.split(".")[0] in ("torch", "numpy", "PIL")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        parts: list[Any] = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        yield value
        return
    for part in parts:
        yield from _leaves(part)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one number of ranks; times in seconds, medians over steps."""

    ranks: int
    start: float
    build: float
    step: float
    driver: float
    call: float
    sent: float
    answered: float

    def row(self) -> str:
        """A line of a Markdown table."""
        total = self.sent + self.answered
        seconds = f"{self.start:.1f} s | {self.build:.1f} s | {self.step:.2f} s"
        driver = f"{1000 * self.driver:.0f} ms | {1000 * self.call:.1f} ms"
        return f"| {self.ranks} | {seconds} | {driver} | {total:,.0f} | {total / self.ranks:,.0f} |"


def plan_of(options: argparse.Namespace, ranks: int, folder: Path) -> JobPlan:
    """The plan of a run of that many ranks, which is never launched as one."""
    sets = [f"rl.group_size={ranks}", "grid.device=cpu", 'eval.prompt_file=""', "samples.prompts=0", *options.set]
    flags = {"job.name": f"ranks{ranks}", "job.run_dir": str(folder), "rl.max_steps": options.steps}
    known = bundled_profiles()
    path = known.get(options.profile, Path(options.profile))
    return plan_launch(load_profile(path, sets=sets, flags=flags, env={}), argv=[])


def _end(groups: list[Group]) -> None:
    for group in groups:
        group.shutdown()


def measure(options: argparse.Namespace, ranks: int, folder: Path) -> Cost:
    """Start, step and end `ranks` ranks."""
    plan = plan_of(options, ranks, folder)
    logs = folder / f"logs{ranks}"
    logs.mkdir()
    with ExitStack() as stack:
        answered = stack.enter_context(services.embedded(plan.profile, plan.revisions, logs))
        began = time.perf_counter()
        started_groups: list[Group] = []
        stack.callback(_end, started_groups)
        group = Counted.start(plan.profile, logs, started_groups.append)
        assert isinstance(group, Counted)
        started = time.perf_counter()
        group.call("build", spec_of(plan, [answered[p.name] for p in plan.profile.reward.providers], logs))
        built = time.perf_counter()
        state, walls, works, sent, back = RunState(), [], [], [], []
        for _ in range(options.steps):
            before = (time.perf_counter(), time.process_time(), group.sent, group.answered)
            _, state, _ = take_step(group, state)
            walls.append(time.perf_counter() - before[0])
            sent.append(group.sent - before[2])
            back.append(group.answered - before[3])
            works.append(time.process_time() - before[1])
        calls = []
        for _ in range(CALLS):
            before_call = time.perf_counter()
            Group.call(group, "about")
            calls.append(time.perf_counter() - before_call)
    middle = statistics.median
    return Cost(
        ranks, started - began, built - started, middle(walls[WARM:]), middle(works[WARM:]), middle(calls),
        middle(sent[WARM:]), middle(back[WARM:]),
    )  # fmt: skip


def main() -> None:
    """Measure each number of ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="tiny_t2i_cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    print("| ranks | start | build | step | driver a step | empty call | bytes a step | a rank |")
    print("|-|-|-|-|-|-|-|-|", flush=True)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="ranks") as folder:
            print(measure(options, ranks, Path(folder)).row(), flush=True)


if __name__ == "__main__":
    main()
