"""Where the time of a step went, and how much was done in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nftctl.report.facts import RunFacts, number, numbers
from nftctl.report.figures import seconds
from nftctl.report.markup import Markup, table, tag

STAGES = {
    "sample": "sampling images",
    "prepare": "old and reference velocities",
    "reward_exposed": "waiting for rewards",
    "train": "forward, backward, optimizer",
}
"""Stage -> what happens in it, in the order of a step."""
REST = "rest"
WARM = 2
"""Steps at the beginning that are left out where there are more than three times as many: the first ones compile."""


@dataclass(frozen=True, slots=True)
class Times:
    """Medians over the steps, in seconds."""

    stages: dict[str, float]
    step: float
    steps: int
    """Steps that the medians are over."""
    total: float
    """Sum over all steps."""
    images_per_second: float | None
    forwards: tuple[float, float] | None
    """Planned and executed, over all steps."""

    def document(self) -> dict[str, Any]:
        """The times for JSON."""
        return {
            "step_seconds": self.step,
            "stage_seconds": self.stages,
            "measured_steps": self.steps,
            "training_seconds": self.total,
            "images_per_second": self.images_per_second,
            "forwards": None if self.forwards is None else {"planned": self.forwards[0], "executed": self.forwards[1]},
        }


def times_of(run: RunFacts) -> Times | None:
    """None when no step was timed."""
    timed = [row for row in run.rows if number(row, "timer/step")]
    if not timed:
        return None
    rows = timed[WARM:] if len(timed) > 3 * WARM else timed
    step = median(numbers(rows, "timer/step"))
    stages = {name: median(values) for name in STAGES if (values := numbers(rows, f"timer/{name}"))}
    if stages and (rest := step - sum(stages.values())) > 0:
        stages[REST] = rest
    images = run.images_per_step
    planned, executed = numbers(timed, "forwards/planned"), numbers(timed, "forwards/executed")
    return Times(
        stages,
        step,
        len(rows),
        sum(numbers(timed, "timer/step")),
        images / step if images else None,
        (sum(planned), sum(executed)) if planned and executed else None,
    )


def section(times: Sequence[tuple[str, Times]]) -> Markup:
    """A bar and a table for each run; `times` are named."""
    parts = [_of_one(name if len(times) > 1 else "", found) for name, found in times]
    return Markup.join_all(parts)


def _of_one(name: str, found: Times) -> Markup:
    whole = sum(found.stages.values())
    bar = tag(
        "div",
        *(
            tag("i", class_=f"stage-{i}", style=f"width:{100 * value / whole:.3f}%")
            for i, value in enumerate(found.stages.values())
        ),
        class_="stages",
        aria_hidden="true",
    )
    rows = [
        (
            Markup(tag("i", class_=f"key stage-{i}", aria_hidden="true") + tag("span", key.replace("_", " "))),
            STAGES.get(key, "everything between"),
            seconds(value),
            f"{100 * value / whole:.0f} %",
        )
        for i, (key, value) in enumerate(found.stages.items())
    ]
    about = f"Median over {found.steps} steps"
    heading = tag("h3", name) if name else ""
    stages = [bar, table(("stage", "what happens", "seconds", "share"), rows, caption=about)] if rows else []
    return Markup.join_all([heading, *stages, tag("p", _sentence(found), class_="note")])


def _sentence(found: Times) -> str:
    parts = [f"Median step {seconds(found.step)}, over {found.steps} steps; all steps together {seconds(found.total)}."]
    if found.images_per_second:
        parts.append(f"{found.images_per_second:.3g} images per second, sampled, scored and trained on.")
    if found.forwards:
        planned, executed = found.forwards
        extra = "exactly as planned" if planned == executed else f"{planned:,.0f} were planned"
        parts.append(f"{executed:,.0f} forwards, {extra}.")
    return " ".join(parts)
