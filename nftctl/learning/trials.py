"""What is tried when a method is tuned: a grid of rates and of one other knob, in one order for all methods.

Owns the grids and the choice. The order spreads its first entries over the grid, so that any number of trials covers
it; a method gets as many trials as every other. Refuses a number of trials that the grids do not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nftctl.errors import UsageRefused
from nftctl.learning.order import GUIDANCE
from nftctl.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class Grid:
    """Four rates and three values of the method's own knob; `fixed` is the same in every trial."""

    lr: tuple[float, float, float, float]
    knob: str
    values: tuple[float, float, float]
    fixed: dict[str, float] = field(default_factory=dict)


GRIDS: dict[str, Grid] = {
    "nft": Grid((3e-4, 1e-3, 2e-3, 4e-3), "timesteps", (2, 4, 8)),
    "flow-grpo": Grid((3e-4, 1e-3, 2e-3, 4e-3), "noise", (0.3, 0.7, 1.0), {"clip": 0.2, "updates": 1, "kl": 0.0}),
    "best-of-group": Grid((3e-5, 1e-4, 3e-4, 1e-3), "timesteps", (2, 4, 8)),
}
"""Method -> its grid."""

ORDER = ((1, 1), (2, 0), (0, 2), (3, 1), (2, 2), (1, 0), (0, 1), (3, 0), (1, 2), (2, 1), (0, 0), (3, 2))
"""Places in a grid, rate and knob, in the order in which they are tried."""

GUIDANCES = (1.0, 3.0, 2.0, 5.0, 1.5, 7.0)
"""What plain guidance is tried with, in that order; all of them are tested."""

CONTROL, CONTROLLED = "control", "nft"
"""The method without a reward, and the one whose settings it takes."""

NAMES = (*GRIDS, GUIDANCE, CONTROL)
"""Everything that can be compared."""

LEAST_TIMES = 5
"""Times that a sampler's grid has to have: with fewer, two trials would be one."""


def times_of(profile: Profile) -> float:
    """Training times that a sample can have: those of the sampler's grid, or as many as one likes."""
    return profile.rl.sample_steps if profile.rl.timestep_source == "grid" else math.inf


def settings_of(method: str, trials: int, times: float = math.inf) -> list[dict[str, float]]:
    """The settings of a method's trials, in order; `timesteps` is at most `times`."""
    if not 1 <= trials <= len(ORDER):
        raise UsageRefused(f"a method has between 1 and {len(ORDER)} trials, got {trials}")
    grid = GRIDS[method]
    values = [min(value, times) for value in grid.values] if grid.knob == "timesteps" else grid.values
    return [{"lr": grid.lr[lr], grid.knob: values[knob], **grid.fixed} for lr, knob in ORDER[:trials]]


def guidances_of(trials: int) -> tuple[float, ...]:
    """The guidances that may be chosen with that many trials."""
    return GUIDANCES[:trials]


def merit(result: Mapping[str, Any]) -> float:
    """What a trial is judged by: the mean of its tuning rewards at both budgets; -inf where it failed."""
    if result["failed"]:
        return -math.inf
    ends = [
        max((p for p in result["curve"] if p[mark] is not None), key=lambda p: p[mark])
        for mark in ("seconds_mark", "samples_mark")
    ]
    return float(sum(point["reward"] for point in ends) / len(ends))


def best(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The trial of the highest merit; of equals the first."""
    return max(results, key=merit)


def best_guidance(guided: Sequence[Mapping[str, Any]], trials: int) -> float:
    """The guidance of the highest tuning reward among those that were tried."""
    tried = [look for look in guided if look["guidance"] in guidances_of(trials)]
    return float(max(tried, key=lambda look: look["reward"])["guidance"])
