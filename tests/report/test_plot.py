"""Drawings are XML, their points lie where they belong, and their tables say the same."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from nftctl.report.curves import Chart, Line
from nftctl.report.plot import SIDE, TABLE_ROWS, Frame, evenly, figure
from nftctl.run.metrics import EVALUATIONS, metric_of

from .html_page import Page

SVG = "{http://www.w3.org/2000/svg}"


def chart_of(*lines: Line) -> Chart:
    return Chart("chart-0", "A < B", "note", list(lines))


def drawing(chart: Chart) -> ElementTree.Element:
    (source,) = [svg for svg in Page(figure(chart)).svgs() if "xmlns" in svg]
    return ElementTree.fromstring(source)


def test_a_line_goes_from_corner_to_corner() -> None:
    line = Line("up", [(1, 10.0), (2, 15.0), (3, 20.0)])
    frame = Frame.of([line])
    (path,) = [p for p in drawing(chart_of(line)).iter(f"{SVG}path") if "line" in p.attrib["class"]]
    points = [tuple(map(float, pair.split())) for pair in path.attrib["d"].removeprefix("M").split("L")]
    assert [x for x, _ in points] == [0, SIDE / 2, SIDE]
    assert [y for _, y in points] == pytest.approx([SIDE * frame.down(v) for v in (10, 15, 20)], abs=0.1)
    assert SIDE > points[0][1] > points[-1][1] > 0


def test_marks_are_dots_and_lines_differ_by_more_than_colour() -> None:
    lines = [Line(f"line {n}", [(1, 0.1 * n), (2, 0.2)], slot=n) for n in range(3)]
    marks = Line("held out", [(1, 0.5), (2, 0.6)], slot=3, look="marks")
    root = drawing(chart_of(*lines, marks))
    classes = [p.attrib["class"] for p in root.iter(f"{SVG}path")]
    assert sorted(set(re.findall(r"slot-\d", " ".join(classes)))) == ["slot-0", "slot-1", "slot-2", "slot-3"]
    (dots,) = [p for p in root.iter(f"{SVG}path") if "dot" in p.attrib["class"]]
    assert dots.attrib["d"].count("h0") == 2


def test_a_single_point_is_a_dot() -> None:
    (dots,) = [p for p in drawing(chart_of(Line("one", [(7, 0.5)]))).iter(f"{SVG}path") if "line" in p.attrib["class"]]
    assert "dot" in dots.attrib["class"]
    assert dots.attrib["d"].startswith("M0.0 ")


@pytest.mark.parametrize(
    ("values", "low"),
    [([0.1, 0.9], 0.0), ([0.8, 0.9], None), ([0.0, 0.0], 0.0), ([-0.5, 0.5], None), ([5.0, 5.0], None)],
)
def test_the_axis_shows_zero_where_it_is_near(values: list[float], low: float | None) -> None:
    frame = Frame.of([Line("a", list(enumerate(values)))])
    assert frame.high > max(values)
    if low is None:
        assert frame.low < min(values)
    else:
        assert frame.low == low


def test_the_table_repeats_every_value_of_a_short_chart() -> None:
    page = Page(figure(chart_of(Line("a", [(1, 0.25), (2, 0.5)]), Line("b", [(2, 0.125)], look="marks"))))
    cells = [text for tag, text in page.texts if tag in ("td", "th", "caption")]
    assert cells == ["A < B", "step", "a", "b", "1", "0.25", "2", "0.5", "0.125"]


def test_the_table_of_a_long_chart_is_thinned_and_keeps_the_marks() -> None:
    long = Line("a", [(step, float(step)) for step in range(1, 501)])
    page = Page(figure(chart_of(long, Line("held out", [(1, 0.5), (123, 0.7), (500, 1.0)], look="marks"))))
    steps = [int(text) for tag, text in page.texts if tag == "th" and text.isdigit()]
    assert TABLE_ROWS <= len(steps) <= TABLE_ROWS + 1
    assert {1, 123, 500} <= set(steps)
    assert steps == sorted(set(steps))
    assert f"{500 - len(steps)} steps between these are left out" in page.visible


def test_the_plot_is_a_labelled_slider() -> None:
    page = Page(figure(chart_of(Line("a", [(3, 0.25), (9, 0.5)]))))
    (area,) = [a for a in page.all("div") if a.get("role") == "slider"]
    assert (area["aria-valuemin"], area["aria-valuemax"], area["aria-valuenow"]) == ("3", "9", "9")
    assert area["tabindex"] == "0"
    assert area["aria-labelledby"] in page.ids


def test_evenly_keeps_both_ends() -> None:
    assert evenly(list(range(10)), 4) == [0, 3, 6, 9]
    assert evenly([1, 2], 5) == [1, 2]
    assert evenly([1, 2, 3], 1) == [3]


def test_a_known_figure_is_explained_and_a_stranger_is_not() -> None:
    line = Line("train/old_gap", [(1, 0.25), (2, 0.5)])
    known = Chart("chart-0", "Distance", "", [line], keys=("train/old_gap", "eval/reward"))
    page = Page(figure(known))
    for name in ("train/old_gap", "eval/reward"):
        metric = metric_of(name) or metric_of(name, EVALUATIONS)
        assert metric is not None
        assert metric.meaning.split("`")[0] in page.visible
    assert "Healthy:" in page.visible
    assert "`" not in page.visible
    assert "What it means" not in figure(Chart("chart-0", "x", "", [line], keys=("new/thing",)))
