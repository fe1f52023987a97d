"""What a run is asked for, as plain data: it goes to a process of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nftctl.learning.splits import Split

GUIDANCE = "guidance"
"""The method that trains nothing and is looked at under each guidance."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Until when a run goes on, and at how many places along each axis it is looked at."""

    seconds: float
    samples: int
    marks: int


@dataclass(frozen=True, slots=True)
class Order:
    """One run to be made.

    number      of the trial, or None for a run of the comparison
    guidances   what the method `guidance` looks under; of another method, what its last policy is looked at under, too
    """

    method: str
    settings: dict[str, float]
    seed: int
    split: Split
    budget: Budget
    profile: dict[str, Any]
    number: int | None = None
    guidances: tuple[float, ...] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Order:
        """An order as JSON brought it."""
        plain = dict(document)
        plain["budget"] = Budget(**plain["budget"])
        plain["guidances"] = tuple(plain["guidances"])
        return cls(**plain)
