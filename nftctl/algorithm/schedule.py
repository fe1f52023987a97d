"""Schedules: the sampler's sigmas, the law of training timesteps, the old policy's share, the learning rate.

Everything is a pure function of its arguments. The sigmas are read from diffusers' scheduler, never recomputed, so that
a grid draw is one of the rollout's own times. Refuses a time interval that leaves nothing to draw from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor

from nftctl.algorithm import draws

OldDecay = Literal["copy", "linear", "delayed", "constant"]
TimestepSource = Literal["continuous", "grid"]

TIME_FLOOR = 1e-3
"""Continuous times stay this far from 0 and from 1: at 0 the target is unreachable, at 1 the input holds no image."""


def unipc(steps: int, shift: float) -> UniPCMultistepScheduler:
    """A fresh UniPC solver (order 2, bh2, x0 form, last sigma 0) over `steps` shifted flow sigmas.

    sigma = shift u / (1 + (shift - 1) u) at u = linspace(1, 1/1000, steps + 1)[:-1], then 0.
    """
    scheduler: UniPCMultistepScheduler = UniPCMultistepScheduler(
        num_train_timesteps=1000,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        solver_order=2,
        solver_type="bh2",
        predict_x0=True,
        lower_order_final=True,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(steps)
    return scheduler


@lru_cache(maxsize=32)
def solver_weights(steps: int, shift: float) -> Tensor:
    """The state after each step as a sum of what went in: float64 [steps, 1 + steps], noise first, then velocities.

    UniPC is linear in both, so its weights are what it makes of unit vectors: diffusers' solver is run once on those.
    """
    scheduler = unipc(steps, shift)
    # Starting at a given index also spares the solver a search through its integer timesteps.
    scheduler.set_begin_index(0)
    units = torch.eye(steps + 1, dtype=torch.float64)[:, None]
    x, rows = units[0], []
    for unit, timestep in zip(units[1:], scheduler.timesteps, strict=True):
        x = scheduler.step(unit, timestep, x, return_dict=False)[0]
        rows.append(x[0])
    return torch.stack(rows)


@lru_cache(maxsize=32)
def _sigmas(steps: int, shift: float) -> tuple[float, ...]:
    return tuple(unipc(steps, shift).sigmas.tolist())


def sigmas(steps: int, shift: float) -> list[float]:
    """The steps + 1 sigmas of a rollout, falling, the last one 0; float32 values."""
    return list(_sigmas(steps, shift))


def shift_time(u: Tensor, shift: float) -> Tensor:
    """Warp times towards noise: shift u / (1 + (shift - 1) u)."""
    return shift * u / (1 + (shift - 1) * u)


def draw_timesteps(
    *,
    seed: int,
    row: int,
    rank: int,
    update: int,
    count: int,
    source: TimestepSource,
    uniform_law: bool,
    shift: float,
    t_range: Sequence[float],
    grid: Sequence[float],
) -> Tensor:
    """Training times of one sample in one optimizer step: [count] float32 on the CPU, in (0, 1).

    `continuous`: the logistic of a standard normal, warped by `shift` (with `uniform_law`: uniform, not warped),
    conditioned on `t_range` and kept `TIME_FLOOR` away from both ends. `grid`: entries of `grid` (the rollout's sigmas,
    a last 0 is ignored) inside `t_range`, without replacement within the optimizer step. Row is the running number.
    """
    low, high = t_range
    if source == "grid":
        times = [sigma for sigma in grid if sigma > 0 and low <= sigma <= high]
        if count > len(times):
            raise ValueError(
                f"{count} training timesteps without replacement, but the grid has {len(times)} in [{low}, {high}]"
            )
        picks = draws.permutation(len(times), seed, "train_t", row, rank, update)[:count]
        return torch.tensor(times, dtype=torch.float32)[picks]
    bottom, top = max(low, TIME_FLOOR), min(high, 1 - TIME_FLOOR)
    if bottom >= top:
        raise ValueError(
            f"no training time is left in [{low}, {high}] once both ends are kept {TIME_FLOOR} away from 0 and 1"
        )
    u = torch.cat(
        [draws.uniform((1,), seed, "train_t", row, rank, draws.train_index(update, count, k)) for k in range(count)]
    )
    times_f64 = low + (high - low) * u if uniform_law else _logit_normal(u, shift, low, high)
    return times_f64.clamp(bottom, top).to(torch.float32)


def _logit_normal(u: Tensor, shift: float, low: float, high: float) -> Tensor:
    """Quantile u of the shifted logit-normal law conditioned on [low, high]; one uniform per draw, no rejection."""
    ends = torch.tensor([low, high], dtype=torch.float64)
    edges = torch.special.ndtr(torch.logit(ends / (shift - (shift - 1) * ends)))
    z = torch.special.ndtri(edges[0] + (edges[1] - edges[0]) * u)
    return shift_time(torch.sigmoid(z), shift)


def ema_share(decay: float, step: int) -> float:
    """Share of the policy EMA kept at optimizer step `step` (from 1): min((1 + step) / (10 + step), decay)."""
    return min((1 + step) / (10 + step), decay)


def old_share(decay: OldDecay, i: int, constant: float = 0.0) -> float:
    """Share of the old weights that a refresh keeps, after i optimizer steps (this one included)."""
    match decay:
        case "copy":
            return 0.0
        case "linear":
            return min(0.001 * i, 0.5)
        case "delayed":
            return 0.0 if i < 75 else min(0.0075 * (i - 75), 0.999)
        case "constant":
            return constant
    raise ValueError(f"unknown decay of the old policy: {decay!r}")


def learning_rate(base: float, warmup_steps: int, done: int) -> float:
    """Rate of the next optimizer step when `done` are complete: rises linearly to `base` at step `warmup_steps`."""
    return base * min(1.0, (done + 1) / warmup_steps) if warmup_steps else base
