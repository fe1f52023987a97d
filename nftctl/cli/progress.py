"""How a running job talks: a live display on a terminal, one plain line per step anywhere else, nothing with `-q`.

Implements the engine's Reporter. A job's talk goes to stderr; rich is imported only when there is a terminal to draw
on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from nftctl.cli.console import Console
from nftctl.cli.display import Display, can_redraw
from nftctl.cli.view import View
from nftctl.run import words


class PlainReporter:
    """One line per step: reads the same in a log file tomorrow."""

    def __init__(
        self,
        console: Console,
        view: View | None = None,
        *,
        say: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Speaks on the console unless it is told where else."""
        self.view = View() if view is None else view
        self._say = say or console.say
        self._warn = warn or console.warn

    @property
    def last_step(self) -> int:
        """Number of the last finished step."""
        return self.view.step

    @last_step.setter
    def last_step(self, step: int) -> None:
        self.view.step = step

    def note(self, text: str) -> None:
        """One line about what happens now."""
        self._say(text)

    def warn(self, text: str) -> None:
        """One line that deserves attention; `-q` does not silence it."""
        self.view.alert = text
        self._warn(text)

    def step(self, row: Mapping[str, float], total: int) -> None:
        """A finished step."""
        self.view.stepped(row, total)
        self._say(f"step {self.last_step}/{total}  {self.view.figures()}")

    def evaluated(self, row: Mapping[str, float]) -> None:
        """A finished evaluation."""
        self.view.evaluated(row)
        self.note(words.held_out(row))

    def done(self) -> None:
        """No more steps will follow."""


class LiveReporter(PlainReporter):
    """A display that redraws itself, from the first step on."""

    def __init__(
        self,
        console: Console,
        view: View | None = None,
        *,
        stream: TextIO | None = None,
        say: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(console, view, say=say, warn=warn)
        # Asked for now: while the display is drawn, sys.stderr is rich's stand-in, which has no encoding.
        self._stream = stream or sys.stderr
        self._display: Display | None = None

    def note(self, text: str) -> None:
        """Above the display once there is one."""
        if self._display is None:
            super().note(text)
        else:
            self._display.above(text)

    def evaluated(self, row: Mapping[str, float]) -> None:
        """Above the display once there is one, and in it."""
        super().evaluated(row)
        if self._display is not None:
            self._display.refresh()

    def warn(self, text: str) -> None:
        """Above the display once there is one, and in it until the next one."""
        self.view.alert = text
        if self._display is None:
            self._warn(text)
        else:
            self._display.above(f"warning: {text}")
            self._display.refresh()

    def step(self, row: Mapping[str, float], total: int) -> None:
        """Redraw."""
        self.view.stepped(row, total)
        self.draw()

    def draw(self) -> None:
        """Draw what the view now is, for the first time too."""
        if self._display is None:
            self._display = Display(self.view, self._stream)
        self._display.refresh()

    def done(self) -> None:
        """Leave the last state on the screen."""
        if self._display is not None:
            self._display.close()
            self._display = None


def reporter_for(console: Console, view: View | None = None) -> PlainReporter:
    """The reporter that fits stderr: live on a terminal that can redraw, plain otherwise or when quiet."""
    if console.quiet or not can_redraw(sys.stderr):
        return PlainReporter(console, view)
    return LiveReporter(console, view)
