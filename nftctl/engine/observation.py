"""What a run writes down about itself: every row to its file and to the trackers, and a warning where one is due.

Owns the files of rows and the trackers of one attempt. Reads nothing from the ranks and moves nothing in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nftctl.engine.plan import JobPlan
from nftctl.engine.reporter import Reporter
from nftctl.engine.trackers import TensorBoard
from nftctl.profile.schema import Profile
from nftctl.run.directory import RunDirectory
from nftctl.run.rows import JsonLines, Row


@dataclass(slots=True)
class Observation:
    """The rows of one run."""

    profile: Profile
    reporter: Reporter
    metrics: JsonLines
    evaluations: JsonLines
    board: TensorBoard

    def step(self, row: Row, total: int) -> None:
        """A finished step."""
        self.metrics.append(row)
        self.board.scalars(row)
        self.reporter.step(row, total)
        self._warn(row)

    def evaluated(self, row: Row) -> None:
        """A finished evaluation."""
        self.evaluations.append(row)
        self.board.scalars(row)
        self.reporter.note(f"held-out reward {row['eval/reward']:.3f} at step {row['step']}")

    def drawn(self, step: int, path: Path) -> None:
        """A grid of samples has been written."""
        self.board.image("samples", step, path)

    def _warn(self, row: Row) -> None:
        step = row["step"]
        if row["reward/zero_spread_groups"] >= self.profile.data.rows_per_step - row["reward/dropped_groups"]:
            self.reporter.warn(
                f"step {step}: every group has one reward for all its samples; nothing is learned from it"
            )
        if row["train/advantage_clamped_low"] + row["train/advantage_clamped_high"] > 0.5:
            self.reporter.warn(f"step {step}: more than half of the advantages are at the clamp")
        if row["reward/dropped_groups"]:
            self.reporter.warn(f"step {step}: {row['reward/dropped_groups']:.0f} groups dropped, their scores failed")


@contextlib.contextmanager
def observe(run: RunDirectory, plan: JobPlan, reporter: Reporter) -> Iterator[Observation]:
    """The run's observation, with what lies beyond the step that it goes on from taken out."""
    step = plan.state.step
    metrics = JsonLines(run.metrics, keep_through=step)
    evaluations = JsonLines(run.path / "evaluations.jsonl", keep_through=step)
    board = TensorBoard(
        run.path / "tensorboard", enabled=plan.profile.logging.tensorboard, warn=reporter.warn, keep_through=step
    )
    try:
        yield Observation(plan.profile, reporter, metrics, evaluations, board)
    finally:
        metrics.close()
        evaluations.close()
        board.close()
