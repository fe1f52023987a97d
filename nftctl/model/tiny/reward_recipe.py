"""Makes the weights of the reward scorer `tiny_digits`: `python -m nftctl.model.tiny.reward_recipe` (half a minute).

Owns the training of the classifier (half B of the scans, which the base never sees) and the judge's memory (half A).
The scorer that reads the file is NumPy and lives with the rewards; this half needs torch and scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn import functional as F

from nftctl.model.tiny.data import COLOURS, SIZE, Floats, Ints, Scans, read_halves, warp

PLACE = Path(__file__).parents[2] / "reward" / "scorers" / "tiny_digits.safetensors"
ITERATIONS = 2500
NO_DIGIT = 10


class Classifier(nn.Module):
    """Two 3x3 convolutions, one pooling, one linear layer: 10,443 parameters, ink [n, 1, 8, 8] to logits [n, 11]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(512, 11)

    def forward(self, ink: torch.Tensor) -> torch.Tensor:
        hidden = self.conv2(self.conv1(ink).relu()).relu()
        return self.head(F.max_pool2d(hidden, 2).flatten(1))


def no_digits(ink: Floats, rng: np.random.Generator) -> Floats:
    """What must not pass for a digit, as many as `ink` [n, 8, 8]: shuffled, noise, tone, blot, overlay, broken, faint.

    A classifier trained on digits alone is sure of itself on such pictures, and a policy would find them.
    """
    count = len(ink)
    patches = ink.reshape(count, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(count, 16, 4)
    patches = np.take_along_axis(patches, rng.permuted(np.tile(np.arange(16), (count, 1)), axis=1)[..., None], axis=1)
    patches = patches.reshape(count, 4, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(count, SIZE, SIZE)
    pixels = rng.permuted(ink.reshape(count, -1), axis=1).reshape(ink.shape)
    noise = rng.uniform(0, 1, ink.shape) * rng.uniform(0, 1, (count, 1, 1))
    wash = np.broadcast_to(rng.uniform(0, 1, (count, 1, 1)), ink.shape)
    around = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    blot = np.max([around[:, y : y + SIZE, x : x + SIZE] for y in range(3) for x in range(3)], axis=0)
    overlay = np.maximum(ink, np.roll(ink, 1, axis=0))
    broken = ink * (rng.uniform(size=ink.shape) < 0.6)
    faint = ink * rng.uniform(0.1, 0.5, (count, 1, 1))
    kind = rng.integers(0, 8, (count, 1, 1))
    return np.choose(kind, [patches, pixels, noise, wash, blot, overlay, broken, faint]).astype(np.float32)


def batch(scans: Scans, count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Warped scans with some noise and slightly paler ink, one in four of them turned into no digit."""
    pick = rng.integers(0, len(scans.label), count)
    ink = warp(scans.ink[pick], rng, 0.1)
    spoilt = rng.uniform(size=count) < 0.25
    ink = np.where(spoilt[:, None, None], no_digits(ink, rng), ink)
    seen = ink * rng.uniform(0.9, 1.0, (count, 1, 1)) + rng.normal(0, 1, ink.shape) * rng.uniform(
        0, 0.15, (count, 1, 1)
    )
    return np.clip(seen, 0, 1).astype(np.float32), np.where(spoilt, NO_DIGIT, scans.label[pick])


def train_classifier(scans: Scans, *, iterations: int = ITERATIONS, seed: int = 0) -> Classifier:
    """The reward's classifier; the same seed gives the same weights on the same machine with the same thread count."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        ink, label = batch(scans, 128, rng)
        loss = F.cross_entropy(model(torch.from_numpy(ink)[:, None]), torch.from_numpy(label), label_smoothing=0.02)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def weights(classifier: Classifier, memory: Scans) -> dict[str, np.ndarray]:
    """The scorer's tensors: half-precision classifier in matrix form, pigments, and the judge's scans in 255ths.

    The judge remembers every scan twice, once as it is and once warped, so that a digit drawn a little larger or
    sheared is not held to be strange.
    """
    state = {name: value.detach().numpy() for name, value in classifier.state_dict().items()}
    remembered = np.concatenate([memory.ink, warp(memory.ink, np.random.default_rng(1), 0.1)])
    # The scorer pools pixels in (row, column, channel) order; torch flattens channels first.
    head = state["head.weight"].reshape(11, 32, 16).transpose(2, 1, 0).reshape(512, 11)
    half = {
        "conv1.weight": state["conv1.weight"].reshape(16, 9).T,
        "conv1.bias": state["conv1.bias"],
        "conv2.weight": state["conv2.weight"].reshape(32, 144).T,
        "conv2.bias": state["conv2.bias"],
        "head.weight": head,
        "head.bias": state["head.bias"],
    }
    return {name: np.ascontiguousarray(value, np.float16) for name, value in half.items()} | {
        "pigment": np.array(list(COLOURS.values()), np.float32),
        "judge.ink": np.round(remembered.reshape(-1, SIZE * SIZE) * 255).astype(np.uint8),
        "judge.label": np.tile(memory.label, 2).astype(np.uint8),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write the weight file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLACE)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    half_a, half_b = read_halves()
    classifier = train_classifier(half_b, iterations=options.iterations, seed=options.seed)
    save_file(weights(classifier, half_a), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
