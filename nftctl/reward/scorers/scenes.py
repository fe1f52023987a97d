"""Scorer of the embedded scenes: the rules of `colour_shape` are the reward, a small network is the judge beside it.

Owns the judge: a convolutional detector in NumPy that learned from other renderings than the base did and shares no
step of the rules' way of seeing (`python -m nftctl.model.scenes.judge_recipe` made it). It is reported, never part of
the score. Refuses what `colour_shape` refuses, and pictures of another size than 32 x 32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import load_file

from nftctl.reward.scorers import colour_shape, files_revision
from nftctl.reward.scorers.scene.grammar import Wanted, parse_prompt

Floats = npt.NDArray[np.float32]

WEIGHTS = Path(__file__).with_name("scenes.safetensors")
FILES: tuple[Path, ...] = (Path(__file__), WEIGHTS, *colour_shape.FILES)
"""Everything that determines a score."""

SIDE = 32
GRID = SIDE // 2
"""The detector says of every second pixel along each side what has its middle there."""
COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
SHAPES = ("circle", "square", "triangle")
LAYERS = ((3, 24, 5, 2), (24, 32, 3, 1), (32, 32, 3, 1), (32, 32, 3, 1), (32, 10, 1, 1))
"""(channels in, channels out, kernel, stride). The last layer's ten: three shapes, six colours, another colour."""
FAINT, CLEAR = 0.2, 0.6
"""Heat of a middle under which nothing is there, and from which on it is certain."""


class Scenes:
    """score and first components are those of `colour_shape`; `judge`, in [0, 1], is the detector's opinion."""

    name = "scenes"
    components = (*colour_shape.ColourShape.components, "judge")

    def __init__(self, weights: Path = WEIGHTS) -> None:
        self._rules = colour_shape.load()
        self._detector = Detector(_read(weights))

    def revision(self) -> str:
        """sha256 over the sources and the weights of this scorer."""
        return files_revision(FILES)

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, components) per uint8 [32, 32, 3] image; ValueError names what cannot be judged."""
        for image in images:
            if image.shape != (SIDE, SIDE, 3) or image.dtype != np.uint8:
                raise ValueError(f"scenes judges uint8 pictures of shape (32, 32, 3), got {image.dtype} {image.shape}")
        wanted = [parse_prompt(prompt) for prompt in prompts]
        scored = self._rules.score(images, prompts, metadata)
        seen = self._detector.things(images)
        return [
            (score, {**parts, "judge": judged(things, want)})
            for (score, parts), things, want in zip(scored, seen, wanted, strict=True)
        ]


class Things:
    """What the detector sees: middles x, y [n] in pixels, odds of each shape [n, 3] and of each colour [n, 6]."""

    def __init__(self, x: Floats, y: Floats, shapes: Floats, colours: Floats) -> None:
        self.x, self.y, self.shapes, self.colours = x, y, shapes, colours

    def odds(self, colour: str, shape: str) -> Floats:
        """[n], how likely each is of this shape and, unless that is "", of this colour; of others, not at all."""
        shaped = self.shapes[:, SHAPES.index(shape)]
        if not colour:
            return shaped
        return shaped * (self.colours[:, COLOURS.index(colour)] if colour in COLOURS else 0)


class Detector:
    """Five convolutions; the heat of each shape's middles on a 16 x 16 grid, and the colour of what is there."""

    def __init__(self, weights: dict[str, Floats]) -> None:
        self._weights = weights

    def things(self, images: list[npt.NDArray[np.uint8]]) -> list[Things]:
        """What is on each picture. Every one is multiplied on its own: its answer does not depend on the others."""
        if not images:
            return []
        maps = self.maps(np.stack(images).astype(np.float32) / np.float32(127.5) - 1)
        return [_peaks(one) for one in maps]

    def maps(self, x: Floats) -> Floats:
        """Raw answers [n, 16, 16, 10] for pictures [n, 32, 32, 3] in [-1, 1]."""
        for n, (_, _, kernel, stride) in enumerate(LAYERS):
            x = _convolve(x, self._weights[f"{n}.weight"], self._weights[f"{n}.bias"], kernel, stride)
            if n < len(LAYERS) - 1:
                x = np.maximum(x, 0)
        return x


def judged(things: Things, wanted: Wanted) -> float:
    """How well what is there fits what is wanted: the numbers' fit, and 1 or 0 for whether the relation holds."""
    odds = [things.odds(group.colour, group.shape) for group in wanted.groups]
    fit = float(np.prod([_fit(float(row.sum()), g.count) for row, g in zip(odds, wanted.groups, strict=True)]))
    if wanted.relation is None or fit == 0:
        return fit
    along = things.x if wanted.relation in ("left", "right") else things.y
    first, second = (float((along * row).sum() / row.sum()) for row in odds)
    return fit * float(first < second if wanted.relation in ("left", "above") else first > second)


def load() -> Scenes:
    """The packaged scorer."""
    return Scenes()


def _fit(there: float, count: int) -> float:
    """1 for as many as wanted, 0 from one too many or too few on."""
    return max(0.0, 1 - abs(there - count))


def _peaks(maps: Floats) -> Things:
    """Where the strongest shape's heat [16, 16, 10] is a local maximum and not faint."""
    heat = 1 / (1 + np.exp(-maps[..., : len(SHAPES)]))
    best = heat.max(axis=-1)
    around = sliding_window_view(np.pad(best, 1), (3, 3)).max(axis=(2, 3))
    rows, columns = np.nonzero((best == around) & (best > FAINT))
    clear = np.clip((heat[rows, columns] - FAINT) / (CLEAR - FAINT), 0, 1)
    shapes = np.where(heat[rows, columns] == best[rows, columns][:, None], clear, 0)
    logits = maps[rows, columns, len(SHAPES) :]
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=0))
    colours = grown / grown.sum(axis=-1, keepdims=True)
    return Things(
        (columns * 2 + 1).astype(np.float32),
        (rows * 2 + 1).astype(np.float32),
        shapes.astype(np.float32),
        colours[:, : len(COLOURS)].astype(np.float32),
    )


def _convolve(x: Floats, weight: Floats, bias: Floats, kernel: int, stride: int) -> Floats:
    """Convolution with zero padding: [n, h, w, c] to [n, h / stride, w / stride, k]; rows of `weight` are (c, y, x)."""
    edge = kernel // 2
    padded = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    patches = sliding_window_view(padded, (kernel, kernel), axis=(1, 2))[:, ::stride, ::stride]
    n, h, w = patches.shape[:3]
    return np.asarray((patches.reshape(n, h * w, -1) @ weight + bias).reshape(n, h, w, -1), np.float32)


def _read(path: Path) -> dict[str, Floats]:
    """The weight file as float32; ValueError on a missing, extra or misshapen tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for n, (inputs, outputs, kernel, _) in enumerate(LAYERS):
        shapes |= {f"{n}.weight": (inputs * kernel * kernel, outputs), f"{n}.bias": (outputs,)}
    tensors = load_file(path)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != shapes:
        raise ValueError(f"{path.name}: tensors {found} are not the expected {shapes}")
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
