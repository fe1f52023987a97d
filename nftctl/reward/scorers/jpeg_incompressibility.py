"""Scorer of how badly JPEG can pack an image: the more kilobytes, the better. The mirror of jpeg_compressibility.

Owns nothing but the sign. A policy paid for it fills images with texture and, in the end, with noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.reward.scorers import files_revision, jpeg_compressibility
from nftctl.reward.scorers.jpeg_compressibility import jpeg_kilobytes

FILES: tuple[Path, ...] = (Path(__file__), *jpeg_compressibility.FILES)
"""Everything that determines a score, apart from the installed libjpeg."""


class JpegIncompressibility:
    """score = size of the image as JPEG, in kilobytes (1000 bytes)."""

    name = "jpeg_incompressibility"
    components: tuple[str, ...] = ()

    def revision(self) -> str:
        """sha256 over this file and the one with the encoding."""
        return files_revision(FILES)

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, {}) per uint8 [H, W, 3] image."""
        return [(jpeg_kilobytes(image), {}) for image in images]


def load() -> JpegIncompressibility:
    """The packaged scorer."""
    return JpegIncompressibility()
