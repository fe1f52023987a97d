"""When a run looks at its model, and what it leaves of that: held-out rewards, grids of samples, a step's extremes.

Looks before the first step, where the profile says so, and after the last. Moves no random number of the run. Beside
each picture lies a JSON file that says what is in it, and where, so that a reader can cut single images out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nftctl.engine.evaluation import Evaluation
from nftctl.engine.group import Group
from nftctl.engine.observation import Observation
from nftctl.engine.pictures import join_grids
from nftctl.engine.plan import JobPlan
from nftctl.run.canonical import pretty_bytes
from nftctl.run.directory import RunDirectory, atomic_write
from nftctl.run.state import RunState


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

    def draws(self, step: int) -> bool:
        """Whether samples are due after `step`, whose images have to be kept for it."""
        every, last = self.plan.profile.samples.every, step == self.plan.total_steps
        return bool(self.evaluation.grid) and (last or bool(every and step % every == 0))

    def scores(self, state: RunState) -> bool:
        """Whether an evaluation is due after the step that led to `state`."""
        every, last = self.plan.profile.eval.every, state.step == self.plan.total_steps
        return last or bool(every and state.step % every == 0)

    def if_due(self, state: RunState) -> None:
        """After a step."""
        scored, drawn = self.scores(state), self.draws(state.step)
        if drawn:
            self._extremes(state.step)
        self.now(state, scored=scored, drawn=drawn)

    def now(self, state: RunState, *, scored: bool = True, drawn: bool = True) -> None:
        """Score the held-out samples, and draw the grid."""
        row = self.evaluation.score(self.group, state.step) if scored else {}
        if row:
            self.observation.evaluated(row)
        if drawn and self.evaluation.grid:
            path = self.run.samples / f"step_{state.step:06d}.png"
            self._drawn(state.step, path, self.evaluation.draw(self.group, path, state), "samples")

    def _extremes(self, step: int) -> None:
        """The best and worst samples of the step's own rollout."""
        path = self.run.samples / f"extremes_{step:06d}.png"
        answer = self.group.call("extremes", path, f"step {step}: best and worst")[0]
        if answer is not None:
            layout, which = answer
            self._drawn(step, path, {"step": step, **which, **layout.facts()}, "extremes")

    def _drawn(self, step: int, path: Path, facts: Mapping[str, Any], tag: str) -> None:
        atomic_write(path.with_suffix(".json"), pretty_bytes(facts))
        self.observation.drawn(step, path, tag)

    def last_grid(self) -> Path | None:
        """The first and the last grid side by side, where there are two."""
        grids = sorted(self.run.samples.glob("step_*.png"))
        if len(grids) < 2:
            return grids[0] if grids else None
        target = self.run.samples / "before_after.png"
        join_grids(grids[0], grids[-1], target)
        return target
