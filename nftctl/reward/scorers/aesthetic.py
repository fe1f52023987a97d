"""Scorer of looks alone: a small head on CLIP image embeddings, as LAION's predictors have it (about 1 to 10).

Owns reading the head: linear layers `layers.N.weight` and `layers.N.bias` in the model folder's safetensors, applied in
order of N with nothing between them. The published heads are pickles, so there is no default: convert one once and put
it beside a CLIP vision model. `--scorer aesthetic:MODEL`; needs `nftctl[clip]`. Prompts are not looked at.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from nftctl.errors import RewardFailed
from nftctl.reward.scorers.clip import model as clip

LAYER = re.compile(r"layers\.(\d+)\.weight")

Layers = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


class Aesthetic:
    """score = the head's output on the unit embedding of the image."""

    name = "aesthetic"
    components: tuple[str, ...] = ()

    def __init__(self, model: str) -> None:
        folder = clip.find_model(model)
        self._model = model
        self._layers = read_head(folder)
        self._clip = clip.Clip(folder, text=False)

    def revision(self) -> str:
        """sha256 over the source and the model's files, the head's among them."""
        return revision(self._model)

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, {}) per uint8 [H, W, 3] image."""
        if not images:
            return []
        x = self._clip.images(images).cpu().numpy()
        for weight, bias in self._layers:
            x = x @ weight.T + bias
        return [(float(value), {}) for value in x[:, 0]]


def load(model: str = "") -> Aesthetic:
    """The scorer around `model`. Raises RewardFailed."""
    return Aesthetic(_named(model))


def revision(model: str = "") -> str:
    """sha256 (hex) over this source and the files of `model`."""
    return clip.revision([Path(__file__)], _named(model))


def read_head(folder: Path) -> Layers:
    """(weight [out, in], bias [out]) of every layer, in order. RewardFailed when there is none or they do not chain."""
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if name.startswith("layers.")]  # noqa: SIM118
            tensors |= {name: file.get_tensor(name).astype(np.float32) for name in names}
    numbers = sorted(int(found[1]) for key in tensors if (found := LAYER.fullmatch(key)))
    try:
        layers = [(tensors[f"layers.{n}.weight"], tensors[f"layers.{n}.bias"]) for n in numbers]
    except KeyError as error:
        raise RewardFailed(f"the head in {folder} lacks {error}") from None
    widths = [(weight.shape[1], weight.shape[0]) for weight, _ in layers]
    if not layers or widths[-1][1] != 1 or any(a[1] != b[0] for a, b in pairwise(widths)):
        raise RewardFailed(
            f"{folder} has no aesthetic head: layers.N.weight that end in one number, found {widths}",
            hint="put the converted head, as safetensors, beside the CLIP model's files",
        )
    return layers


def _named(model: str) -> str:
    if not model:
        raise RewardFailed("scorer aesthetic needs a model", hint="--scorer aesthetic:FOLDER")
    return model
