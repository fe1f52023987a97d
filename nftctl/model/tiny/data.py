"""The task of the base of the digits: scanned handwritten digits, tinted with a named colour, 8x8 RGB.

Owns the words, the prompts and their split, the two disjoint halves of the scans, tinting and augmentation, all in
NumPy and all from an explicit generator. Refuses nothing: its inputs are its own. scikit-learn, which ships the scans,
is imported only where they are read, so that nothing but the recipe needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

SIZE = 8
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.85, 0.10, 0.10),
    "green": (0.05, 0.70, 0.10),
    "blue": (0.10, 0.25, 0.90),
    "yellow": (0.95, 0.75, 0.00),
    "purple": (0.60, 0.05, 0.75),
    "black": (0.05, 0.05, 0.05),
}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ("a", *COLOURS, *NUMBERS)


@dataclass(frozen=True)
class Scans:
    """Ink maps [n, 8, 8] in [0, 1] (0 is paper) and their labels [n] in 0..9."""

    ink: Floats
    label: Ints


def prompt(colour: int, digit: int) -> str:
    """The sentence for a colour index and a digit: `prompt(0, 7)` is "a red seven"."""
    return f"a {tuple(COLOURS)[colour]} {NUMBERS[digit]}"


def split_prompts() -> tuple[list[str], list[str]]:
    """(48 prompts to train on, 12 held out): every colour and every digit occurs in both lists.

    A run takes prompts in file order, so neighbours in the list differ in colour and in digit.
    """
    train: list[str] = []
    test: list[str] = []
    for step in range(60):
        # 17 steps through the 6x10 table visit every cell once and change both indices each time.
        colour, digit = divmod(17 * step % 60, 10)
        (test if (digit + 3 * colour) % 5 == 0 else train).append(prompt(colour, digit))
    return train, test


def read_halves() -> tuple[Scans, Scans]:
    """Half A (898 scans: the base and the judge) and half B (899: the reward classifier), disjoint and fixed."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    ink = (scans.images / 16).astype(np.float32)
    label = scans.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(label))
    half = len(label) // 2
    first, second = order[:half], order[half:]
    return Scans(ink[first], label[first]), Scans(ink[second], label[second])


def tint(ink: Floats, colour: Ints, jitter: Floats | float = 0.0) -> Floats:
    """White paper [n, 8, 8, 3] in [0, 1] with ink of the given colour indices; `jitter` [n, 3] moves the pigment."""
    pigment = np.array(list(COLOURS.values()), np.float32)[colour] + jitter
    return np.clip(1 - ink[..., None] * (1 - pigment[:, None, None, :]), 0, 1).astype(np.float32)


def warp(ink: Floats, rng: np.random.Generator, amount: float = 0.06) -> Floats:
    """Ink maps under a random affine map each: scale and shear within ±amount, shift within ±6 amount pixels."""
    count = len(ink)
    matrix = np.eye(2) + rng.uniform(-amount, amount, (count, 2, 2))
    shift = rng.uniform(-6 * amount, 6 * amount, (count, 2, 1))
    centre = (SIZE - 1) / 2
    grid = np.stack(np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij")).reshape(2, -1) - centre
    return _bilinear(ink, matrix @ grid + shift + centre)


def _bilinear(ink: Floats, where: NDArray[np.float64]) -> Floats:
    """Values of `ink` [n, 8, 8] at the (row, column) positions `where` [n, 2, 64]; paper outside."""
    padded = np.pad(ink, ((0, 0), (2, 2), (2, 2)))
    where = np.clip(where + 2, 0, SIZE + 2.999)
    low = where.astype(np.int64)
    (down, right), (top, left) = (where - low).transpose(1, 0, 2), low.transpose(1, 0, 2)
    item = np.arange(len(ink))[:, None]
    value = (
        padded[item, top, left] * (1 - down) * (1 - right)
        + padded[item, top + 1, left] * down * (1 - right)
        + padded[item, top, left + 1] * (1 - down) * right
        + padded[item, top + 1, left + 1] * down * right
    )
    return value.reshape(-1, SIZE, SIZE).astype(np.float32)


def training_batch(scans: Scans, count: int, rng: np.random.Generator) -> tuple[Floats, Ints, Ints]:
    """`count` warped, tinted scans: latents [count, 3, 8, 8] in [-1, 1], colour indices, digits."""
    pick = rng.integers(0, len(scans.label), count)
    colour = rng.integers(0, len(COLOURS), count)
    jitter = rng.normal(0, 0.03, (count, 3)).astype(np.float32)
    pixels = tint(warp(scans.ink[pick], rng), colour, jitter)
    return pixels.transpose(0, 3, 1, 2) * 2 - 1, colour, scans.label[pick]
