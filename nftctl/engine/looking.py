"""When a run looks at its model, and what it leaves of that: held-out rewards and grids of samples.

Looks before the first step, where the profile says so, and after the last. Moves no random number of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nftctl.engine.evaluation import Evaluation
from nftctl.engine.group import Group
from nftctl.engine.observation import Observation
from nftctl.engine.pictures import join_grids
from nftctl.engine.plan import JobPlan
from nftctl.run.directory import RunDirectory


@dataclass(slots=True)
class Looking:
    """The looks of one run."""

    plan: JobPlan
    run: RunDirectory
    group: Group
    observation: Observation
    evaluation: Evaluation

    @classmethod
    def of(cls, plan: JobPlan, run: RunDirectory, group: Group, observation: Observation) -> Looking:
        """What the plan's profile asks to be looked at."""
        return cls(plan, run, group, observation, Evaluation.of(plan.profile, plan.prompt_path))

    def if_due(self, step: int) -> None:
        """After a step."""
        settings, last = self.plan.profile, step == self.plan.total_steps
        scored = last or bool(settings.eval.every and step % settings.eval.every == 0)
        drawn = last or bool(settings.samples.every and step % settings.samples.every == 0)
        self.now(step, scored=scored, drawn=drawn)

    def now(self, step: int, *, scored: bool = True, drawn: bool = True) -> None:
        """Score the held-out samples, and draw the grid."""
        row = self.evaluation.score(self.group, step) if scored else {}
        if row:
            self.observation.evaluated(row)
        path = self.evaluation.draw(self.group, self.run.samples / f"step_{step:06d}.png", step) if drawn else None
        if path:
            self.observation.drawn(step, path)

    def last_grid(self) -> Path | None:
        """The first and the last grid side by side, where there are two."""
        grids = sorted(self.run.samples.glob("step_*.png"))
        if len(grids) < 2:
            return grids[0] if grids else None
        target = self.run.samples / "before_after.png"
        join_grids(grids[0], grids[-1], target)
        return target
