"""What a run writes down about itself: every row to its file and to the trackers, and an alarm where one is due.

Owns the files of rows and the trackers of one attempt, and says at which alarm the run is to end. Reads nothing from
the ranks and moves nothing in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nftctl.engine.alarms import ADVICE, Alarm, Watch
from nftctl.engine.plan import JobPlan
from nftctl.engine.reporter import Reporter
from nftctl.engine.trackers import Trackers
from nftctl.engine.worker import Rewards
from nftctl.errors import TrainingFailed
from nftctl.profile.schema import Profile
from nftctl.run import words
from nftctl.run.directory import RunDirectory
from nftctl.run.rows import JsonLines, Row


@dataclass(slots=True)
class Observation:
    """The rows of one run.

    watch   None where the profile wants no alarms
    fatal   the alarm that ends the run, once it is raised
    """

    profile: Profile
    reporter: Reporter
    metrics: JsonLines
    evaluations: JsonLines
    scores: JsonLines
    alarms: JsonLines
    board: Trackers
    watch: Watch | None
    fatal: Alarm | None = None

    def step(self, row: Row, rewards: Rewards, total: int) -> None:
        """A finished step: its metrics, and the reward of every sample."""
        self.scores.append({"step": row["step"], "rewards": rewards})
        self.metrics.append(row)
        self.board.scalars(row)
        self.reporter.step(row, total)
        if text := words.dropped(row):
            self.reporter.warn(text)
        if self.watch is not None:
            self._alarm(row["step"], self.watch.stepped(self.metrics.rows))

    def evaluated(self, row: Row) -> None:
        """A finished evaluation."""
        self.evaluations.append(row)
        self.board.scalars(row)
        self.reporter.evaluated(row)
        if self.watch is not None:
            self._alarm(row["step"], self.watch.evaluated(self.metrics.rows, self.evaluations.rows))

    def refuse_standing(self, again: str) -> None:
        """Raise TrainingFailed where the run goes on under an alarm that ends it: whoever restarts it changed nothing.

        `again` is the command that goes on.
        """
        standing = [] if self.watch is None else [c for c in self.profile.alarms.stop if c in self.watch.standing]
        if standing:
            raise TrainingFailed(
                f"alarms.stop names {standing[0]}, which still stands since this run was last ended",
                hint=f"{ADVICE[standing[0]]}; to go on all the same: {again} --set 'alarms.stop=[]'",
            )

    def drawn(self, step: int, path: Path, tag: str = "samples") -> None:
        """A picture has been written: a grid of samples, or a step's extremes."""
        self.board.image(tag, step, path)

    def _alarm(self, step: int, raised: Sequence[Alarm]) -> None:
        for alarm in raised:
            said = {"step": step, "alarm": alarm.code, "message": alarm.message, "advice": alarm.advice}
            self.alarms.append({**said, "value": alarm.value, "limit": alarm.limit})
            # In trackers alone: metrics rows are promised to the bit, and when an evaluation was made is not.
            self.board.scalars({"step": step, f"alarms/{alarm.code}": alarm.value})
            self.reporter.warn(words.alarm(said))
            if self.fatal is None and alarm.code in self.profile.alarms.stop:
                self.fatal = alarm


@contextlib.contextmanager
def observe(run: RunDirectory, plan: JobPlan, reporter: Reporter) -> Iterator[Observation]:
    """The run's observation, with what lies beyond the step that it goes on from taken out."""
    step = plan.kept_through
    metrics = JsonLines(run.metrics, keep_through=step)
    evaluations = JsonLines(run.path / "evaluations.jsonl", keep_through=step)
    scores = JsonLines(run.path / "scores.jsonl", keep_through=step)
    alarms = JsonLines(run.path / "alarms.jsonl", keep_through=step)
    watch = Watch.of(plan.profile, metrics.rows, evaluations.rows) if plan.profile.alarms.enabled else None
    board = Trackers.of(plan, run, reporter.warn)
    try:
        yield Observation(plan.profile, reporter, metrics, evaluations, scores, alarms, board, watch)
    finally:
        for rows in (metrics, evaluations, scores, alarms):
            rows.close()
        board.close()
