"""Scorer of the embedded task: does an 8x8 picture show the digit and the ink colour that its prompt names?

Owns the whole judgement in NumPy: a small convolutional classifier (the reward) and, for honesty, a second opinion of
another kind, a kernel density over real scans that the classifier never saw (the judge: reported, never optimised).
Refuses a prompt that names no colour and number, and a picture of another shape. Uses no torch, so a reward server is
light; every picture is multiplied on its own, so a score never depends on what else was in the request.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from safetensors.numpy import load_file

from nftctl.reward.scorers import files_revision

Floats = NDArray[np.float32]

WEIGHTS = Path(__file__).with_name("tiny_digits.safetensors")
FILES: tuple[Path, ...] = (Path(__file__), WEIGHTS)
"""Everything that determines a score."""

COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHAPES = {
    "conv1.weight": (9, 16),
    "conv1.bias": (16,),
    "conv2.weight": (144, 32),
    "conv2.bias": (32,),
    "head.weight": (512, 11),
    "head.bias": (11,),
    "pigment": (6, 3),
    "judge.ink": (None, 64),
    "judge.label": (None,),
}
"""Tensors of the weight file. The classifier's eleventh class is "no digit"."""

COLOUR_WIDTH = 0.02
JUDGE_WIDTH = 0.02
JUDGE_REACH = 0.25
"""Squared distance at which one real scan weighs as much as the judge's "no digit"."""


class TinyDigits:
    """score = p(digit) * p(colour), in [0, 1].

    Components: both factors; `strict`, 1 when both are the likeliest, else 0; `judge` = p_judge(digit) * p(colour).
    """

    name = "tiny_digits"
    components = ("digit", "colour", "strict", "judge")

    def __init__(self, weights: Path = WEIGHTS) -> None:
        self._weights = _read(weights)
        self._scans = _unit(self._weights["judge.ink"])
        self._class = np.eye(10, dtype=np.float32)[self._weights["judge.label"].astype(np.int64)]

    def revision(self) -> str:
        """sha256 over the source and the weights of this scorer."""
        return files_revision(FILES)

    def score(
        self, images: list[NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, object]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, components) per image uint8 [8, 8, 3] and prompt "a {colour} {number}"; `metadata` is not used.

        ValueError names the first prompt or the first shape that cannot be judged.
        """
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} metadata: counts must agree"
            )
        wanted = [parse_prompt(text) for text in prompts]
        if not images:
            return []
        darkness = _darkness(images)
        ink = darkness.max(axis=-1)
        digits, colours, judged = self.digits(ink), self.colours(darkness), self.judged(ink)
        return [_entry(digits[n], colours[n], judged[n], colour, number) for n, (colour, number) in enumerate(wanted)]

    def digits(self, ink: Floats) -> Floats:
        """Classifier's probabilities [n, 11] of ink maps [n, 8, 8]: ten digits and "no digit"."""
        w = self._weights
        hidden = _convolve(ink[..., None], w["conv1.weight"], w["conv1.bias"])
        hidden = _convolve(hidden, w["conv2.weight"], w["conv2.bias"])
        pooled = hidden.reshape(len(ink), 4, 2, 4, 2, 32).max(axis=(2, 4)).reshape(len(ink), 1, 512)
        return _softmax((pooled @ w["head.weight"])[:, 0] + w["head.bias"])

    def colours(self, darkness: Floats) -> Floats:
        """Probabilities [n, 6] of the colours: ink-weighted mean of 1 - pixel, as a direction, against each pigment."""
        flat = darkness.reshape(len(darkness), 64, 3)
        mean = (flat * flat.max(axis=-1, keepdims=True)).sum(axis=1)
        gap = _unit(mean)[:, None] - _unit(1 - self._weights["pigment"])
        return _softmax(-(gap**2).sum(axis=-1) / COLOUR_WIDTH)

    def judged(self, ink: Floats) -> Floats:
        """Judge's probabilities [n, 10] of ink maps [n, 8, 8]; far from every real scan all of them tend to 0."""
        near = _unit(ink.reshape(len(ink), 1, 64)) @ self._scans.T
        weight = np.exp((2 * near - 2) / JUDGE_WIDTH)
        votes = (weight @ self._class)[:, 0]
        return np.asarray(votes / (votes.sum(axis=-1, keepdims=True) + np.exp(-JUDGE_REACH / JUDGE_WIDTH)))


def parse_prompt(text: str) -> tuple[int, int]:
    """(colour index, digit) of "a red seven"; ValueError quotes any other prompt."""
    words = text.split()
    if len(words) != 3 or words[0] != "a" or words[1] not in COLOURS or words[2] not in NUMBERS:
        raise ValueError(f"tiny_digits cannot judge the prompt {text!r}: expected 'a {{colour}} {{number}}'")
    return COLOURS.index(words[1]), NUMBERS.index(words[2])


def load() -> TinyDigits:
    """The packaged scorer."""
    return TinyDigits()


def _entry(digits: Floats, colours: Floats, judged: Floats, colour: int, number: int) -> tuple[float, dict[str, float]]:
    digit, tone = float(digits[number]), float(colours[colour])
    strict = float(digits.argmax() == number and colours.argmax() == colour)
    return digit * tone, {"digit": digit, "colour": tone, "strict": strict, "judge": float(judged[number]) * tone}


def _darkness(images: list[NDArray[np.uint8]]) -> Floats:
    """1 - pixel, float32 [n, 8, 8, 3]."""
    for image in images:
        if image.shape != (8, 8, 3) or image.dtype != np.uint8:
            raise ValueError(f"tiny_digits judges uint8 pictures of shape (8, 8, 3), got {image.dtype} {image.shape}")
    return np.float32(1) - np.stack(images).astype(np.float32) / np.float32(255)


def _convolve(x: Floats, weight: Floats, bias: Floats) -> Floats:
    """3x3 convolution with zero padding and ReLU: [n, 8, 8, c] to [n, 8, 8, k]; rows of `weight` are (c, 3, 3)."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = sliding_window_view(padded, (3, 3), axis=(1, 2)).reshape(len(x), 64, -1)
    return np.asarray(np.maximum(patches @ weight + bias, 0).reshape(len(x), 8, 8, -1), np.float32)


def _softmax(logits: Floats) -> Floats:
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(grown / grown.sum(axis=-1, keepdims=True), np.float32)


def _unit(x: Floats) -> Floats:
    # The small constant keeps blank paper at the origin, equally far from everything.
    return np.asarray(x / (np.sqrt((x**2).sum(axis=-1, keepdims=True)) + np.float32(1e-3)), np.float32)


def _read(path: Path) -> dict[str, Floats]:
    """The weight file as float32; ValueError on a missing, extra or misshapen tensor."""
    tensors = load_file(path)
    if set(tensors) != set(SHAPES):
        raise ValueError(f"{path.name}: tensors {sorted(set(tensors) ^ set(SHAPES))} are missing or unknown")
    for name, shape in SHAPES.items():
        got = tensors[name].shape
        if len(got) != len(shape) or any(want not in (None, have) for want, have in zip(shape, got, strict=True)):
            raise ValueError(f"{path.name}: {name} has shape {got}, expected {shape}")
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
