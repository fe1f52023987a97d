"""From rewards to optimality: group-relative advantages of one reward or of several, clamp, maps, and statistics.

A group is one row: the samples of one prompt, one per rank. Everything is float64 on the CPU. Dropped rows are excluded
from every mean and spread; refuses a kept reward that is not finite and a step of which nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from nftctl.errors import TrainingFailed

STD_FLOOR = 1e-4
"""Added to the spread that divides."""
ZERO_SPREAD = 1e-8
"""A group whose spread is below this share of max(1, |mean|) is constant: what differs is rounding, not quality."""
UNIT_FLOOR = 1e-6
"""Smallest spread that a reward is scaled up from when it is brought to unit spread."""


def zero_spread(rewards: Tensor) -> Tensor:
    """Rows of [rows, ranks] whose rewards are all alike: bool [rows]."""
    scale = rewards.mean(dim=1).abs().clamp_min(1.0)
    return rewards.std(dim=1, correction=0) < ZERO_SPREAD * scale


def advantages(rewards: Tensor, kept: Tensor, std: Literal["group", "global"] = "group") -> Tensor:
    """(R - mean of the row) / (spread + 1e-4), float64 [rows, ranks]; exactly 0 in constant and in dropped rows.

    Args:
        rewards: float64 [rows, ranks]; values of dropped rows are never read.
        kept: bool [rows], false where the group was dropped.
        std: population spread of the row, or of all kept samples of the step (the mean stays the row's).
    """
    scored = _scored(rewards, kept)
    centred = scored - scored.mean(dim=1, keepdim=True)
    spread = scored.std(correction=0) if std == "global" else scored.std(dim=1, correction=0, keepdim=True)
    result = torch.zeros_like(rewards, dtype=torch.float64)
    result[kept] = torch.where(zero_spread(scored)[:, None], 0.0, centred / (spread + STD_FLOOR))
    return result


def gdpo(scores: Tensor, weights: Sequence[float], kept: Tensor) -> Tensor:
    """Advantages of several rewards of unlike scale, float64 [rows, ranks].

    Each score is brought to zero mean and unit spread within its row, (s - mean) / max(spread, 1e-6), then they are
    weighed and added, and the sums are brought to zero mean and unit spread over all kept samples. A score that is
    constant in a row adds exactly 0 there. Rows in which all are constant, and dropped rows, are exactly 0.

    Args:
        scores: float64 [providers, rows, ranks]; values of dropped rows are never read.
        weights: one per provider; 0 leaves it out.
        kept: bool [rows], false where the group was dropped.
    """
    total = torch.zeros_like(scores[0][kept], dtype=torch.float64)
    silent = torch.ones(total.shape[0], dtype=torch.bool)
    for score, weight in zip(scores, weights, strict=True):
        if weight == 0:
            continue
        scored = _scored(score, kept)
        flat = zero_spread(scored)
        spread = scored.std(dim=1, correction=0, keepdim=True).clamp_min(UNIT_FLOOR)
        total += weight * torch.where(flat[:, None], 0.0, (scored - scored.mean(dim=1, keepdim=True)) / spread)
        silent &= flat
    result = torch.zeros_like(scores[0], dtype=torch.float64)
    spread = total.std(correction=0)
    if spread >= ZERO_SPREAD:
        result[kept] = torch.where(silent[:, None], 0.0, (total - total.mean()) / spread.clamp_min(UNIT_FLOOR))
    return result


def _scored(rewards: Tensor, kept: Tensor) -> Tensor:
    """The kept rows in float64, checked."""
    scored = rewards[kept].to(torch.float64)
    if scored.numel() == 0:
        raise TrainingFailed("no group of this step has rewards, so there is nothing to train on")
    if not torch.isfinite(scored).all():
        raise TrainingFailed("a reward is not a finite number")
    return scored


def clamp(advantage: Tensor, low: float, high: float) -> Tensor:
    """Advantages held to [low, high]."""
    return advantage.clamp(low, high)


def optimality(clamped: Tensor, r_map: Literal["linear", "sigmoid"], *, tau: float, high: float) -> Tensor:
    """Clamped advantage to r in [0, 1]; 0 always becomes 1/2.

    linear: clip(a / (2 high) + 1/2, 0, 1), whatever the lower bound is, so that 0 stays at 1/2 under uneven bounds.
    sigmoid: 1 / (1 + exp(-a / tau)).
    """
    if r_map == "linear":
        return (clamped / (2 * high) + 0.5).clamp(0.0, 1.0)
    return torch.sigmoid(clamped / tau)


def statistics(
    rewards: Tensor, kept: Tensor, advantage: Tensor, r: Tensor, *, low: float, high: float
) -> dict[str, float]:
    """The step's reward-side metrics over kept samples, equal weight each, by their names in a metrics row.

    `advantage` is unclamped; its mean is taken after the clamp, and the clamped shares count those outside the bounds.
    Groups without spread are those of which every advantage is exactly 0.
    """
    scored, raw = _scored(rewards, kept), advantage[kept]
    return {
        "train/reward_mean": scored.mean().item(),
        "train/advantage_mean": clamp(raw, low, high).mean().item(),
        "train/advantage_clamped_low": (raw < low).to(torch.float64).mean().item(),
        "train/advantage_clamped_high": (raw > high).to(torch.float64).mean().item(),
        "train/optimality_mean": r[kept].mean().item(),
        "train/optimality_second_moment": r[kept].square().mean().item(),
        "reward/std": scored.std(correction=0).item(),
        "reward/group_std": scored.std(dim=1, correction=0).mean().item(),
        "reward/zero_spread_groups": float((raw == 0).all(dim=1).sum().item()),
        "reward/dropped_groups": float((~kept).sum().item()),
    }
