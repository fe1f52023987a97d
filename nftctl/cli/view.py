"""What is known of a run while it is looked at: its newest rows, and the figures that people ask for first.

Owns pace and remaining time. Knows nothing of terminals, so that lines in a file and the live display say the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

PACE_STEPS = 10
"""Steps over which the pace for the remaining time is averaged."""
REWARDS = 200
"""Rewards that are kept for the spark line: more than a wide terminal shows."""

Row = Mapping[str, float]

SHOWN = (("reward", "train/reward_mean"), ("loss", "train/loss"))


@dataclass(slots=True)
class View:
    """One run as it stands.

    state      one word or sentence about the run, where it is looked at from outside
    alert      the last warning
    """

    name: str = ""
    samples_per_step: int = 0
    attempt: int = 0
    state: str = ""
    step: int = 0
    total: int = 0
    row: Row = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=REWARDS))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    before: Row = field(default_factory=dict)
    last: Row = field(default_factory=dict)
    alert: str = ""
    seen: float = field(default_factory=time.monotonic)
    """When the last step was heard of, by this process's clock; 0 where the run stands still."""

    def stepped(self, row: Row, total: int) -> None:
        """A finished step."""
        self.row, self.step, self.total, self.seen = row, int(row["step"]), total, time.monotonic()
        if "train/reward_mean" in row:
            self.rewards.append(float(row["train/reward_mean"]))
        if "timer/step" in row:
            self.seconds.append(float(row["timer/step"]))

    def evaluated(self, row: Row) -> None:
        """A finished evaluation; the first one is what later ones are held against."""
        self.before = self.before or row
        self.last = row

    def forget(self) -> None:
        """Everything of steps: they are about to be told again."""
        self.row, self.step, self.before, self.last, self.alert = {}, 0, {}, {}, ""
        self.rewards.clear()
        self.seconds.clear()

    @property
    def pace(self) -> float | None:
        """Seconds per step, over the newest ones."""
        seconds = tuple(self.seconds)  # it may be asked for from the thread that draws
        return sum(seconds) / len(seconds) if seconds else None

    @property
    def eta(self) -> str:
        """Remaining time by the pace; empty where there is none."""
        pace = self.pace
        return "" if pace is None else clock(pace * max(self.total - self.step, 0))

    def figures(self) -> str:
        """Reward, loss, pace and remaining time. Example: `reward 0.553  loss 4.998  0.61 s/step  eta 1:24`."""
        parts = [f"{label} {self.row[key]:.4g}" for label, key in SHOWN if key in self.row]
        if (pace := self.pace) is not None:
            parts += [f"{pace:.2f} s/step", f"eta {self.eta}"]
        return "  ".join(parts)


def clock(seconds: float) -> str:
    """Seconds as `1:24` or `2:03:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
