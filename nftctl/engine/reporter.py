"""How a run talks to a person while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Reporter(Protocol):
    """Where a run talks to a person."""

    def note(self, text: str) -> None:
        """One line about what happens now."""

    def warn(self, text: str) -> None:
        """One line that deserves attention."""

    def step(self, row: Mapping[str, float], total: int) -> None:
        """A finished step: its metrics row, and the number of steps of the whole run."""

    def evaluated(self, row: Mapping[str, float]) -> None:
        """A finished evaluation: its row."""

    def done(self) -> None:
        """No more steps will follow."""
