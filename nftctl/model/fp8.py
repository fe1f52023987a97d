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
from nftctl.model.rows import Rounded, quantise, rounded

MULTIPLE = 16
"""Both sides of a weight have to be whole multiples of this for the hardware's product."""

Quantised = tuple[Tensor, Tensor]
"""e4m3 [out, in] and its scales, float32 [out, 1]: the weight is their product."""


class RolloutLinear(nn.Linear):
    """A linear module that can also multiply by a quantised weight."""

    quantised: Quantised | None = None
    """Set only while a rollout asks for it."""

    def forward(self, x: Tensor | Rounded) -> Tensor:
        if self.quantised is not None:
            row = x if isinstance(x, Rounded) else rounded(x)
            y = product(row, *self.quantised, self.weight.dtype)
            return y if self.bias is None else y + self.bias
        if isinstance(x, Rounded):
            raise ValueError("rounded rows, and no quantised weight to multiply them by")
        return F.linear(x, self.weight, self.bias)


def product(x: Rounded, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., in] times a quantised weight [out, in], transposed -> [..., out] in `dtype`."""
    if x.values.is_cuda:
        # Accumulated in the tensor cores' own precision; scales are applied to the sum. With a scale for every row all
        # such GPUs make bfloat16, and only one generation makes float32.
        y = torch._scaled_mm(
            x.values, weight.t(), scale_a=x.scales, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype)
    else:
        y = (F.linear(x.values.float(), weight.float()) * x.scales * scale.t()).to(dtype)
    return y.view(*x.shape, -1)


def eligible(denoiser: Denoiser) -> list[nn.Linear]:
    """The linear modules of the layers that a rollout may run in FP8: no modulation, no adapter, whole tiles."""
    named = [pair for unit in denoiser.compile_units() for pair in unit.named_modules()]
    inner = [
        module
        for name, module in named
        if isinstance(module, nn.Linear) and not any(part.startswith(("norm", "lora_")) for part in name.split("."))
    ]
    return [m for m in inner if m.in_features % MULTIPLE == 0 == m.out_features % MULTIPLE]


def copy_bytes(denoiser: Denoiser) -> int:
    """What the quantised weights take beside the base: a byte for every number, and four for every row."""
    return sum(m.out_features * (m.in_features + 4) for m in eligible(denoiser))


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
        # Layers that can be handed rounded rows, which needs every one of their products to be one of these.
        self._units: list[Any] = [
            unit for unit in denoiser.compile_units() if hasattr(unit, "lowered") and self._all_of(unit)
        ]

    def _all_of(self, unit: Any) -> bool:
        adapters_apart = [m for name, m in unit.named_modules() if ".lora_" not in name]
        return all(isinstance(m, RolloutLinear) for m in adapters_apart if type(m) in (nn.Linear, RolloutLinear))

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
        for unit in (self._denoiser, *self._units):
            unit.lowered = True
        try:
            yield
        finally:
            for unit in (self._denoiser, *self._units):
                unit.lowered = False
            for module in self._modules:
                module.quantised = None
