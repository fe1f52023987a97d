"""Curves as SVG and as PNG, from one list of strokes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nftctl.learning.curves import STYLES, _ticks, draw
from nftctl.learning.drawing import Area, Drawing, Stroke, Words, strokes
from nftctl.learning.summary import summarise
from nftctl.learning.trials import NAMES
from tests.learning.test_summary import a_run, document, guided

SVG = "{http://www.w3.org/2000/svg}"


def comparison() -> dict[str, Any]:
    found = document(a_run("nft", 0, 0.1), a_run("nft", 1, 0.2), a_run("control", 0, -0.1), guided(0))
    found["plan"] |= {"seconds": 10.0, "samples": 8, "trials": 2}
    found["chosen"] = {"guidance": {"settings": {"guidance": 3.0}}}
    return found | {"summary": summarise(found)}


def test_dashes_go_on_round_corners() -> None:
    corner = [(0.0, 0.0), (3.0, 0.0), (3.0, 4.0)]
    assert strokes(corner, ()) == [corner]
    assert strokes(corner, (2.0, 2.0)) == [
        [(0.0, 0.0), (2.0, 0.0)], [(3.0, 1.0), (3.0, 3.0)],
    ]  # fmt: skip


def test_svg_is_well_formed_and_words_are_escaped() -> None:
    drawing = Drawing(40, 30, [Area([(0, 0), (9, 0), (9, 9)], "#ff0000", 0.5), Words((1, 2), "a < b & c")])
    root = ET.fromstring(drawing.svg())
    assert root.get("viewBox") == "0 0 40 30"
    assert root.find(f"{SVG}text").text == "a < b & c"  # type: ignore[union-attr]
    assert root.find(f"{SVG}polygon").get("fill-opacity") == "0.5"  # type: ignore[union-attr]


def test_the_png_has_the_same_in_pixels(tmp_path: Path) -> None:
    parts = [Area([(0, 0), (20, 0), (20, 20), (0, 20)], "#ff0000", 0.5), Stroke([(30, 0), (30, 20)], "#0000ff", 4)]
    Drawing(40, 20, list(parts)).png(tmp_path / "x.png")
    image = Image.open(tmp_path / "x.png")
    assert image.size == (80, 40)
    assert image.getpixel((20, 20)) == pytest.approx((255, 127, 127), abs=2)
    assert image.getpixel((60, 20)) == (0, 0, 255)
    assert image.getpixel((76, 20)) == (255, 255, 255)


def test_everything_that_can_be_compared_has_a_line_of_its_own() -> None:
    assert set(STYLES) == set(NAMES)
    assert (
        len({colour for colour, _ in STYLES.values()}) == len({dashes for _, dashes in STYLES.values()}) == len(NAMES)
    )


def test_curves_stand_where_their_numbers_are(tmp_path: Path) -> None:
    drawing = draw(comparison(), "samples")
    ET.fromstring(drawing.svg())
    drawing.png(tmp_path / "x.png")
    lines = {p.colour: p for p in drawing.parts if isinstance(p, Stroke) and p.width == 2.2 and len(p.points) > 2}
    nft, control = lines[STYLES["nft"][0]], lines[STYLES["control"][0]]
    # Three marks at even distances; what rises goes up on the page, and all start from one place.
    xs = [x for x, _ in nft.points]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1])
    assert nft.points[0] == control.points[0]
    assert nft.points[2][1] < nft.points[1][1] < nft.points[0][1] < control.points[2][1]
    bands = [p for p in drawing.parts if isinstance(p, Area) and p.colour == STYLES["nft"][0]]
    assert len(bands) == 2  # reward and judge
    (top, bottom) = sorted({y for x, y in bands[1].points if x == max(x for x, _ in bands[1].points)})
    assert top < nft.points[2][1] < bottom
    assert "base, guidance 3: chosen by tuning, no training" in [p.text for p in drawing.parts if isinstance(p, Words)]


def test_guidance_that_nothing_was_compared_with_is_not_called_chosen() -> None:
    found = comparison()
    found["plan"]["trials"] = 1
    words = [p.text for p in draw(found, "samples").parts if isinstance(p, Words)]
    assert "base, guidance 3: the only one tried, no training" in words


@pytest.mark.parametrize("spread", [0.0, 1e-12, 1e-4, 0.003, 0.01, 0.4, 7.0, 300.0, 2e6])
def test_there_are_ticks_however_small_or_large_the_differences(spread: float) -> None:
    found = comparison()
    del found["chosen"]["guidance"]
    for method in found["summary"]["methods"].values():
        for number, point in enumerate(method["curves"]["samples"]):
            at = 0.8 + spread * number
            point["reward"] = {"mean": at, "low": at, "high": at}
    shown = [p for p in draw(found, "samples").parts if isinstance(p, Words) and p.anchor == "end"]
    texts = [p.text for p in shown if p.at[0] < 100]
    assert 2 <= len(texts) <= 8
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) <= 8  # what there is room for


def test_ticks_are_round_numbers() -> None:
    assert _ticks(0.7979, 0.8021) == [0.798, 0.799, 0.8, 0.801, 0.802]
    assert _ticks(-0.35, 0.25) == [-0.3, -0.2, -0.1, 0.0, 0.1, 0.2]
    assert _ticks(0.0, 4100.0) == [1000.0, 2000.0, 3000.0, 4000.0]


def test_without_a_judge_there_is_one_panel() -> None:
    found = comparison()
    found["summary"]["base"]["judge"] = None
    assert [p.text for p in draw(found, "seconds").parts if isinstance(p, Words) and p.bold] == ["test reward"]
