"""How single rewards were spread in the first steps and in the last, from scores.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nftctl.report.figures import mean, short, tick_labels, ticks
from nftctl.report.markup import Markup, folded, table, tag

STEPS = 10
"""Steps at either end."""
BINS = 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of rewards in bins of one width, of the first steps and of the last."""

    edges: list[float]
    first: list[int]
    last: list[int]
    first_steps: tuple[int, int]
    last_steps: tuple[int, int]
    means: tuple[float, float]


def histogram_of(scores: Sequence[dict[str, Any]]) -> Histogram | None:
    """None when there are not two steps with rewards, or no two rewards that differ."""
    known = [(row["step"], values) for row in scores if (values := list(_rewards(row.get("rewards"))))]
    width = min(STEPS, len(known) // 2)
    if not width:
        return None
    ends = [[value for _, values in part for value in values] for part in (known[:width], known[-width:])]
    low, high = min(map(min, ends)), max(map(max, ends))
    if low == high:
        return None
    span = (high - low) / BINS
    counts = [_counts(values, low, span) for values in ends]
    edges = [low + i * span for i in range(BINS + 1)]
    steps = [(part[0][0], part[-1][0]) for part in (known[:width], known[-width:])]
    return Histogram(edges, counts[0], counts[1], steps[0], steps[1], (mean(ends[0]), mean(ends[1])))


def _rewards(rows: object) -> Iterable[float]:
    """Every number of a step's rewards; a group that was dropped is null, or holds nulls."""
    for value in rows if isinstance(rows, list) else []:
        if isinstance(value, list):
            yield from _rewards(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield float(value)


def _counts(values: Sequence[float], low: float, span: float) -> list[int]:
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / span))] += 1
    return counts


def section(found: Histogram) -> Markup:
    """The histogram as a drawing with its table."""
    names = [f"steps {a} to {b}" for a, b in (found.first_steps, found.last_steps)]
    sums = [sum(found.first), sum(found.last)]
    shares = [
        [count / whole for count in counts] for counts, whole in zip((found.first, found.last), sums, strict=True)
    ]
    top = max(map(max, shares))
    entries = [
        tag("li", _swatch(i), tag("span", name, class_="name"), tag("b", f"mean {centre:.3f}", class_="value"))
        for i, (name, centre) in enumerate(zip(names, found.means, strict=True))
    ]
    area = tag("div", _drawing(shares, top), class_="area still")
    low, high = found.edges[0], found.edges[-1]
    across, up = ticks(low, high, 5), ticks(0, 100 * top, 3)
    axis = [
        tag("span", text, style=f"left:{100 * (x - low) / (high - low):.2f}%")
        for x, text in zip(across, tick_labels(across), strict=True)
    ]
    marks = [
        tag("span", f"{text} %", style=f"top:{100 - y / top:.2f}%") for y, text in zip(up, tick_labels(up), strict=True)
    ]
    plot = tag(
        "div",
        tag("div", *marks, class_="values", aria_hidden="true"),
        area,
        tag("div", *axis, class_="steps", aria_hidden="true"),
        class_="plot",
    )
    rows = [
        (f"{short(_near(a))} to {short(_near(b))}", first, last)
        for a, b, first, last in zip(found.edges, found.edges[1:], found.first, found.last, strict=False)
    ]
    counted = folded("Values as a table", table(("reward", *names), rows, caption="Samples by reward", numbers=True))
    note = f"Share of samples by reward: {sums[0]:,} at the beginning, {sums[1]:,} at the end."
    caption = tag("figcaption", tag("p", note, class_="note"))
    return tag("figure", caption, tag("ul", *entries, class_="legend"), plot, counted, class_="chart tall")


def _near(value: float) -> float:
    return round(value, 3)


def _swatch(index: int) -> Markup:
    bar = tag("rect", x="4", y="1", width="20", height="10", class_=f"bar bar-{index}")
    return tag("svg", bar, viewBox="0 0 28 12", class_="swatch", aria_hidden="true")


def _drawing(shares: Sequence[Sequence[float]], top: float) -> Markup:
    """Filled bars for the end, outlined ones for the beginning over them."""
    width = 1000 / BINS
    bars = [
        tag("rect", x=f"{i * width + 3:.1f}", y=f"{1000 - 1000 * share / top:.1f}", width=f"{width - 6:.1f}",
            height=f"{1000 * share / top:.1f}", class_=f"bar bar-{index}")
        for index in (1, 0)
        for i, share in enumerate(shares[index])
        if share
    ]  # fmt: skip
    return tag(
        "svg", *bars, xmlns="http://www.w3.org/2000/svg", viewBox="0 0 1000 1000", preserveAspectRatio="none",
        aria_hidden="true", focusable="false",
    )  # fmt: skip
