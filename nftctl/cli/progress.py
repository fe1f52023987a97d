"""How a running job talks: one live line on a terminal, one plain line per step anywhere else, nothing with `-q`.

Implements the engine's Reporter. Everything goes to stderr; rich is imported only when there is a terminal to draw on.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nftctl.cli.console import Console, wants_colour

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BARS = "▁▂▃▄▅▆▇█"
SPARK_LENGTH = 16
PACE_STEPS = 10
"""Steps over which the pace for the remaining time is averaged."""


class PlainReporter:
    """One line per step: reads the same in a log file tomorrow."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.last_step = 0
        self._seconds: deque[float] = deque(maxlen=PACE_STEPS)

    def note(self, text: str) -> None:
        """One line about what happens now."""
        self._console.say(text)

    def warn(self, text: str) -> None:
        """One line that deserves attention; `-q` does not silence it."""
        self._console.warn(text)

    def step(self, row: Mapping[str, float], total: int) -> None:
        """A finished step."""
        self._count(row)
        self._console.say(f"step {self.last_step}/{total}  {self.figures(row, total)}")

    def done(self) -> None:
        """No more steps will follow."""

    def figures(self, row: Mapping[str, float], total: int) -> str:
        """Reward, loss, pace and remaining time. Example: `reward 0.553  loss 4.998  0.61 s/step  eta 1:24`."""
        parts = [f"{label} {row[key]:.4g}" for label, key in _SHOWN if key in row]
        if self._seconds:
            pace = sum(self._seconds) / len(self._seconds)
            parts += [f"{pace:.2f} s/step", f"eta {clock(pace * max(total - self.last_step, 0))}"]
        return "  ".join(parts)

    def _count(self, row: Mapping[str, float]) -> None:
        self.last_step = int(row["step"])
        if "timer/step" in row:
            self._seconds.append(float(row["timer/step"]))


_SHOWN = (("reward", "train/reward_mean"), ("loss", "train/loss"))


class LiveReporter(PlainReporter):
    """One line that redraws itself, with a spark line of the reward."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        # Asked now: while the line is drawn, sys.stderr is rich's stand-in, which has no encoding.
        self._encoding = sys.stderr.encoding or ""
        self._rewards: deque[float] = deque(maxlen=SPARK_LENGTH)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        """Above the live line once there is one."""
        if self._progress is None:
            super().note(text)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Above the live line once there is one."""
        if self._progress is None:
            super().warn(text)
        else:
            self.note(f"warning: {text}")

    def step(self, row: Mapping[str, float], total: int) -> None:
        """Advance the line."""
        self._count(row)
        if "train/reward_mean" in row:
            self._rewards.append(float(row["train/reward_mean"]))
        if self._progress is None or self._task is None:
            self._progress = _new_progress()
            self._task = self._progress.add_task("step", total=total, figures="")
            self._progress.start()
        text = f"{spark(self._rewards, self._encoding)}  {self.figures(row, total)}".lstrip()
        self._progress.update(self._task, completed=self.last_step, total=total, figures=text, refresh=True)

    def done(self) -> None:
        """Leave the last state of the line on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def reporter_for(console: Console) -> PlainReporter:
    """The reporter that fits stderr: live on a terminal that can redraw, plain otherwise or when quiet."""
    if console.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return PlainReporter(console)
    return LiveReporter(console)


def spark(values: deque[float] | list[float], encoding: str) -> str:
    """The values as bars between their least and greatest; empty where the terminal's encoding has no bars."""
    if not values or not encoding.lower().startswith("utf"):
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def clock(seconds: float) -> str:
    """Seconds as `1:24` or `2:03:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _new_progress() -> Progress:
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    colour: dict[str, Any] = {} if wants_colour(sys.stderr, os.environ) else {"no_color": True, "color_system": None}
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    return Progress(*columns, console=Terminal(file=sys.stderr, **colour), auto_refresh=False, transient=False)
