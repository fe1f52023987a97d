"""Scorer of likeness between prompt and image by a CLIP model: CLIPScore of Hessel et al. (2021), equation 1.

Owns that formula alone. Takes a local folder or a hub id (`--scorer clip_score:MODEL`) and needs `nftctl[clip]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.reward.scorers.clip import model as clip

MODEL = "openai/clip-vit-large-patch14"
"""What is asked of the hub when no model is named."""

WEIGHT = 2.5
"""w of the formula: stretches the cosines that occur over about [0, 1]."""


class ClipScore:
    """score = 2.5 max(cosine, 0); component `cosine` is unclipped."""

    name = "clip_score"
    components = ("cosine",)

    def __init__(self, model: str) -> None:
        self._model = model
        self._clip = clip.Clip(clip.find_model(model), text=True)

    def revision(self) -> str:
        """sha256 over the source and the model's files."""
        return revision(self._model)

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, components) per uint8 [H, W, 3] image and prompt."""
        if not images:
            return []
        return [(WEIGHT * max(cosine, 0.0), {"cosine": cosine}) for cosine in self._clip.cosines(images, prompts)]


def load(model: str = "") -> ClipScore:
    """The scorer around `model`. Raises RewardFailed."""
    return ClipScore(model or MODEL)


def revision(model: str = "") -> str:
    """sha256 (hex) over this source and the files of `model`."""
    return clip.revision([Path(__file__)], model or MODEL)
