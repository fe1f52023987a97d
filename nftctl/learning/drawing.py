"""Lines, areas and words in pixels, written as SVG and as PNG from one list, so that both show the same.

Refuses nothing; whoever draws decides what is on it. Pillow is imported for the PNG alone.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]
SCALE = 2
"""Pixels of the PNG for one of the drawing."""
SIZE = 13
"""Height of words."""


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon without an edge."""

    points: Sequence[Point]
    colour: str
    opacity: float


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line through points; `dashes` are lengths of strokes and gaps in turn."""

    points: Sequence[Point]
    colour: str
    width: float = 1.0
    dashes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text whose middle height is at `at`."""

    at: Point
    text: str
    colour: str = "#222222"
    anchor: Anchor = "start"
    bold: bool = False


@dataclass(slots=True)
class Drawing:
    """What is drawn, in order, on white."""

    width: int
    height: int
    parts: list[Area | Stroke | Words] = field(default_factory=list)

    def svg(self) -> str:
        """The drawing as a document of its own."""
        parts = "\n".join(_svg(part) for part in self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif" font-size="{SIZE}">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{parts}\n</svg>\n'
        )

    def png(self, path: Path) -> None:
        """Write the drawing, `SCALE` times as large."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", (self.width * SCALE, self.height * SCALE), "white")
        font = ImageFont.load_default(size=SIZE * SCALE)
        for part in self.parts:
            if isinstance(part, Area):
                over = Image.new("L", image.size, 0)
                ImageDraw.Draw(over).polygon(_scaled(part.points), fill=round(255 * part.opacity))
                image.paste(Image.new("RGB", image.size, part.colour), mask=over)
                continue
            draw = ImageDraw.Draw(image)
            if isinstance(part, Stroke):
                for stroke in strokes(part.points, part.dashes):
                    draw.line(_scaled(stroke), fill=part.colour, width=round(part.width * SCALE), joint="curve")
            else:
                anchor = {"start": "lm", "middle": "mm", "end": "rm"}[part.anchor]
                draw.text(_scaled([part.at])[0], part.text, fill=part.colour, font=font, anchor=anchor,
                          stroke_width=0.5 if part.bold else 0, stroke_fill=part.colour)  # fmt: skip
        image.save(path)


def strokes(points: Sequence[Point], dashes: Sequence[float]) -> list[list[Point]]:
    """The pieces of a line that are drawn: all of it, or what its dashes leave."""
    if not dashes:
        return [list(points)]
    drawn: list[list[Point]] = []
    turn, left = 0, dashes[0]
    piece = [points[0]]
    for (x0, y0), (x1, y1) in pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        gone = 0.0
        while length - gone > left:
            gone += left
            at = (x0 + (x1 - x0) * gone / length, y0 + (y1 - y0) * gone / length)
            if turn % 2 == 0:
                drawn.append([*piece, at])
            piece, turn = [at], turn + 1
            left = dashes[turn % len(dashes)]
        left -= length - gone
        piece.append((x1, y1))
    return drawn + ([piece] if turn % 2 == 0 and len(piece) > 1 else [])


def _scaled(points: Sequence[Point]) -> list[Point]:
    return [(x * SCALE, y * SCALE) for x, y in points]


def _svg(part: Area | Stroke | Words) -> str:
    if isinstance(part, Words):
        x, y = part.at
        weight = ' font-weight="bold"' if part.bold else ""
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{part.colour}" text-anchor="{part.anchor}" '
            f'dominant-baseline="central"{weight}>{html.escape(part.text)}</text>'
        )
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in part.points)
    if isinstance(part, Area):
        return f'<polygon points="{points}" fill="{part.colour}" fill-opacity="{part.opacity:g}"/>'
    dashes = f' stroke-dasharray="{" ".join(f"{d:g}" for d in part.dashes)}"' if part.dashes else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{part.colour}" stroke-width="{part.width:g}" '
        f'stroke-linejoin="round"{dashes}/>'
    )
