"""One run: a method steps until both budgets are spent, and is looked at on its way along both axes.

Owns the clock, which stands still while the policy is looked at, and the marks: places along seconds and along samples
at which every run is looked at, right after the step that reaches them. What goes in and out is plain data, since a run
has a process of its own. A method that fails ends its run there, and the run says so.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nftctl.errors import TrainingFailed
from nftctl.learning.methods import make
from nftctl.learning.order import GUIDANCE, Budget, Order
from nftctl.learning.task import Look, Task
from nftctl.profile.schema import Profile

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit that the kernel counts resident memory in."""
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class Clock:
    """What training took so far."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: int = 0
    steps: int = 0
    forwards: int = 0
    backwards: int = 0
    step_seconds: list[float] = field(default_factory=list)

    def spent(self, budget: Budget) -> bool:
        """Whether both budgets are."""
        return self.seconds >= budget.seconds and self.samples >= budget.samples

    def marks(self, budget: Budget) -> tuple[int, int]:
        """The last mark reached along seconds, and along samples."""
        along = (self.seconds / budget.seconds, self.samples / budget.samples)
        return tuple(min(budget.marks, int(budget.marks * share + 1e-9)) for share in along)  # type: ignore[return-value]


def run(order: Order, tell: Tell) -> dict[str, Any]:
    """Make the run in this process; `tell` hears of every look. Returns the order's names and what came out."""
    began = time.perf_counter()
    task = Task(Profile.model_validate(order.profile), order.seed)
    about = {"method": order.method, "settings": order.settings, "seed": order.seed, "number": order.number}
    if order.method == GUIDANCE:
        found = {"curve": [], "guided": _guided(task, order), "failed": "", "cost": _cost(Clock(), task)}
    else:
        found = _train(task, order, tell)
    return about | found | {"whole_seconds": time.perf_counter() - began}


def _train(task: Task, order: Order, tell: Tell) -> dict[str, Any]:
    method, clock = make(order.method, task, order.settings), Clock()
    curve = [_point(task.look(order.split), clock, (0, 0), None, None)]
    tell(curve[-1])
    failed = ""
    try:
        while not clock.spent(order.budget):
            before = clock.marks(order.budget)
            reward = _step(task, method, clock)
            after = clock.marks(order.budget)
            if after != before:
                curve.append(_point(task.look(order.split), clock, after, before, reward))
                tell(curve[-1])
        guided = _guided(task, order)
    except TrainingFailed as error:
        failed, guided = error.message, []
    return {"curve": curve, "guided": guided, "failed": failed, "cost": _cost(clock, task)}


def _step(task: Task, method: Any, clock: Clock) -> float:
    """One step on the clock; returns the mean reward of its samples."""
    forwards = task.family.denoiser.forwards
    began, cpu = time.perf_counter(), time.process_time()
    taken = method.step(task.rows(clock.steps))
    clock.step_seconds.append(time.perf_counter() - began)
    clock.cpu_seconds += time.process_time() - cpu
    clock.seconds += clock.step_seconds[-1]
    clock.samples += task.samples_per_step
    clock.steps += 1
    clock.forwards += task.family.denoiser.forwards - forwards
    clock.backwards += taken.backwards
    return float(taken.reward)


def _guided(task: Task, order: Order) -> list[dict[str, Any]]:
    """Looks under each guidance: of the policy, which is the base where nothing was trained."""
    return [{"guidance": g, **asdict(task.look(order.split, guidance=g))} for g in order.guidances]


def _point(
    look: Look, clock: Clock, marks: tuple[int, int], before: tuple[int, int] | None, reward: float | None
) -> dict[str, Any]:
    """A point of the curve. Its marks are those that it is the first to reach, None along an axis where it is not."""
    first = [mark if before is None or mark > before[axis] else None for axis, mark in enumerate(marks)]
    return {
        "seconds": clock.seconds,
        "samples": clock.samples,
        "steps": clock.steps,
        "seconds_mark": first[0],
        "samples_mark": first[1],
        "train_reward": reward,
        **asdict(look),
    }


def _cost(clock: Clock, task: Task) -> dict[str, float | None]:
    """What a step took: the median of its seconds, CPU seconds, and rows per sample."""
    steps, samples = max(1, clock.steps), max(1, clock.samples)
    ordered: Sequence[float] = sorted(clock.step_seconds)
    return {
        "steps": clock.steps,
        "seconds": clock.seconds,
        "samples": clock.samples,
        "step_seconds": ordered[len(ordered) // 2] if ordered else None,
        "step_cpu_seconds": clock.cpu_seconds / steps if ordered else None,
        "forwards_per_sample": clock.forwards / samples,
        "backwards_per_sample": clock.backwards / samples,
        "rss_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / 1e6,
    }
