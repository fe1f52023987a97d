"""`nftctl watch`: a run seen from outside, through its folder alone, until it ends. Touches nothing of it.

On a terminal the display of `launch`; anywhere else its lines, on stdout, since here they are what was asked for. No
torch and no Ray. How the run ended is said, and is not the exit code.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from nftctl.cli.completion import runs_folder
from nftctl.cli.console import Console
from nftctl.cli.display import can_redraw
from nftctl.cli.progress import LiveReporter, PlainReporter
from nftctl.cli.view import View
from nftctl.errors import UsageRefused
from nftctl.run import words
from nftctl.run.directory import RunDirectory
from nftctl.run.ending import describe
from nftctl.run.follow import Follower, Look

INTERVAL_S = 0.5
"""Seconds between looks."""


def watch(target: str, *, once: bool, json: bool) -> None:
    """Follow the run that `target` names until it ends; with `once`, show how it stands."""
    from nftctl.run.find import find_run

    if json and not once:
        raise UsageRefused("--json needs --once: a run that is followed has no one object", hint="add --once")
    console = Console(json=json)
    run = find_run(target, runs_folder())
    view = View(run.name, _samples(run.read_resolved()))
    reporter = _reporter(console, view)
    watching = _Watch(Follower(run, certain=1) if once else Follower(run), view, reporter)
    former = signal.signal(signal.SIGTERM, _terminated)
    try:
        if once:
            watching.once(console, run)
        else:
            watching.to_the_end()
    finally:
        reporter.done()
        signal.signal(signal.SIGTERM, former)


def _samples(resolved: Mapping[str, Any]) -> int:
    """Samples of a step by the stored profile; 0 where it does not say."""
    try:
        return int(resolved["data"]["rows_per_step"]) * int(resolved["rl"]["group_size"])
    except (LookupError, TypeError, ValueError):
        return 0


def _reporter(console: Console, view: View) -> PlainReporter:
    def warn(text: str) -> None:
        console.data(f"warning: {text}")

    # With --json the object says it, and `data` is silent.
    if can_redraw(sys.stdout) and not console.json:
        return LiveReporter(console, view, stream=sys.stdout, say=console.data, warn=warn)
    return PlainReporter(console, view, say=console.data, warn=warn)


class _Watch:
    """One run and where it is shown."""

    def __init__(self, follower: Follower, view: View, reporter: PlainReporter) -> None:
        self._follower = follower
        self._view = view
        self._reporter = reporter
        self._said: list[tuple[str, dict[str, Any]]] = []

    def to_the_end(self) -> None:
        """Look twice a second until no process holds the run."""
        live = self._reporter if isinstance(self._reporter, LiveReporter) else None
        # What a display shows of the past is its last state; a file has every line.
        look = self._tell(aloud=live is None)
        while True:
            if live is not None:
                live.draw()
            if look.ending.state != "running":
                self._reporter.done()
                self._reporter.note(describe(look.ending, self._view.step, look.total))
                return
            time.sleep(INTERVAL_S)
            look = self._tell()

    def once(self, console: Console, run: RunDirectory) -> None:
        """How the run stands now."""
        look = self._tell(aloud=False)
        if isinstance(self._reporter, LiveReporter):
            self._reporter.draw()
            self._reporter.done()
        else:
            console.data(f"step {self._view.step}/{look.total}  {self._view.figures()}".rstrip())
            if self._view.last:
                console.data(words.held_out(self._view.last))
            if self._view.alert:
                console.data(f"warning: {self._view.alert}")
        console.data(describe(look.ending, self._view.step, look.total))
        console.result("watch", run=str(run.path), **self._facts(look))

    def _facts(self, look: Look) -> dict[str, Any]:
        view, ending = self._view, look.ending
        return {
            "state": ending.state,
            "reason": ending.reason or None,
            "run_exit_code": None if ending.state in ("running", "crashed") else ending.exit_code,
            "attempt": look.attempt,
            "steps": {"done": view.step, "total": look.total},
            "seconds_per_step": view.pace,
            "train": dict(view.row) or None,
            "eval": {"before": dict(view.before), "last": dict(view.last)} if view.last else None,
            "warning": view.alert or None,
        }

    def _tell(self, *, aloud: bool = True) -> Look:
        """Look, and say what is new."""
        look, view = self._follower.look(), self._view
        resumed = look.attempt > view.attempt > 0
        view.attempt, view.total, view.state = look.attempt, look.total, look.ending.state
        if look.rewound is not None:
            self._rewind(look.rewound, look.kept)
        if aloud and resumed:
            self._reporter.note(f"attempt {look.attempt} goes on from step {view.step}")
        for kind, row in look.events:
            if kind != "step":
                self._said.append((kind, row))
            if aloud:
                self._say(kind, row)
            else:
                self._take(kind, row)
        return look

    def _say(self, kind: str, row: dict[str, Any]) -> None:
        if kind == "step":
            self._reporter.step(row, self._view.total)
            if text := words.dropped(row):
                self._reporter.warn(text)
        elif kind == "alarm":
            self._reporter.warn(words.alarm(row))
        else:
            self._reporter.evaluated(row)

    def _take(self, kind: str, row: dict[str, Any]) -> None:
        """The same without a word."""
        if kind == "step":
            self._view.stepped(row, self._view.total)
        elif kind == "alarm":
            self._view.alert = words.alarm(row)
        else:
            self._view.evaluated(row)

    def _rewind(self, step: int, kept: list[dict[str, Any]]) -> None:
        """Forget what the run took back."""
        self._said = [(kind, row) for kind, row in self._said if row["step"] <= step]
        self._view.forget()
        for kind, row in [*(("step", row) for row in kept), *self._said]:
            self._take(kind, row)


def _terminated(signum: int, frame: object) -> None:
    """SIGTERM as an exception, so that the terminal gets its cursor back."""
    raise SystemExit(128 + signum)
