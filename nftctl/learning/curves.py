"""The curves of a comparison: reward and judge along seconds and along samples, with bands over the seeds.

A band reaches from the lowest to the highest seed, its line is the mean. Plain guidance costs no training and stands as
level lines: that chosen on the tuning split, and none. Lines differ by dashes as well as by colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nftctl.learning.drawing import Anchor, Area, Drawing, Point, Stroke, Words
from nftctl.learning.order import GUIDANCE
from nftctl.learning.table import title

STYLES: dict[str, tuple[str, tuple[float, ...]]] = {
    "nft": ("#1f5fa8", ()),
    "flow-grpo": ("#d95f02", (9, 4)),
    "best-of-group": ("#2a8a4a", (3, 3)),
    "control": ("#777777", (10, 3, 2, 3)),
    GUIDANCE: ("#8a3ba8", (2, 4)),
}
QUIET, GRID = "#666666", "#dddddd"
LEAST_SPAN = 0.004
"""Of a panel, from bottom to top: smaller differences look like what they are, and ticks stay short."""
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP, FOOT = 420, 280, 56, 44, 64, 50
LEGEND_ROW = 20
TITLES = {"reward": "test reward", "judge": "judge, never rewarded"}


def draw(document: Mapping[str, Any], axis: str) -> Drawing:
    """Panels of reward and, where there is one, judge along one axis."""
    methods = document["summary"]["methods"]
    panels = [name for name in TITLES if document["summary"]["base"][name] is not None]
    entries = [(name, title(name)) for name in methods] + [(GUIDANCE, text) for text, _ in _levels(document, "reward")]
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP) - GAP + 30
    drawing = Drawing(width, TOP + PANEL_HEIGHT + FOOT + LEGEND_ROW * len(entries) + 14)
    for number, name in enumerate(panels):
        drawing.parts += _panel(document, axis, name, LEFT + number * (PANEL_WIDTH + GAP))
    for number, entry in enumerate(entries):
        drawing.parts += _entry(*entry, TOP + PANEL_HEIGHT + FOOT + LEGEND_ROW * (number + 0.5))
    return drawing


def _levels(document: Mapping[str, Any], name: str) -> list[tuple[str, float]]:
    """Level lines: words and height."""
    chosen = document["chosen"].get(GUIDANCE)
    if chosen is None:
        return []
    key = f"{chosen['settings']['guidance']:g}"
    band = document["summary"]["guidance"][key][name]
    how = "chosen by tuning" if document["plan"]["trials"] > 1 else "the only one tried"
    return [] if band is None else [(f"base, guidance {key}: {how}, no training", band["mean"])]


def _panel(document: Mapping[str, Any], axis: str, name: str, left: float) -> Iterator[Area | Stroke | Words]:
    plan, methods = document["plan"], document["summary"]["methods"]
    whole = float(plan[axis])
    low, high = _range(document, axis, name)

    def at(x: float, y: float) -> Point:
        return left + PANEL_WIDTH * x / whole, TOP + PANEL_HEIGHT * (high - y) / (high - low)

    for y in _ticks(low, high):
        yield Stroke([at(0, y), at(whole, y)], GRID)
        yield Words((left - 8, at(0, y)[1]), f"{y:g}", QUIET, "end")
    for x in (0.0, whole / 2, whole):
        anchor: Anchor = "middle"
        yield Words((at(x, 0)[0], TOP + PANEL_HEIGHT + 14), f"{x:,g}", QUIET, anchor)
    where = "seconds of training, one thread" if axis == "seconds" else "samples made and scored"
    yield Words((left + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 32), where, QUIET, "middle")
    yield Words((left, TOP - 18), TITLES[name], bold=True)
    lines = {method: _line(found["curves"][axis], name, plan["marks"], whole) for method, found in methods.items()}
    for method, line in lines.items():
        colour, _ = STYLES[method]
        edge = [at(x, band["high"]) for x, band in line] + [at(x, band["low"]) for x, band in reversed(line)]
        if len(line) > 1:
            yield Area(edge, colour, 0.16)
    for _, y in _levels(document, name):
        yield Stroke([at(0, y), at(whole, y)], STYLES[GUIDANCE][0], 1.8, STYLES[GUIDANCE][1])
    for method, line in lines.items():
        colour, dashes = STYLES[method]
        if len(line) > 1:
            yield Stroke([at(x, band["mean"]) for x, band in line], colour, 2.2, dashes)


def _line(curve: Sequence[Mapping[str, Any]], name: str, marks: int, whole: float) -> list[tuple[float, Any]]:
    return [(whole * point["mark"] / marks, point[name]) for point in curve if point[name] is not None]


def _range(document: Mapping[str, Any], axis: str, name: str) -> tuple[float, float]:
    bands = [
        point[name]
        for found in document["summary"]["methods"].values()
        for point in found["curves"][axis]
        if point[name] is not None
    ]
    values = [band[end] for band in bands for end in ("low", "high")] + [y for _, y in _levels(document, name)]
    low, high = min(values), max(values)
    air = max(0.05 * (high - low) or 0.05, (LEAST_SPAN - (high - low)) / 2)
    return low - air, high + air


def _ticks(low: float, high: float) -> list[float]:
    """At most eight round numbers."""
    step = next(s for e in range(-4, 300) for d in (1, 2, 5) if (high - low) / (s := d * 10.0**e) <= 8)
    return [round(i * step, 6) for i in range(int(low // step) + 1, int(high // step) + 1)]


def _entry(name: str, text: str, y: float) -> Iterator[Stroke | Words]:
    colour, dashes = STYLES[name]
    yield Stroke([(LEFT, y), (LEFT + 40, y)], colour, 2.2, dashes)
    yield Words((LEFT + 50, y), text)
