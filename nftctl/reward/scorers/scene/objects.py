"""Objects of an image: patches of one named colour that are not the background, with place, size, colour and shape.

Owns the segmentation: shrink to about `SIDE` pixels, name every pixel's colour, join equal neighbours, and drop the
background, specks, and the seams of mixed colour that anti-aliasing leaves between two patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nftctl.reward.scorers.scene.names import Floats, colour_odds, nearest_colour, shape_odds

SIDE = 128
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
    small = shrink(image)
    names = nearest_colour(small)
    border = np.concatenate([names[0], names[-1], names[:, 0], names[:, -1]])
    background = np.bincount(border).argmax()
    patches = join(names)
    inner = _surrounded(patches)
    found = []
    order = np.argsort(patches, axis=None, kind="stable")
    for pixels in np.split(order, np.flatnonzero(np.diff(patches.ravel()[order])) + 1):
        if names.flat[pixels[0]] == background or len(pixels) < SMALLEST * names.size:
            continue
        solid = inner.ravel()[pixels]
        if solid.mean() >= SOLID:
            found.append(_object(small, pixels, pixels[solid]))
    return found


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
    parent = list(range(int(run[-1, -1]) + 1))
    same = names[1:] == names[:-1]
    # Each pair of runs that touch as one number, so that it can be sorted out fast.
    for pair in np.unique(run[:-1][same] * len(parent) + run[1:][same]).tolist():
        a, b = (_root(parent, n) for n in divmod(pair, len(parent)))
        parent[max(a, b)] = min(a, b)
    roots = np.array([_root(parent, n) for n in range(len(parent))], np.int64)
    return np.asarray(roots[run])


def _root(parent: list[int], n: int) -> int:
    while parent[n] != n:
        parent[n] = parent[parent[n]]
        n = parent[n]
    return n


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
