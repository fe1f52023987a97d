"""Scorer of one idea: the brighter the image, the better. The smallest complete example of a scorer.

To make your own, copy this file, change `score`, and add one line to `SCORERS` in the folder's `__init__.py`. As a
reward it is hackable on purpose: a policy trained on it paints everything white, whatever the prompt says, which is a
quick way to see a loop learn, and a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.reward.scorers import files_revision

FILES: tuple[Path, ...] = (Path(__file__),)
"""Everything that determines a score."""


class Brightness:
    """score = mean pixel / 255, in [0, 1]; components: the same for each colour channel."""

    name = "brightness"
    components = ("red", "green", "blue")

    def revision(self) -> str:
        """sha256 over this file."""
        return files_revision(FILES)

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, components) per image; prompts and metadata are not looked at."""
        return [_brightness(image) for image in images]


def load() -> Brightness:
    """The packaged scorer."""
    return Brightness()


def _brightness(image: npt.NDArray[np.uint8]) -> tuple[float, dict[str, float]]:
    # Whole rows first, in integers: exact, and an order faster than a mean over pixels of three numbers.
    sums = image.sum(axis=0, dtype=np.uint32).sum(axis=0, dtype=np.int64)
    channels = sums / (image.shape[0] * image.shape[1]) / 255
    red, green, blue = (float(c) for c in channels)
    return (red + green + blue) / 3, {"red": red, "green": green, "blue": blue}
