"""What a picture is like beside its reward: pixels at the end of their range, fine detail, and how unlike its group is.

Formulas in NumPy, of a part of the pixels that is fixed by the size of the image, so that a large one costs about a
millisecond. Says nothing of quality: these are for noticing that images go grey, white, grainy or all alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SQUARES = 64
"""Most 2x2 squares that are read along each side."""
THUMBNAIL = 8
"""Side of a thumbnail; smaller images have one of half their size."""
END = 2
"""A channel value so near 0 or 255 counts as saturated: rounding and codecs leave that much."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ImageLook:
    """One image in a few numbers.

    saturation       share of channel values at either end of their range
    high_frequency   root mean square of what 2x2 squares lose when each is evened out, in units of the range: 0 where
                     neighbours are alike, 0.5 for a checkerboard of black and white
    thumbnail        [side, side, 3] in [0, 1]
    """

    saturation: float
    high_frequency: float
    thumbnail: Numbers


def look_at(image: npt.NDArray[np.uint8]) -> ImageLook:
    """A uint8 image [H, W, 3], at least 2x2."""
    squares = _squares(image)
    saturated = np.count_nonzero((squares <= END) | (squares >= 255 - END)) / squares.size
    values = squares.astype(np.float32) / 255.0
    means = values.mean(axis=(1, 3))
    detail = values - means[:, None, :, None]
    return ImageLook(saturated, float(np.sqrt(np.mean(detail * detail, dtype=np.float64))), _thumbnail(means))


def _squares(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[rows, 2, columns, 2, 3]: 2x2 squares, evenly spread over the image."""
    height, width = image.shape[0] // 2, image.shape[1] // 2
    if not height or not width:
        raise ValueError(f"an image of {image.shape[0]}x{image.shape[1]} pixels has no 2x2 square")
    whole = image[: 2 * height, : 2 * width].reshape(height, 2, width, 2, 3)
    return whole[:: _stride(height), :, :: _stride(width)]


def _stride(count: int) -> int:
    # Odd: an even one would meet a decoder's grid of 8 or 16 pixels at the same place every time.
    return -(-count // SQUARES) | 1


def _thumbnail(means: npt.NDArray[np.float32]) -> Numbers:
    """Means over THUMBNAIL x THUMBNAIL cells of equal size, to a square."""
    values: Numbers = means.astype(np.float64)
    for axis in (0, 1):
        count = values.shape[axis]
        edges = np.arange(min(THUMBNAIL, count)) * count // min(THUMBNAIL, count)
        sizes = np.diff(np.append(edges, count))
        shape = [1, 1, 1]
        shape[axis] = len(sizes)
        values = np.add.reduceat(values, edges, axis=axis) / sizes.reshape(shape)
    return values


def diversity(thumbnails: Numbers) -> float:
    """Mean distance of two images of a group, mean over groups: 0 where a group's are all alike, 1 for black and white.

    Args:
        thumbnails: [groups, samples, numbers]; a distance is the root mean square of the differences.
    """
    samples = thumbnails.shape[1]
    if samples < 2:
        return 0.0
    first, second = np.triu_indices(samples, k=1)
    gaps = thumbnails[:, first] - thumbnails[:, second]
    return float(np.sqrt(np.mean(gaps * gaps, axis=2)).mean())
