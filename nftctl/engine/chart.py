"""A bar chart of where a step goes, as a PNG: a bar for each part, and a line where the arithmetic's floor is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nftctl.errors import CheckpointUnusable
from nftctl.run.disk import cure

ROW, BAR, WIDTH, MARGIN = 26, 16, 520, 14
INK, QUIET, WORK, REST, FLOOR = "black", "#666666", "#3b78b8", "#b9c7d6", "#d95f02"


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a step in seconds; `floor` where the arithmetic of it is known."""

    title: str
    seconds: float
    floor: float | None = None


def write_bars(path: Path, bars: Sequence[Bar], title: Sequence[str]) -> None:
    """Write the chart with lines of `title` above. Raises CheckpointUnusable when the disk does not take it."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    total = sum(bar.seconds for bar in bars)
    longest = max([bar.seconds for bar in bars] + [bar.floor or 0.0 for bar in bars]) or 1.0
    left = MARGIN + int(max(font.getlength(bar.title) for bar in bars)) + 10
    head = MARGIN + 20 * len(title) + 8
    width = max(left + WIDTH + 230, int(max(font.getlength(line) for line in title)) + 2 * MARGIN)
    image = Image.new("RGB", (width, head + ROW * len(bars) + 34), "white")
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(title):
        draw.text((MARGIN, MARGIN + 20 * i), line, fill=INK, font=font)
    for i, bar in enumerate(bars):
        top = head + ROW * i
        end = left + int(WIDTH * bar.seconds / longest)
        draw.text((MARGIN, top), bar.title, fill=INK, font=font)
        draw.rectangle((left, top, max(end, left + 1), top + BAR), fill=REST if bar.floor is None else WORK)
        figures = f"{1e3 * bar.seconds:,.1f} ms  {100 * bar.seconds / total:.1f} %" if total else ""
        mark = left
        if bar.floor:
            mark = left + int(WIDTH * bar.floor / longest)
            draw.line((mark, top - 3, mark, top + BAR + 3), fill=FLOOR, width=3)
            figures += f"  ({bar.seconds / bar.floor:.2f} x floor)"
        draw.text((max(end, mark) + 8, top), figures, fill=QUIET, font=font)
    foot = head + ROW * len(bars) + 8
    draw.line((MARGIN, foot + 8, MARGIN + 18, foot + 8), fill=FLOOR, width=3)
    draw.text((MARGIN + 26, foot), "the arithmetic alone, at the measured matmul rate", fill=QUIET, font=font)
    try:
        image.save(path)
    except OSError as error:
        raise CheckpointUnusable(f"cannot write {path}: {error.strerror or error}", hint=cure(error)) from error
