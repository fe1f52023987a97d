"""What the runs of a comparison amount to: per method and budget the mean over seeds, and the lowest and the highest.

Owns the numbers of the tables and curves, and nothing of their form. A run that failed counts as long as it went, and
is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nftctl.learning.order import GUIDANCE

AXES = ("seconds", "samples")
"""What runs are given equal amounts of."""
FIGURES = ("reward", "judge", "diversity", "kl_distance")
"""What is said of held-out samples."""
COSTS = (
    "step_seconds", "step_cpu_seconds", "forwards_per_sample", "backwards_per_sample", "rss_peak_mb", "steps",
    "seconds", "samples",
)  # fmt: skip

Run = Mapping[str, Any]


def summarise(document: Mapping[str, Any]) -> dict[str, Any]:
    """Base, methods at both budgets with their curves, guidances, and costs."""
    runs, marks = document["runs"], document["plan"]["marks"]
    names = list(dict.fromkeys(run["method"] for run in runs if run["method"] != GUIDANCE))
    methods = {name: _method([run for run in runs if run["method"] == name], marks) for name in names}
    guided = [run for run in runs if run["method"] == GUIDANCE]
    starts = [run["curve"][0] for run in runs if run["method"] in names[:1]]
    return {
        "base": figures(starts) if starts else figures(_looks(guided, document["plan"]["guidance"])),
        "methods": methods,
        "guidance": {f"{g:g}": _guidance(guided, g) for g in _guidances(guided)},
    }


def _method(runs: Sequence[Run], marks: int) -> dict[str, Any]:
    return {
        "runs": len(runs),
        "failed": sum(bool(run["failed"]) for run in runs),
        "at": {axis: _at(runs, axis, marks) for axis in AXES},
        "curves": {axis: [{"mark": m, **_at(runs, axis, m)} for m in range(marks + 1)] for axis in AXES},
        "guided": [{"guidance": g, **figures(_looks(runs, g))} for g in _guidances(runs)],
        "cost": {name: band([run["cost"][name] for run in runs]) for name in COSTS},
    }


def _guidance(runs: Sequence[Run], guidance: float) -> dict[str, Any]:
    looks = _looks(runs, guidance)
    return figures(looks) | {name: band([look[name] for look in looks]) for name in ("sample_ms", "forwards")}


def _guidances(runs: Iterable[Run]) -> list[float]:
    return sorted({look["guidance"] for run in runs for look in run["guided"]})


def _looks(runs: Iterable[Run], guidance: float) -> list[Run]:
    return [look for run in runs for look in run["guided"] if look["guidance"] == guidance]


def _at(runs: Sequence[Run], axis: str, mark: int) -> dict[str, Any]:
    """The figures of every run where it reached a mark, and how far it was along both axes."""
    points = [point for run in runs if (point := reached(run, axis, mark)) is not None]
    return figures(points) | {name: band([point[name] for point in points]) for name in (*AXES, "steps")}


def reached(run: Run, axis: str, mark: int) -> Run | None:
    """The point of a run's curve that was the first to reach a mark; None where the run ended before."""
    name = f"{axis}_mark"
    return next((point for point in run["curve"] if point[name] is not None and point[name] >= mark), None)


def figures(points: Sequence[Run]) -> dict[str, Any]:
    """Bands of what is said of held-out samples."""
    return {name: band([point[name] for point in points]) for name in FIGURES}


def band(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, lowest and highest of what is there; None where nothing is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return {"mean": sum(there) / len(there), "low": min(there), "high": max(there)}
