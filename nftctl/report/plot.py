"""A chart as inline SVG with its axes, legend and table: drawn once, without the page's script.

The drawing is stretched to whatever width there is, so axes are text of the page and strokes keep their width. Lines
differ by dashes as well as by colour. The script only adds the cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nftctl.report.curves import Chart, Line, Point
from nftctl.report.figures import short, tick_labels, ticks
from nftctl.report.markup import Markup, folded, table, tag, with_code
from nftctl.run.metrics import EVALUATIONS, Metric, metric_of

T = TypeVar("T")

SIDE = 1000
"""Width and height of the drawing in its own units."""
TABLE_ROWS = 40
"""Rows of a chart's table; longer ones are thinned evenly."""
SLOTS = 8
"""Colours and dash patterns of the style sheet."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The range of steps and values that the drawing shows."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Frame:
        """All points of the lines with a little air above and below."""
        steps = [step for line in lines for step, _ in line.points]
        values = [value for line in lines for _, value in line.points]
        low, high = min(values), max(values)
        if low >= 0 and low < 0.2 * high:
            low = 0.0  # near enough to zero to show it
        air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        left, right = min(steps), max(steps)
        return cls(left, right if right > left else left + 1, low if low == 0 else low - air, high + air)

    def across(self, step: float) -> float:
        """A step as a share of the width."""
        return (step - self.left) / (self.right - self.left)

    def down(self, value: float) -> float:
        """A value as a share of the height, from above."""
        return (self.high - value) / (self.high - self.low)

    def at(self, point: Point) -> str:
        """A point in units of the drawing."""
        return f"{SIDE * self.across(point[0]):.1f} {SIDE * self.down(point[1]):.1f}"


def figure(chart: Chart, *, tall: bool = False) -> Markup:
    """The whole chart."""
    frame = Frame.of(chart.lines)
    title = f"{chart.name}-title"
    area = tag(
        "div",
        _drawing(chart.lines, frame),
        tag("div", class_="cursor", hidden=True),
        class_="area",
        tabindex="0",
        role="slider",
        aria_labelledby=title,
        aria_describedby="how-to-read",
        aria_valuemin=int(frame.left),
        aria_valuemax=int(frame.right),
        aria_valuenow=int(frame.right),
        aria_valuetext=f"step {frame.right:.0f}",
        data_left=frame.left,
        data_right=frame.right,
        data_low=f"{frame.low:.6g}",
        data_high=f"{frame.high:.6g}",
    )
    plot = tag("div", _values_axis(frame), area, _steps_axis(frame), class_="plot")
    note = Markup.join_all(text for text in (chart.note, _stretched(chart)) if text)
    heading = tag("h3", chart.title, id=title)
    caption = tag("figcaption", heading, tag("p", Markup(note), class_="note") if note else "")
    below = tag("div", _meanings(chart.keys), folded("Values as a table", _values(chart)), class_="below")
    kind = "chart tall" if tall else "chart"
    return tag("figure", caption, legend(chart), plot, below, class_=kind, data_chart=chart.name)


def _meanings(keys: Sequence[str]) -> Markup | str:
    """What the figures are, how they should look, and what to do if they do not; once for all that are of one kind."""
    kinds: dict[Metric, list[str]] = {}
    for key in keys:
        if metric := metric_of(key) or metric_of(key, EVALUATIONS):
            kinds.setdefault(metric, []).append(key)
    entries = [part for metric, names in kinds.items() for part in _meaning(metric, names)]
    return folded("What it means", tag("dl", *entries, class_="meanings")) if entries else ""


def _meaning(metric: Metric, names: Sequence[str]) -> Iterator[Markup]:
    yield tag("dt", Markup.join_all((tag("code", name) for name in names), ", "))
    yield tag("dd", with_code(metric.meaning))
    if metric.healthy:
        yield tag("dd", tag("b", "Healthy: "), with_code(metric.healthy), ".")
    if metric.otherwise:
        yield tag("dd", tag("b", "If not: "), with_code(metric.otherwise), ".")


def legend(chart: Chart) -> Markup:
    """A line's sample, its name, and its value at the cursor; without a cursor, the last one."""
    entries = [
        tag(
            "li",
            _swatch(line),
            tag("span", line.label, class_="name"),
            tag("b", short(line.points[-1][1]), class_="value", data_last=short(line.points[-1][1])),
        )
        for line in chart.lines
    ]
    last = max(step for line in chart.lines for step, _ in line.points)
    at = tag("li", "step ", tag("b", last, class_="at", data_last=last), class_="step")
    return tag("ul", at, *entries, class_="legend")


def _stretched(chart: Chart) -> str:
    return f" Each point is the mean of {chart.stretch} steps." if chart.stretch > 1 else ""


def _kind(line: Line) -> str:
    return f"line slot-{line.slot % SLOTS} {line.look}"


def _swatch(line: Line) -> Markup:
    sample = tag("path", d="M2 6H26", class_=_kind(line))
    mark = tag("path", d="M14 6h0", class_=f"{_kind(line)} dot") if line.look == "marks" else ""
    return tag("svg", sample, mark, viewBox="0 0 28 12", class_="swatch", aria_hidden="true")


def _drawing(lines: Sequence[Line], frame: Frame) -> Markup:
    grid = [_rule(f"M0 {SIDE * frame.down(y):.1f}H{SIDE}") for y in _value_ticks(frame)]
    paths = [_path(line, frame) for line in lines if len(line.points) > 1]
    # A stroke without length has round ends: a dot that stays round however the drawing is stretched.
    dots = [
        tag("path", d="".join(f"M{frame.at(point)}h0" for point in line.points), class_=f"{_kind(line)} dot")
        for line in lines
        if line.look == "marks" or len(line.points) == 1
    ]
    return tag(
        "svg",
        *grid,
        *paths,
        *dots,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {SIDE} {SIDE}",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )


def _rule(path: str) -> Markup:
    return tag("path", d=path, class_="rule")


def _path(line: Line, frame: Frame) -> Markup:
    return tag("path", d=f"M{'L'.join(frame.at(point) for point in line.points)}", class_=_kind(line))


def _value_ticks(frame: Frame) -> list[float]:
    return ticks(frame.low, frame.high, 4)


def _values_axis(frame: Frame) -> Markup:
    places = _value_ticks(frame)
    marks = [
        tag("span", text, style=f"top:{100 * frame.down(y):.2f}%")
        for y, text in zip(places, tick_labels(places), strict=True)
    ]
    return tag("div", *marks, class_="values", aria_hidden="true")


def _steps_axis(frame: Frame) -> Markup:
    whole = [x for x in ticks(frame.left, frame.right, 5) if x == int(x)]
    marks = [tag("span", int(x), style=f"left:{100 * frame.across(x):.2f}%") for x in whole]
    return tag("div", *marks, class_="steps", aria_hidden="true")


def _values(chart: Chart) -> Markup:
    """The points of all lines by step, as many as can be read."""
    steps = sorted({step for line in chart.lines for step, _ in line.points})
    chosen = evenly(steps, TABLE_ROWS)
    marked = {step for line in chart.lines if line.look == "marks" for step, _ in line.points}
    shown = sorted({*chosen, *evenly(sorted(marked), TABLE_ROWS)})
    at = [dict(line.points) for line in chart.lines]
    rows = [(step, *(short(known[step]) if step in known else "" for known in at)) for step in shown]
    head = ("step", *(line.label for line in chart.lines))
    left = len(steps) - len(shown)
    more = tag("p", f"{left} steps between these are left out; metrics.jsonl has them all.", class_="note")
    return Markup(table(head, rows, caption=chart.title, numbers=True) + (more if left else ""))


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
