"""The whole comparison: trials on the tuning split, then the chosen settings with fresh seeds on the test split.

Owns the order of runs, so that methods share the machine alike, and the document of everything that was measured.
No test prompt is sampled before the last choice is made.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from nftctl.errors import UsageRefused
from nftctl.learning import trials
from nftctl.learning.fitness import refuse_unfit
from nftctl.learning.order import GUIDANCE, Budget, Order
from nftctl.learning.splits import Splits
from nftctl.learning.summary import summarise
from nftctl.learning.trials import CONTROL, CONTROLLED, GRIDS, GUIDANCES, NAMES
from nftctl.profile.schema import Profile

TUNING_SEED = 1000
"""Seed of every trial; those of the comparison count from 0."""
MARKS = 10
"""Places along each axis at which runs of the comparison are looked at."""
TUNING_MARKS = 2
"""The same for trials: half way, and at the end."""

MEASURED = (
    "Seconds are wall-clock seconds of training steps alone (sampling, scoring, gradients) in a process with one "
    "thread; looking at held-out samples stops the clock. Up to {jobs} such processes ran side by side on {cpus} CPUs, "
    "methods mixed, so that all had the same company. A run goes on until it has spent both budgets, and each value is "
    "that of the first step that reached its mark."
)


class Runner(Protocol):
    """Who makes runs: `crowd.Crowd`, or a loop in this process."""

    def make(
        self, orders: Sequence[Order], finished: Callable[[Order, dict[str, Any]], None]
    ) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared and how long."""

    methods: tuple[str, ...]
    seeds: int
    trials: int
    seconds: float
    samples: int
    jobs: int = 1

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in NAMES]
        if unknown or not self.methods:
            raise UsageRefused(
                f"no method {unknown[0]!r}" if unknown else "no method", hint=f"methods: {', '.join(NAMES)}"
            )
        twice = [name for name in self.methods if self.methods.count(name) > 1]
        if twice:
            raise UsageRefused(
                f"the method {twice[0]!r} is named twice", hint="name each once; --seeds says how often it is run"
            )
        if CONTROL in self.methods and CONTROLLED not in self.methods:
            raise UsageRefused(f"{CONTROL} takes the settings of {CONTROLLED}, which is left out", hint="name both")

    @property
    def tuned(self) -> list[str]:
        """Methods with trials of their own, in the order of the table."""
        return [name for name in GRIDS if name in self.methods]

    def budget(self, marks: int) -> Budget:
        """The budget of one run."""
        return Budget(self.seconds, self.samples, marks)


def compare(profile: Profile, name: str, plan: Plan, runner: Runner, say: Callable[[str], None]) -> dict[str, Any]:
    """Make every run and return the document."""
    prompts = refuse_unfit(profile)
    tried = _run(runner, _trials(profile, plan), say, "tuning")
    chosen = {method: trials.best([r for r in tried if r["method"] == method]) for method in plan.tuned}
    guidance = next((trials.best_guidance(r["guided"], plan.trials) for r in tried if r["method"] == GUIDANCE), None)
    for method, result in chosen.items():
        say(f"chosen for {method}: {words(result['settings'])} (trial {result['number']})")
    if guidance is not None:
        say(f"chosen for {GUIDANCE}: {guidance:g}")
    settings = {method: dict(result["settings"]) for method, result in chosen.items()}
    runs = _run(runner, _finals(profile, plan, settings, guidance), say, "test")
    document: dict[str, Any] = {
        "profile": name,
        "measured": MEASURED.format(jobs=plan.jobs, cpus=cpus()),
        "machine": _machine(),
        "plan": _facts(profile, plan, prompts),
        "chosen": {
            **{m: {"settings": settings[m], "trial": chosen[m]["number"]} for m in chosen},
            **({} if guidance is None else {GUIDANCE: {"settings": {"guidance": guidance}}}),
        },
        "trials": [r | {"merit": None if r["failed"] else _merit(r)} for r in tried],
        "runs": runs,
    }
    return document | {"summary": summarise(document)}


def _trials(profile: Profile, plan: Plan) -> list[Order]:
    """Every method's first trial, then every method's second, and so on; guidance in one go, with as many."""
    plain, budget = profile.model_dump(mode="json"), plan.budget(TUNING_MARKS)
    settings = {m: trials.settings_of(m, plan.trials, trials.times_of(profile)) for m in plan.tuned}
    orders = [
        Order(method, settings[method][number], TUNING_SEED, "tuning", budget, plain, number)
        for number in range(plan.trials)
        for method in plan.tuned
    ]
    if GUIDANCE in plan.methods:
        orders.append(Order(GUIDANCE, {}, TUNING_SEED, "tuning", budget, plain, 0, trials.guidances_of(plan.trials)))
    return orders


def _finals(
    profile: Profile, plan: Plan, settings: Mapping[str, dict[str, float]], guidance: float | None
) -> list[Order]:
    """Seed by seed, every method; the last policy is also sampled under the guidance that is best for the base."""
    plain, budget = profile.model_dump(mode="json"), plan.budget(MARKS)
    also = () if guidance is None else (guidance,)
    orders = []
    for seed in range(plan.seeds):
        for method in plan.tuned:
            orders.append(Order(method, settings[method], seed, "test", budget, plain, guidances=also))
        if CONTROL in plan.methods:
            orders.append(Order(CONTROL, settings[CONTROLLED], seed, "test", budget, plain, guidances=also))
        if GUIDANCE in plan.methods:
            orders.append(Order(GUIDANCE, {}, seed, "test", budget, plain, guidances=tuple(sorted(GUIDANCES))))
    return orders


def _run(runner: Runner, orders: Sequence[Order], say: Callable[[str], None], what: str) -> list[dict[str, Any]]:
    """Make the runs, and say a line for each as it ends."""
    done = 0

    def finished(order: Order, result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        say(f"[{what} {done}/{len(orders)}] {_line(order, result)}")

    say(f"{what}: {len(orders)} runs")
    return runner.make(orders, finished)


def _line(order: Order, result: Mapping[str, Any]) -> str:
    """How a run ended."""
    about = f"{order.method} seed {order.seed}" + (f" {words(order.settings)}" if order.settings else "")
    if result["failed"]:
        return f"{about}: failed, {result['failed']}"
    if not result["curve"]:
        best = max(result["guided"], key=lambda look: look["reward"])
        return f"{about}: at most {best['reward']:.3f}, with {best['guidance']:g}"
    first, last = result["curve"][0], result["curve"][-1]
    took = f"{last['steps']} steps, {last['samples']} samples, {last['seconds']:.0f} s"
    return f"{about}: {first['reward']:.3f} -> {last['reward']:.3f} in {took}"


def words(settings: Mapping[str, float]) -> str:
    """Settings for people: `lr 0.001, timesteps 4`."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _merit(result: Mapping[str, Any]) -> float | None:
    return trials.merit(result) if result["curve"] else None


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine() -> dict[str, Any]:
    return {
        "cpus": cpus(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _facts(profile: Profile, plan: Plan, prompts: Splits) -> dict[str, Any]:
    """What was asked for, and what of the profile matters to every method."""
    rl = profile.rl
    return {
        "methods": list(plan.methods),
        "seeds": list(range(plan.seeds)),
        "trials": plan.trials,
        "tuning_seed": TUNING_SEED,
        "seconds": plan.seconds,
        "samples": plan.samples,
        "marks": MARKS,
        "jobs": plan.jobs,
        "rows_per_step": profile.data.rows_per_step,
        "group_size": rl.group_size,
        "sample_steps": rl.sample_steps,
        "sampler_shift": rl.sampler_shift,
        "guidance": rl.guidance,
        "lora_rank": profile.model.lora.rank,
        "prompts": {
            "train": [p.reward_text for p in prompts.train],
            "tuning": [p.reward_text for p in prompts.tuning],
            "test": [p.reward_text for p in prompts.test],
        },
        "samples_per_prompt": profile.eval.samples_per_prompt,
        "grids": {m: {"lr": g.lr, g.knob: g.values, **g.fixed} for m, g in GRIDS.items()},
    }
