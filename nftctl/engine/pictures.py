"""The pictures that a run leaves: grids of samples, and the curve of its reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nftctl.errors import CheckpointUnusable
from nftctl.run.disk import cure
from nftctl.run.rows import Row

if TYPE_CHECKING:
    import numpy as np


def write_grid(
    path: Path, images: np.ndarray, prompts: Sequence[str], title: str, *, captions: Sequence[str] = ()
) -> None:
    """Write a PNG grid: one row per prompt, one column per sample, prompts on the left, `captions` over the columns.

    images: uint8 [prompts, columns, H, W, 3]. Small images are enlarged without smoothing, so that pixels stay pixels.
    Raises CheckpointUnusable when the disk does not take it.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows, columns, height, width, _ = images.shape
    zoom = max(1, 64 // max(height, width))
    cell_h, cell_w, gap, head = height * zoom, width * zoom, 4, 40 if captions else 22
    font = ImageFont.load_default(size=13)
    label = int(max(font.getlength(text) for text in [*(p[:60] for p in prompts), ""])) + 16
    width_px = max(label + columns * (cell_w + gap) + gap, int(font.getlength(title)) + 16)
    sheet = Image.new("RGB", (width_px, head + rows * (cell_h + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((8, 4), title, fill="black", font=font)
    for j, caption in enumerate(captions):
        draw.text((label + gap + j * (cell_w + gap), 22), caption, fill="black", font=font)
    for i in range(rows):
        top = head + gap + i * (cell_h + gap)
        draw.text((8, top + cell_h // 2 - 8), prompts[i][:60], fill="black", font=font)
        for j in range(columns):
            tile = Image.fromarray(images[i, j]).resize((cell_w, cell_h), Image.Resampling.NEAREST)
            sheet.paste(tile, (label + gap + j * (cell_w + gap), top))
    try:
        sheet.save(path)
    except OSError as error:
        raise CheckpointUnusable(f"cannot write {path}: {error.strerror or error}", hint=cure(error)) from error


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
