"""What the memory estimate has to know of a base of any family: its tensors, and its costs per prompt and sample."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from nftctl.profile.adapter import Modules, Shapes

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def tensor_bytes(name: str, shape: tuple[int, ...], dtype: str, fp32: str = "") -> int:
    """Size of a tensor that is held in `dtype`, or in float32 where its name starts with `fp32`."""
    return math.prod(shape) * (4 if fp32 and name.startswith(fp32) else ITEM_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A base by its parts. Sizes are bytes unless they say otherwise."""

    denoiser: Shapes
    """Tensors that are sharded and gathered."""
    fp32: str
    """Start of the names that stay float32, or empty."""
    layer: re.Pattern[str]
    """Matches the start of a layer's tensor names; what it matches is a unit of sharding, the rest go by their root."""
    encoder: int
    """The prompt encoder."""
    prompt: Callable[[str], int]
    """What is remembered of a prompt."""
    prompt_how: str
    """The same in words, with the number of prompts at {}."""
    tokens: int
    """Image tokens of a sample."""
    width: int
    """Numbers of a token."""
    layers: int
    """Layers that keep activations."""
    latent: int
    """Numbers in a latent."""
    saved: Callable[[Modules | None], int]
    """What autograd keeps of one sample, given the adapted modules; None: all weights of the denoiser are trained."""
    working: int
    """What a layer at work holds of one sample."""

    def unit(self, name: str) -> str:
        """The parameter group that a tensor of the denoiser is gathered with."""
        found = self.layer.match(name)
        return name[: found.end()] if found else name.split(".")[0]
