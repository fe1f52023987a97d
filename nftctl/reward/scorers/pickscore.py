"""Scorer of human preference by PickScore (Kirstain et al. 2023): a CLIP-H tuned on people's choices between images.

Owns the scale: logits are divided by 26, as users of this reward are used to, which puts common values near 0.8.
Takes a local folder or a hub id (`--scorer pickscore:MODEL`) and needs `nftctl[clip]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.reward.scorers.clip import model as clip

MODEL = "yuvalkirstain/PickScore_v1"
"""What is asked of the hub when no model is named."""

LOGIT_UNIT = 26.0


class PickScore:
    """score = logit / 26 with logit = exp(logit scale) * cosine; component `logit` is the undivided one."""

    name = "pickscore"
    components = ("logit",)

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
        logits = [self._clip.scale * cosine for cosine in self._clip.cosines(images, prompts)]
        return [(logit / LOGIT_UNIT, {"logit": logit}) for logit in logits]


def load(model: str = "") -> PickScore:
    """The scorer around `model`. Raises RewardFailed."""
    return PickScore(model or MODEL)


def revision(model: str = "") -> str:
    """sha256 (hex) over this source and the files of `model`."""
    return clip.revision([Path(__file__)], model or MODEL)
