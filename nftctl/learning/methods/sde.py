"""The stochastic sampler of Flow-GRPO as formulas: mean, spread and log-probability of a step, and a penalty.

In the product's coordinates, x_t = (1 - t) x0 + t eps and v = eps - x0, a step goes from t to a smaller t' with
dt = t' - t < 0:

    sigma_t = a sqrt(t / (1 - t))
    x_t' = x_t + [v + sigma_t^2 / (2 t) (x_t + (1 - t) v)] dt + sigma_t sqrt(-dt) eps

which leaves at every t the distribution that the plain flow, a = 0, has there. At t = 1, and nearer to it than a
training time may come, sigma_t has no value to work with: there t' stands in its denominator. A step that ends at
t' = 0 makes the image and takes no noise. Steps are Euler's; the one from t = 1 has a variance too large by a^4 / 4
whatever the grid is, most of which the later ones take away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nftctl.algorithm.schedule import TIME_FLOOR


@dataclass(frozen=True, slots=True)
class SdeStep:
    """One step of the grid: from `t` to `to`, with the spread `std` of what it adds, and mean = x (1 + keep) + v move.

    keep    sigma_t^2 dt / (2 t)
    move    (1 + sigma_t^2 (1 - t) / (2 t)) dt
    """

    t: float
    to: float
    std: float
    keep: float
    move: float

    def mean(self, x: Tensor, v: Tensor) -> Tensor:
        """Where the step leads without its noise."""
        return x * (1 + self.keep) + v * self.move


def sde_steps(sigmas: Sequence[float], a: float) -> list[SdeStep]:
    """The steps of a falling grid that ends with 0, at noise level `a`."""
    if a < 0 or len(sigmas) < 3 or sigmas[-1] != 0:
        raise ValueError(f"a grid has at least two steps and ends with 0, and a >= 0, got {sigmas} and a {a}")
    return [_step(t, to, a) for t, to in pairwise(sigmas)]


def _step(t: float, to: float, a: float) -> SdeStep:
    dt = to - t
    if to == 0:
        return SdeStep(t, to, std=0.0, keep=0.0, move=dt)
    square = a * a * t / (1 - (to if t > 1 - TIME_FLOOR else t))
    std = math.sqrt(square * -dt)
    return SdeStep(t, to, std=std, keep=square * dt / (2 * t), move=(1 + square * (1 - t) / (2 * t)) * dt)


def log_probability(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density [B] of x [B, ...] under independent normals of that mean, and of the spread [B] of each sample."""
    spread = std.view(-1, *[1] * (x.ndim - 1))
    terms = -((x - mean) ** 2) / (2 * spread**2) - spread.log() - 0.5 * math.log(2 * math.pi)
    return terms.flatten(1).sum(dim=1)


def divergence(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    """KL divergence [B] of two normals of one spread [B]: |mean - other|^2 / (2 std^2), summed over dimensions."""
    return (mean - other).square().flatten(1).sum(dim=1) / (2 * std**2)


def clipped_objective(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """min(ratio A, clip(ratio, 1 - clip, 1 + clip) A), to be maximised: [B]."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
