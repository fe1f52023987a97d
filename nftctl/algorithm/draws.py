"""Random numbers that are a function of a key: what is drawn, for whom, for which row. Nothing here has a state.

Owns the generator rule and its version, the two seed clocks and the order in which prompt lines are consumed. Refuses
key parts other than integers and text, so that no float formatting can ever change a draw, and never touches a global
generator: placement, call order and device cannot move a number.

The rule, version 1: each key part is written as a netstring with its type ("i2:17," or "s7:rollout,") after the prefix
"nftctl-draw/1:"; the first 63 bits of the sha256 of that text are the key of a Philox counter generator on the CPU.
NumPy's Philox and not a `torch.Generator`, because the latter keeps only 32 bits of its seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

GENERATOR_VERSION = 1
"""Changes whenever any key would draw other numbers; part of the seed contract of a run."""

Key = int | str
SeedClock = Literal["source_row", "optimizer_step"]


def encode_key(key: Sequence[Key]) -> bytes:
    """Canonical, injective text of a key: (7, "rollout") becomes b"nftctl-draw/1:i1:7,s7:rollout,"."""
    parts = [f"nftctl-draw/{GENERATOR_VERSION}:".encode()]
    for part in key:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a draw is keyed by integers and text, got {part!r}")
        text = str(part).encode()
        parts.append(f"{'s' if isinstance(part, str) else 'i'}{len(text)}:".encode() + text + b",")
    return b"".join(parts)


def key_bits(*key: Key) -> int:
    """63 bits that stand for the key."""
    return int.from_bytes(hashlib.sha256(encode_key(key)).digest()[:8], "big") >> 1


def generator(*key: Key) -> np.random.Generator:
    """A fresh generator at the start of the key's stream."""
    return np.random.Generator(np.random.Philox(key=key_bits(*key)))


def normal(shape: Sequence[int], *key: Key) -> Tensor:
    """Standard normals, float32 on the CPU."""
    return torch.from_numpy(generator(*key).standard_normal(tuple(shape), dtype=np.float32))


def uniform(shape: Sequence[int], *key: Key) -> Tensor:
    """Uniforms in [0, 1), float64 on the CPU."""
    return torch.from_numpy(generator(*key).random(tuple(shape)))


def permutation(n: int, *key: Key) -> Tensor:
    """A permutation of range(n), int64 on the CPU."""
    return torch.from_numpy(generator(*key).permutation(n))


def rollout_tick(clock: SeedClock, row: int, optimizer_steps: int) -> int:
    """What advances the rollout noise: the running number of the source row, or the optimizer steps completed when the
    rollout starts (then all rows of a step share one tick, and so one noise per rank)."""
    return row if clock == "source_row" else optimizer_steps


def rollout_noise(shape: Sequence[int], *, seed: int, ticks: Sequence[int], rank: int) -> Tensor:
    """Initial latents of one rank: [len(ticks), *shape] float32 on the CPU, one per tick."""
    return torch.stack([normal(shape, seed, "rollout", tick, rank) for tick in ticks])


def train_index(update: int, count: int, k: int) -> int:
    """Running number j of the k-th of `count` timesteps in the update-th (from 0) optimizer step on a rollout."""
    return update * count + k


def train_noise(shape: Sequence[int], *, seed: int, rank: int, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Training noise of one rank for (running row, j) pairs: [len(pairs), *shape] float32 on the CPU.

    j is `train_index`, so a second optimizer step on the same rollout sees new noise.
    """
    return torch.stack([normal(shape, seed, "train_eps", row, rank, j) for row, j in pairs])


def row_line(n: int, lines: int, *, shuffle: bool, seed: int) -> int:
    """Line of the prompt file, from 0, that the row with running number n takes.

    File order, again and again; with `shuffle` each pass over the file has its own permutation, keyed by seed and pass.
    """
    if n < 0 or lines < 1:
        raise ValueError(f"row_line needs a running number >= 0 and at least one line, got row {n} of {lines} lines")
    epoch, position = divmod(n, lines)
    return _epoch_order(lines, seed, epoch)[position] if shuffle else position


@lru_cache(maxsize=8)
def _epoch_order(lines: int, seed: int, epoch: int) -> list[int]:
    return permutation(lines, seed, "shuffle", epoch).tolist()
