"""Rollouts in FP8: the linear modules of the layers as e4m3 products, weights scaled per row, activations per token.

Owns the quantised weights and for how long forwards use them. Training, old and reference velocities, evaluation,
norms, modulation, embedders, adapters and the output layer stay in the base's precision. On a GPU the product is the
hardware's; elsewhere the same rounded numbers are multiplied in float32, which says what FP8 does to samples and not
what it saves. Refuses GPUs that have no such product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nftctl.errors import EnvironmentUnfit
from nftctl.model import shard
from nftctl.model.family import Denoiser

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite e4m3 number."""
MULTIPLE = 16
"""Both sides of a weight have to be whole multiples of this for the hardware's product."""

Quantised = tuple[Tensor, Tensor]
"""e4m3 [out, in] and its scales, float32 [out, 1]: the weight is their product."""


class RolloutLinear(nn.Linear):
    """A linear module that can also multiply by a quantised weight."""

    quantised: Quantised | None = None
    """Set only while a rollout asks for it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.quantised is None:
            return F.linear(x, self.weight, self.bias)
        y = product(x, *self.quantised)
        return y if self.bias is None else y + self.bias


def quantise(x: Tensor) -> Quantised:
    """Round each row of x [rows, n] to e4m3 after scaling its largest magnitude to 448; a row of zeros stays zeros."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [..., in] in any float precision times a quantised weight [out, in], transposed -> [..., out] in x's."""
    rounded, rows = quantise(x.flatten(0, -2))
    if x.is_cuda:
        # Accumulated in the tensor cores' own precision; scales are applied to the sum.
        y = torch._scaled_mm(
            rounded, weight.t(), scale_a=rows, scale_b=scale.t(), out_dtype=x.dtype, use_fast_accum=True
        )
    else:
        y = (F.linear(rounded.float(), weight.float()) * rows * scale.t()).to(x.dtype)
    return y.view(*x.shape[:-1], -1)


def eligible(denoiser: Denoiser) -> list[nn.Linear]:
    """The linear modules of the layers that a rollout may run in FP8: no modulation, no adapter, whole tiles."""
    named = [pair for unit in denoiser.compile_units() for pair in unit.named_modules()]
    inner = [
        module
        for name, module in named
        if isinstance(module, nn.Linear) and not any(part.startswith(("norm", "lora_")) for part in name.split("."))
    ]
    return [m for m in inner if m.in_features % MULTIPLE == 0 == m.out_features % MULTIPLE]


class Fp8Rollout:
    """The quantised weights of a denoiser. To be made before its layers are compiled."""

    def __init__(self, denoiser: Denoiser, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise EnvironmentUnfit(
                f"rl.rollout_precision is fp8, which {torch.cuda.get_device_name(device)} cannot multiply in",
                hint="set rl.rollout_precision to base, or use GPUs of compute capability 8.9 or later",
            )
        self._denoiser = denoiser
        self._modules: list[Any] = list(eligible(denoiser))
        for module in self._modules:
            module.__class__ = RolloutLinear
        self._weights: list[Quantised] = []

    @property
    def modules(self) -> int:
        """How many linear modules it multiplies."""
        return len(self._modules)

    @contextmanager
    @torch.no_grad()
    def use(self) -> Iterator[None]:
        """Forwards inside multiply in FP8. The base has to be whole on this rank (`shard.gather`)."""
        if not self._weights or not shard.is_frozen(self._denoiser):
            # A frozen base is quantised once; one that is trained has moved since.
            self._weights = [quantise(module.weight) for module in self._modules]
        for module, weight in zip(self._modules, self._weights, strict=True):
            module.quantised = weight
        self._denoiser.lowered = True
        try:
            yield
        finally:
            self._denoiser.lowered = False
            for module in self._modules:
                module.quantised = None
