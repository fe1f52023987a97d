"""The live display: one picture of a run that redraws itself at the foot of the terminal, everything said above it.

Meaning never rests on colour, and where the terminal's encoding has no block characters there are neither bars of them
nor a frame. Fits 80 columns and 24 lines; a narrower terminal loses the frame first and the ends of lines then.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from nftctl.cli.console import wants_colour
from nftctl.cli.view import View, clock

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
FRAME_WIDTH = 60
"""Columns below which a frame costs more than it gives."""
MOST = 100
"""Columns that the picture takes at the most: a bar across a wide terminal says no more."""
LABEL = 10

STAGES = (
    ("sample", "timer/sample", "█", "s", "cyan"),
    ("prepare", "timer/prepare", "▓", "p", "blue"),
    ("reward", "timer/reward_exposed", "▒", "r", "yellow"),
    ("train", "timer/train", "░", "t", "green"),
)
"""Stages of a step: name, metric, block, letter where there are no blocks, colour."""

LOSSES = (("policy", "train/policy_loss"), ("kl", "train/kl_loss"), ("grad norm", "train/grad_norm"))
OLD = (("version", "old/version"), ("age", "old/age"), ("share kept", "old/share"))


class Display:
    """Draws a view on a terminal until it is closed; the last state stays on the screen.

    Begins with the first `refresh` and not when it is made: an interrupt in between would leave the cursor hidden.
    """

    def __init__(self, view: View, stream: TextIO) -> None:
        from rich.live import Live

        self._view = view
        self._utf = speaks_utf(stream)
        self._terminal = terminal(stream)
        # Once a second, so that a step of a minute is not taken for one that hangs.
        self._live: Live = Live(
            get_renderable=self._picture,
            console=self._terminal,
            refresh_per_second=1,
            transient=False,
            vertical_overflow="crop",
        )

    def _picture(self) -> RenderableType:
        # Also from the thread that draws once a second, while the view may be changing: each part is read once.
        return picture(self._view, width=self._terminal.width, utf=self._utf)

    def refresh(self) -> None:
        """Draw what the view now is, for the first time too."""
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

    def above(self, text: str) -> None:
        """A line that stays in the scrollback."""
        self._terminal.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw once more and leave it."""
        self._view.seen = 0.0
        self._live.stop()


def speaks_utf(stream: TextIO) -> bool:
    """Whether blocks and frames can be written there."""
    return (stream.encoding or "").lower().startswith("utf")


def terminal(stream: TextIO) -> Console:
    """A rich console that shows colour exactly where our own messages do."""
    from rich.console import Console

    colour: dict[str, Any] = {} if wants_colour(stream, os.environ) else {"no_color": True, "color_system": None}
    return Console(file=stream, **colour)


def picture(view: View, *, width: int, utf: bool) -> RenderableType:
    """The view in `width` columns."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel

    framed = utf and width >= FRAME_WIDTH
    outer = min(width, MOST)
    lines = list(_lines(view, outer - 4 if framed else outer, utf, titled=not framed))
    if not framed:
        return Group(*lines)
    return Panel(
        Group(*lines), box=box.ROUNDED, width=outer, title=_title(view), title_align="left", border_style="dim"
    )


def _title(view: View) -> Text:
    from rich.text import Text

    parts = [view.name, f"attempt {view.attempt}" if view.attempt > 1 else "", view.state]
    return Text(" · ".join(filter(None, parts)), style="bold not dim", overflow="ellipsis")


def _lines(view: View, width: int, utf: bool, *, titled: bool) -> Iterable[Text]:
    from rich.text import Text

    room = width - LABEL
    if titled and (title := _title(view).plain):
        yield _cut(Text(title if utf else title.replace(" · ", " - "), style="bold"), width, utf)
    rows = [
        ("step", _progress(view, room, utf)),
        ("reward", _reward(view, room, utf)),
        ("held-out", Text(_held_out(view))),
        ("loss", Text(_named(view, LOSSES))),
        ("old", Text(_named(view, OLD))),
        ("stages", _stages(view, room, utf)),
        ("", _legend(view, utf)),
        ("pace", Text(_pace(view))),
    ]
    for label, text in rows:
        if text.plain:
            yield _cut(Text.assemble((label.ljust(LABEL), "dim"), text), width, utf)
    if view.alert:
        yield _cut(Text.assemble(("! ", "bold yellow"), " ".join(view.alert.split())), width, utf)


def _cut(text: Text, width: int, utf: bool) -> Text:
    text.truncate(max(width, 1), overflow="ellipsis" if utf else "crop")
    text.no_wrap = True
    return text


def _progress(view: View, room: int, utf: bool) -> Text:
    from rich.text import Text

    share = min(view.step / view.total, 1.0) if view.total else 0.0
    words = f"{view.step}/{view.total}"
    after = f"{share:4.0%}" + (f"  eta {view.eta}" if view.eta and view.step < view.total else "")
    size = room - len(words) - len(after) - 4
    if size < 8:
        return Text(f"{words}  {after.strip()}")
    full = math.floor(share * size)
    done, rest = ("━" * full, "─" * (size - full)) if utf else ("#" * full, "." * (size - full))
    return Text.assemble((words, "bold"), "  ", (done, "green"), (rest, "dim"), "  ", after)


def _reward(view: View, room: int, utf: bool) -> Text:
    from rich.text import Text

    rewards = list(view.rewards)
    if not rewards:
        return Text("")
    now = f"{rewards[-1]:.4f}"
    shown = rewards[-max(room - len(now) - 2, 0) :] if room > len(now) + 2 else []
    line = spark(shown, "utf-8" if utf else "")
    span = "" if line else f"  between {min(rewards):.4f} and {max(rewards):.4f}"
    return Text.assemble((now, "bold"), (f"  {line}" if line else "", "magenta"), span)


def _held_out(view: View) -> str:
    before, last = view.before, view.last
    if not (before and last):
        return ""
    if before["step"] == last["step"]:
        return f"{last['eval/reward']:.4f}  at step {last['step']}"
    change = last["eval/reward"] - before["eval/reward"]
    steps = f"step {before['step']} -> {last['step']}"
    return f"{before['eval/reward']:.4f} -> {last['eval/reward']:.4f}  {change:+.4f}  {steps}"


def _named(view: View, names: Sequence[tuple[str, str]]) -> str:
    return "  ".join(f"{label} {view.row[key]:.4g}" for label, key in names if key in view.row)


def _shares(view: View) -> list[float]:
    seconds = [float(view.row.get(metric, 0.0)) for _, metric, *_ in STAGES]
    total = sum(seconds)
    return [value / total for value in seconds] if total > 0 else []


def _stages(view: View, room: int, utf: bool) -> Text:
    from rich.text import Text

    text, shares, drawn, upto = Text(), _shares(view), 0, 0.0
    for share, (_, _, block, letter, colour) in zip(shares, STAGES, strict=False):
        # From the running sum, so that the parts fill the line whatever is rounded.
        upto += share
        end = round(upto * room)
        text.append((block if utf else letter) * (end - drawn), style=colour)
        drawn = end
    return text


def _legend(view: View, utf: bool) -> Text:
    from rich.text import Text

    text = Text()
    for share, (name, _, block, letter, colour) in zip(_shares(view), STAGES, strict=False):
        text.append(f"{block if utf else letter} ", style=colour).append(f"{name} {share:.0%}  ")
    text.rstrip()
    return text


def _pace(view: View) -> str:
    pace, seen = view.pace, view.seen
    if pace is None:
        return ""
    parts = [f"{pace:.2f} s/step"]
    if view.samples_per_step and pace > 0:
        parts.append(f"{view.samples_per_step / pace:.3g} samples/s")
    if seen and (waited := time.monotonic() - seen) >= max(2.0, pace):
        parts.append(f"this step for {clock(waited)}")
    return "  ".join(parts)


def spark(values: Sequence[float], encoding: str) -> str:
    """The values as bars between their least and greatest; empty where the terminal's encoding has no bars."""
    if not values or not encoding.lower().startswith("utf"):
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def can_redraw(stream: TextIO) -> bool:
    """Whether there is a terminal that can be drawn on."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
