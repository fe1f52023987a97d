"""Scorer of how well JPEG can pack an image: the fewer kilobytes, the better. Prompts are not looked at.

Owns the encoding that both JPEG scorers measure: quality 95, full colour resolution, fixed tables. Like brightness it
is a reward to test a loop with, not one to ship: a policy paid for it makes smooth, empty images.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.reward.scorers import files_revision

FILES: tuple[Path, ...] = (Path(__file__),)
"""Everything that determines a score, apart from the installed libjpeg."""

QUALITY = 95


class JpegCompressibility:
    """score = -size of the image as JPEG, in kilobytes (1000 bytes)."""

    name = "jpeg_compressibility"
    components: tuple[str, ...] = ()

    def revision(self) -> str:
        """sha256 over this file."""
        return files_revision(FILES)

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, {}) per uint8 [H, W, 3] image."""
        return [(-jpeg_kilobytes(image), {}) for image in images]


def load() -> JpegCompressibility:
    """The packaged scorer."""
    return JpegCompressibility()


def jpeg_kilobytes(image: npt.NDArray[np.uint8]) -> float:
    """Size of a uint8 [H, W, 3] image as JPEG of quality 95, in kilobytes of 1000 bytes."""
    from PIL import Image

    out = io.BytesIO()
    # 4:4:4, so that colour detail counts as much as grey detail; no optimised tables, so that size follows content.
    Image.fromarray(image).save(out, format="JPEG", quality=QUALITY, subsampling=0, optimize=False)
    return out.tell() / 1000
