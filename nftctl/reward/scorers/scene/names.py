"""The colours and shapes that have a name here, and how near a measured one is to each.

Owns the palette (compared in CIELAB, where distance is roughly what eyes see) and the three outlines. Every answer is a
set of probabilities with room for "none of these", so that a smear is not the nearest shape.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30), "orange": (255, 140, 0), "yellow": (250, 220, 30), "green": (30, 150, 50),
    "cyan": (0, 200, 210), "blue": (30, 60, 220), "purple": (130, 40, 170), "pink": (255, 130, 190),
    "brown": (130, 75, 35), "black": (15, 15, 15), "white": (250, 250, 250), "grey": (128, 128, 128),
}  # fmt: skip
"""Middle of each named colour, sRGB."""

SHAPES = ("circle", "square", "triangle")

COLOUR_WIDTH = 9.0
"""CIELAB distance over which one name gives way to the next."""

SHAPE_WIDTH = 0.02
OTHER = 0.86
"""Overlap with the best outline at which an object is as likely no shape at all; a square fills its circle to 0.83."""

ROUND = 1.2
"""How much longer than wide a circle or square may be before it counts against it."""

_ANGLES = np.deg2rad(np.arange(-12, 13, 3))
_SIDES = -np.array([[np.cos(a), np.sin(a)] for a in (0, 2 * np.pi / 3, -2 * np.pi / 3)]).T
"""Outward directions of a triangle's sides, one a column; its first corner lies on the first axis."""


def lab(rgb: npt.NDArray[np.generic] | Floats) -> Floats:
    """CIELAB [..., 3] (white point D65) of sRGB values 0..255 [..., 3]; constants of IEC 61966-2-1 and CIE 15."""
    c = np.asarray(rgb, np.float64) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    xyz = linear @ to_xyz.T / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


PALETTE: Floats = lab(np.array(list(COLOURS.values())))


def nearest_colour(image: npt.NDArray[np.generic] | Floats) -> npt.NDArray[np.int64]:
    """Index into `COLOURS` of every sRGB pixel [..., 3]."""
    # Of the squared distance only what differs between names.
    return np.asarray(((PALETTE**2).sum(axis=-1) - 2 * lab(image) @ PALETTE.T).argmin(axis=-1))


def colour_odds(rgb: Floats) -> dict[str, float]:
    """Probability of each name for one sRGB value; they add up to 1."""
    logits = -(_distance(lab(rgb)) ** 2) / (2 * COLOUR_WIDTH**2)
    weight = np.exp(logits - logits.max())
    return dict(zip(COLOURS, (weight / weight.sum()).tolist(), strict=True))


def shape_odds(rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> dict[str, float]:
    """Probability of each shape for the object with pixels (rows, columns) [n]; what is missing to 1 is "no shape".

    The pixels are brought to unit covariance, where every ellipse is one circle, every parallelogram one square and
    every triangle one triangle; then the overlap (intersection over union) with each of the three is measured.
    """
    xy = np.stack([columns, rows], axis=1).astype(np.float64)
    xy -= xy.mean(axis=0)
    spread, axes = np.linalg.eigh(np.cov(xy.T, bias=True) + np.eye(2) / 12)
    white = xy @ axes / np.sqrt(spread)
    pixel = 1 / np.sqrt(spread.prod())
    length = float(np.sqrt(spread[1] / spread[0]))
    overlaps = [_circle(white, pixel), _square(white, pixel), _triangle(white, pixel)]
    # A triangle may be as steep as it likes.
    fits = [
        o * min(1.0, ROUND / length) if shape != "triangle" else o for o, shape in zip(overlaps, SHAPES, strict=True)
    ]
    weight = np.exp((np.array([*fits, OTHER]) - max(*fits, OTHER)) / SHAPE_WIDTH)
    return dict(zip(SHAPES, (weight / weight.sum()).tolist(), strict=False))


def _distance(colours: Floats) -> Floats:
    return np.asarray(np.linalg.norm(colours[..., None, :] - PALETTE, axis=-1))


def _circle(xy: Floats, pixel: float) -> float:
    # A disc of radius 2 has unit covariance.
    return _overlap(float((np.hypot(*xy.T) <= 2).sum()), pixel, len(xy), 4 * np.pi)


def _square(xy: Floats, pixel: float) -> float:
    # A side of sqrt(12); the farthest pixel is a corner, which fixes the turn up to pixel noise.
    inside = (np.abs(_turned(xy, _farthest(xy) - np.pi / 4 + _ANGLES)) <= np.sqrt(3)).all(axis=-1)
    return _overlap(float(inside.sum(axis=-1).max()), pixel, len(xy), 12.0)


def _triangle(xy: Floats, pixel: float) -> float:
    # Equilateral with side sqrt(24); its three sides are sqrt(2) from the middle, opposite the corners.
    inside = (_turned(xy, _farthest(xy) + _ANGLES) @ _SIDES <= np.sqrt(2)).all(axis=-1)
    return _overlap(float(inside.sum(axis=-1).max()), pixel, len(xy), 6 * np.sqrt(3))


def _overlap(inside: float, pixel: float, count: int, outline: float) -> float:
    both = min(inside * pixel, outline)
    return float(both / (count * pixel + outline - both))


def _farthest(xy: Floats) -> float:
    x, y = xy[np.hypot(*xy.T).argmax()]
    return float(np.arctan2(y, x))


def _turned(xy: Floats, angles: Floats) -> Floats:
    """Points [n, 2] as seen from axes turned by each of the angles [k]: [k, n, 2]."""
    c, s = np.cos(angles), np.sin(angles)
    return np.asarray(xy @ np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2))
