"""The rollout's solver and guidance: noise and a velocity in, final latents out.

Owns the loop around diffusers' UniPC and the native guidance formula. The velocity is asked at float32 sigmas, never
at the scheduler's integer timesteps. Refuses latents without a channel dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nftctl.algorithm.schedule import sigmas, solver_weights
from nftctl.staging import send

Conditioning = TypeVar("Conditioning")
Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...] float32, sigma [B] float32 in [0, 1]) -> velocity noise - x0, float32, shaped like x."""


@torch.no_grad()
def sample(
    velocity: Velocity, noise: Tensor, *, steps: int, shift: float, clamp: tuple[float, float] | None = None
) -> Tensor:
    """Integrate from noise [B, C, ...] to x0 of the same shape, one velocity call per step.

    Every state is a sum of the noise and the velocities so far, by the solver's own weights: one product a step, in
    which nothing waits for the device. Under no_grad and not inference_mode: weights gathered in there would refuse a
    later backward.
    """
    if noise.ndim < 2:
        raise ValueError(f"sample needs latents of shape [B, C, ...], got {tuple(noise.shape)}")
    weights = send(solver_weights(steps, shift).to(noise.dtype), noise.device)
    at = send(torch.tensor(sigmas(steps, shift)[:-1]), noise.device)[:, None].expand(steps, len(noise)).contiguous()
    # The noise, then every velocity.
    parts = torch.empty(steps + 1, noise.numel(), dtype=noise.dtype, device=noise.device)
    parts[0] = noise.flatten()
    x = noise
    for step in range(steps):
        parts[step + 1] = velocity(x, at[step]).flatten()
        x = (weights[step, : step + 2] @ parts[: step + 2]).view_as(noise)
    return x if clamp is None else x.clamp(*clamp)


def guided_velocity(
    denoise: Callable[[Tensor, Tensor, Conditioning], Tensor],
    cond: Conditioning,
    uncond: Conditioning | None,
    guidance: float,
    *,
    merge: Callable[[Sequence[Conditioning]], Conditioning],
) -> Velocity:
    """v_uncond + guidance (v_cond - v_uncond) as a function of (x, sigma).

    `cond` and `uncond` are batched for the B rows of x. Guidance 1 runs the conditional branch alone and 0 the
    unconditional one (0 does not mean "off"); anything else runs both as one call of 2B rows, unconditional rows first,
    under `merge([uncond, cond])`, which is built once.
    """
    if guidance == 1:
        return lambda x, sigma: denoise(x, sigma, cond)
    if uncond is None:
        raise ValueError(f"guidance {guidance} needs the unconditional branch")
    negative = uncond
    if guidance == 0:
        return lambda x, sigma: denoise(x, sigma, negative)
    both = merge([negative, cond])

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        v_uncond, v_cond = denoise(torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return v_uncond + guidance * (v_cond - v_uncond)

    return velocity
