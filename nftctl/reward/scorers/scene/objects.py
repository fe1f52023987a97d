"""Objects of an image: patches of one named colour that are not the background, with place, size, colour and shape.

Owns the segmentation: bring the image to about `SIDE` pixels, name every pixel's colour, join equal neighbours, and
drop the background, specks, and the seams of mixed colour that anti-aliasing leaves between two patches. In a small
image such seams are a good part of a thing: there they are told apart into what they mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from nftctl.reward.scorers.scene.names import Floats, colour_odds, nearest_colour, shape_odds

SIDE = 128
FINE_SIDE = 96
"""About what the shorter side of a small image becomes."""
SMALLEST_SIDE = 16
"""Pixels of a side under which a thing is a few dots, and nothing is gained by a finer grid."""
SMALLEST = 0.003
"""Share of the image under which a patch is a speck."""

SOLID = 0.3
"""Share of a patch's pixels that have only their own kind around them; a seam has next to none."""

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Object:
    """One thing that is there. x and y of its middle and its size (root of its area) in pixels of the shrunk image."""

    x: float
    y: float
    size: float
    colours: dict[str, float]
    shapes: dict[str, float]

    def odds(self, colour: str, shape: str) -> float:
        """Probability that it is of this shape and, unless that is "", of this colour."""
        return self.shapes[shape] * (self.colours[colour] if colour else 1.0)


def find_objects(image: npt.NDArray[np.uint8]) -> list[Object]:
    """The objects of a uint8 [H, W, 3] image. The commonest colour along the border is the background."""
    if SMALLEST_SIDE <= min(image.shape[:2]) <= SIDE // 2:
        seen, names = enlarge(image)
    else:
        seen = shrink(image)
        names = nearest_colour(seen)
    background = _commonest(_border(names))
    patches = join(names)
    inner = _surrounded(patches)
    found = []
    order = np.argsort(patches, axis=None, kind="stable")
    for pixels in np.split(order, np.flatnonzero(np.diff(patches.ravel()[order])) + 1):
        if names.flat[pixels[0]] == background or len(pixels) < SMALLEST * names.size:
            continue
        solid = inner.ravel()[pixels]
        if solid.mean() >= SOLID:
            found.append(_object(seen, pixels, pixels[solid]))
    return found


def _border(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The outermost pixels of [h, w, ...], corners twice."""
    return np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])


def _commonest(names: Labels) -> int:
    return int(np.bincount(names).argmax())


def enlarge(image: npt.NDArray[np.uint8]) -> tuple[Floats, Labels]:
    """A small image on a finer grid with sharp edges, float64 [h, w, 3] in 0..255, and the names of its colours [h, w].

    Every pixel is held to be a mixture of the background and of what differs most from it next to that pixel. The share
    is interpolated, and where it is a half or more there is the thing, pure, elsewhere the background.
    """
    pixels = image.astype(np.float64)
    border = _border(pixels)
    names = nearest_colour(border)
    ground = _commonest(names)
    background = border[names == ground].mean(axis=0)
    away = np.linalg.norm(pixels - background, axis=-1)
    near = sliding_window_view(np.pad(away, 1), (3, 3)).reshape(*away.shape, 9)
    colours = sliding_window_view(np.pad(pixels, ((1, 1), (1, 1), (0, 0))), (3, 3), axis=(0, 1))
    colours = colours.reshape(*away.shape, 3, 9)
    purest = near.argmax(axis=-1)[..., None]
    share = away / np.maximum(np.take_along_axis(near, purest, -1)[..., 0], 1)
    pure = np.take_along_axis(colours, purest[..., None], -1)[..., 0]
    step = max(2, FINE_SIDE // min(away.shape))
    there = _finer(share, step) >= 0.5
    # Colours are named before pixels become many: that is most of the work.
    fine = np.where(there[..., None], pure.repeat(step, 0).repeat(step, 1), background)
    named = nearest_colour(pure).repeat(step, 0).repeat(step, 1)
    return fine, np.where(there, named, ground)


def _finer(values: Floats, step: int) -> Floats:
    """Bilinear interpolation of pixel middles [h, w] -> [h * step, w * step]; constant beyond the outermost ones."""
    for axis in (0, 1):
        place = (np.arange(values.shape[axis] * step) + 0.5) / step - 0.5
        place = place.clip(0, values.shape[axis] - 1)
        low = np.floor(place).astype(np.int64)
        high = np.minimum(low + 1, values.shape[axis] - 1)
        part = (place - low).reshape(-1, 1) if axis == 0 else place - low
        values = values.take(low, axis) * (1 - part) + values.take(high, axis) * part
    return values


def shrink(image: npt.NDArray[np.uint8]) -> Floats:
    """Means over square blocks, so that the shorter side becomes at least `SIDE`; float64 [h, w, 3] in 0..255."""
    step = max(1, min(image.shape[:2]) // SIDE)
    h, w = image.shape[0] // step, image.shape[1] // step
    blocks = image[: h * step, : w * step].reshape(h, step, w, step, 3)
    return np.asarray(blocks.mean(axis=(1, 3), dtype=np.float64))


def join(names: Labels) -> Labels:
    """A number per patch, int64 [h, w]: the same one where a path of equal names joins them (4 neighbours)."""
    height, width = names.shape
    starts = np.ones((height, width), bool)
    starts[:, 1:] = names[:, 1:] != names[:, :-1]
    run = starts.ravel().cumsum().reshape(height, width) - 1
    labels = np.arange(int(run[-1, -1]) + 1)
    same = names[1:] == names[:-1]
    # Each pair of runs that touch once; both take the smaller label, and every run that of its label, until all agree.
    a, b = np.divmod(np.unique(run[:-1][same] * len(labels) + run[1:][same]), len(labels))
    while (labels[a] != labels[b]).any():
        smaller = np.minimum(labels[a], labels[b])
        for runs in (labels[a], labels[b]):
            np.minimum.at(labels, runs, smaller)
        labels = labels[labels]
    return np.asarray(labels[run])


def _surrounded(patches: Labels) -> npt.NDArray[np.bool_]:
    """Pixels whose four neighbours belong to the same patch; beyond the edge of the image everything does."""
    around = np.pad(patches, 1, mode="edge")
    middle = around[1:-1, 1:-1]
    views = (around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:])
    return np.asarray(np.logical_and.reduce([view == middle for view in views]))


def _object(image: Floats, pixels: Labels, solid: Labels) -> Object:
    rows, columns = np.divmod(pixels, image.shape[1])
    # The colour is taken from the inside, where nothing is mixed in.
    colour = image.reshape(-1, 3)[solid].mean(axis=0)
    return Object(
        float(columns.mean()), float(rows.mean()), len(pixels) ** 0.5, colour_odds(colour), shape_odds(rows, columns)
    )
