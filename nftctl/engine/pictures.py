"""The pictures that a run leaves: grids of samples, the best and worst of a step, and the curve of its reward.

Owns how images are laid out and how large they are shown. Reads and scores nothing.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nftctl.errors import CheckpointUnusable
from nftctl.run.disk import atomic_write, cure
from nftctl.run.rows import Row

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

SMALLEST, SMALLEST_ALONE, LARGEST = 64, 128, 256
"""Pixels of a shown image's longer side: at least, in a grid and with a caption of its own, and at most."""
MARGIN, GAP, LABEL, LINE, NOTE = 12, 8, 240, 17, 15
"""Pixels: around everything; between images; widest prompt beside a row; a line of text; a line of small text."""
BLACK, GREY, FRAME = "#1a1a1a", "#6b6b6b", "#d0d0d0"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where single images stand in a picture. The corner of the one in (row, column) is origin + (column, row) x pitch.

    Everything is in pixels, x before y.
    """

    cell: tuple[int, int]
    origin: tuple[int, int]
    pitch: tuple[int, int]

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {"cell": list(self.cell), "origin": list(self.origin), "pitch": list(self.pitch)}


@dataclass(frozen=True, slots=True)
class Shown:
    """One image uint8 [H, W, 3], the reward under it, and the prompt where it has one of its own."""

    image: np.ndarray
    reward: float | None = None
    prompt: str = ""


def write_grid(
    path: Path,
    images: np.ndarray,
    prompts: Sequence[str],
    title: str,
    *,
    captions: Sequence[str] = (),
    notes: Sequence[str] = (),
    rewards: Sequence[Sequence[float]] = (),
) -> Layout:
    """Write a PNG grid: one prompt a row, on the left; `captions` over the columns, `notes` in grey under those.

    images: uint8 [rows, columns, H, W, 3]; `rewards` [rows, columns] are printed under them. Raises CheckpointUnusable
    when the disk does not take it.
    """
    table = [
        [Shown(image, rewards[i][j] if rewards else None) for j, image in enumerate(row)]
        for i, row in enumerate(images)
    ]
    return _Sheet(table, prompts, title, captions, notes, SMALLEST).write(path)


def write_extremes(path: Path, best: Sequence[Shown], worst: Sequence[Shown], title: str) -> Layout:
    """Write a PNG of two rows of samples, the best and the worst first, each with its reward and prompt.

    Raises CheckpointUnusable when the disk does not take it.
    """
    rows = [(name, list(row)) for name, row in (("best", best), ("worst", worst)) if row]
    return _Sheet([row for _, row in rows], [name for name, _ in rows], title, (), (), SMALLEST_ALONE).write(path)


class _Sheet:
    """A table of images on white, measured before it is drawn."""

    def __init__(
        self,
        table: Sequence[Sequence[Shown]],
        labels: Sequence[str],
        title: str,
        captions: Sequence[str],
        notes: Sequence[str],
        smallest: int,
    ) -> None:
        from PIL import ImageFont

        self._font, self._small = ImageFont.load_default(size=13), ImageFont.load_default(size=12)
        self._table, self._captions, self._notes = table, captions, notes
        height, width = table[0][0].image.shape[:2]
        self._cell = _shown_size(width, height, smallest)
        widths = [_width(text, self._font) for text in captions] + [GAP + _width(text, self._small) for text in notes]
        widths += [_width(_number(s.reward), self._small) for row in table for s in row]
        self._column = max(self._cell[0], *widths)
        self._labels = [_wrapped(text, self._font, LABEL, min(6, max(1, self._cell[1] // LINE))) for text in labels]
        self._under = [[self._words(shown) for shown in row] for row in table]
        self._pitch = (self._column + GAP, self._cell[1] + NOTE * self._most_words() + GAP + 4)
        self._title = title
        self._measure()

    def _words(self, shown: Shown) -> list[str]:
        reward = [] if shown.reward is None else [_number(shown.reward)]
        return reward + (_wrapped(shown.prompt, self._small, self._column, 3) if shown.prompt else [])

    def _most_words(self) -> int:
        return max(len(words) for row in self._under for words in row)

    def _measure(self) -> None:
        label = max((_width(line, self._font) for lines in self._labels for line in lines), default=0)
        columns = max(map(len, self._table))
        self._left = MARGIN + (label + MARGIN if label else 0)
        self._head = MARGIN + LINE + GAP // 2
        self._top = self._head + LINE * bool(self._captions) + NOTE * bool(self._notes) + GAP // 2
        right = max(self._left + columns * self._pitch[0] - GAP, MARGIN + _width(self._title, self._font))
        self._size = (right + MARGIN, self._top + len(self._table) * self._pitch[1] - GAP + MARGIN)

    @property
    def layout(self) -> Layout:
        return Layout(self._cell, (self._left + (self._column - self._cell[0]) // 2, self._top), self._pitch)

    def write(self, path: Path) -> Layout:
        from PIL import Image, ImageDraw

        sheet = Image.new("RGB", self._size, "white")
        draw = ImageDraw.Draw(sheet)
        draw.text((MARGIN, MARGIN), self._title, fill=BLACK, font=self._font)
        for j, text in enumerate(self._captions):
            draw.text((self._middle(j), self._head), text, fill=BLACK, font=self._font, anchor="ma")
        for j, text in enumerate(self._notes):
            at = (self._middle(j), self._head + LINE * bool(self._captions))
            draw.text(at, text, fill=GREY, font=self._small, anchor="ma")
        for i, row in enumerate(self._table):
            self._draw_label(draw, i)
            for j, shown in enumerate(row):
                self._draw_image(sheet, draw, i, j, shown)
        encoded = io.BytesIO()
        sheet.save(encoded, "PNG")
        try:
            # Whole or not at all: somebody may be looking while the run goes on.
            atomic_write(path, encoded.getvalue())
        except OSError as error:
            raise CheckpointUnusable(f"cannot write {path}: {error.strerror or error}", hint=cure(error)) from error
        return self.layout

    def _middle(self, column: int) -> int:
        return self._left + column * self._pitch[0] + self._column // 2

    def _draw_label(self, draw: ImageDraw.ImageDraw, row: int) -> None:
        lines = self._labels[row]
        top = self._top + row * self._pitch[1] + (self._cell[1] - LINE * len(lines)) // 2
        for n, line in enumerate(lines):
            draw.text((MARGIN, top + n * LINE), line, fill=BLACK, font=self._font)

    def _draw_image(self, sheet: Image.Image, draw: ImageDraw.ImageDraw, row: int, column: int, shown: Shown) -> None:
        layout, (width, height) = self.layout, self._cell
        left, top = (o + n * p for o, n, p in zip(layout.origin, (column, row), layout.pitch, strict=True))
        # Outside the image, so that a white one has an edge and none loses a pixel.
        draw.rectangle((left - 1, top - 1, left + width, top + height), outline=FRAME)
        sheet.paste(_resized(shown.image, self._cell), (left, top))
        for n, line in enumerate(self._under[row][column]):
            colour = GREY if n or shown.reward is None else BLACK
            at = (self._middle(column), top + height + 3 + n * NOTE)
            draw.text(at, line, fill=colour, font=self._small, anchor="ma")


def _shown_size(width: int, height: int, smallest: int) -> tuple[int, int]:
    """Small images are enlarged by whole factors, large ones are made to fit, the others stay."""
    longest = max(width, height)
    if longest > LARGEST:
        return max(1, round(width * LARGEST / longest)), max(1, round(height * LARGEST / longest))
    zoom = max(1, smallest // longest)
    return width * zoom, height * zoom


def _resized(pixels: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Enlarged without smoothing, so that pixels stay pixels; reduced with it."""
    from PIL import Image

    image = Image.fromarray(pixels)
    return image.resize(size, Image.Resampling.LANCZOS if image.width > size[0] else Image.Resampling.NEAREST)


def _number(reward: float | None) -> str:
    return "" if reward is None else f"{reward:.3f}"


def _width(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    return int(font.getlength(text)) + 1


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, most: int) -> list[str]:
    """The text in at most so many lines of at most that width; what is left over ends in an ellipsis."""
    lines, words = [""], text.split()
    for n, word in enumerate(words):
        longer = f"{lines[-1]} {word}".lstrip()
        if _width(longer, font) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {' '.join(words[n:])}"
            break
    return [_cut(line, font, width) for line in lines]


def _cut(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if _width(line, font) <= width:
        return line
    # Of a structured prompt of many thousand characters, no more are measured than could fit.
    kept = line[: width // 2]
    while kept and _width(f"{kept}…", font) > width:
        kept = kept[:-1]
    return f"{kept.rstrip()}…"


def join_grids(before: Path, after: Path, target: Path) -> None:
    """Put two grids of the same prompts and seeds side by side."""
    from PIL import Image

    with Image.open(before) as left, Image.open(after) as right:
        sheet = Image.new("RGB", (left.width + right.width + 12, max(left.height, right.height)), "white")
        sheet.paste(left, (0, 0))
        sheet.paste(right, (left.width + 12, 0))
        sheet.save(target)


def write_curve(path: Path, rows: Sequence[Row], evaluations: Sequence[Row]) -> None:
    """Write an SVG of the reward over steps: each step's mean, their running mean over ten, and held-out marks."""
    if len(rows) < 2:
        return
    raw = [(row["step"], row["train/reward_mean"]) for row in rows]
    smooth = [(step, _mean([value for _, value in raw[max(0, i - 9) : i + 1]])) for i, (step, _) in enumerate(raw)]
    held_out = [(row["step"], row["eval/reward"]) for row in evaluations]
    values = [value for _, value in (*raw, *held_out)]
    low, high, last = min(values), max(values), max(1, raw[-1][0])
    span = (high - low) or 1.0

    def at(point: tuple[int, float]) -> str:
        return f"{50 + 530 * point[0] / last:.1f},{200 - 170 * (point[1] - low) / span:.1f}"

    marks = "".join(
        f'<circle cx="{at(p).split(",")[0]}" cy="{at(p).split(",")[1]}" r="4" fill="#d95f02"/>' for p in held_out
    )
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 240" font-family="sans-serif" font-size="12">'
        '<rect width="600" height="240" fill="white"/>'
        f'<polyline fill="none" stroke="#9ecae1" points="{" ".join(map(at, raw))}"/>'
        f'<polyline fill="none" stroke="#08519c" stroke-width="2" points="{" ".join(map(at, smooth))}"/>{marks}'
        f'<text x="6" y="34">{high:.2f}</text><text x="6" y="204">{low:.2f}</text>'
        f'<text x="50" y="222">step 0</text><text x="580" y="222" text-anchor="end">step {last}</text>'
        '<text x="50" y="16" fill="#08519c">reward of the samples, and its mean over ten steps</text>'
        '<text x="580" y="16" text-anchor="end" fill="#d95f02">held-out reward</text></svg>\n'
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
