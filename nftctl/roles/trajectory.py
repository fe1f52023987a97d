"""Source rows, sampling settings, and what one rank knows about one sample, filled in stage by stage.

A trajectory never leaves the process that made it. Imports no torch, since the driver reads these types too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from nftctl.profile.prompts import Prompt

if TYPE_CHECKING:
    import torch

    from nftctl.algorithm.image_statistics import ImageLook
    from nftctl.model.family import Conditioning


Weights = Literal["policy", "old", "reference", "ema"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to denoise: steps, shift and guidance of one call."""

    steps: int
    shift: float
    guidance: float


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source row of a step, the same on every rank.

    Example: SourceRow(number=6, line=2, prompt=Prompt("a red seven", ...)) is the 7th row consumed since the run's
    birth, and line 3 of the prompt file.
    """

    number: int
    line: int
    prompt: Prompt


@dataclass(slots=True)
class Trajectory:
    """One sample of one source row on this rank.

    tick          value of the seed clock that drew its noise
    x0            the sampler's final latent, float32 [C, T, H, W]
    image         uint8 [T, H, W, 3] on the CPU; None until it has come from the device, and once it is sent, unless the
                  step's samples are to be shown
    look          what stays of the image when it is sent
    reward        weighted sum over providers; None until scored, and for ever when scoring failed
    components    raw scores by provider, and their parts by `provider/part`
    failures      what went wrong, by provider
    latency_s     seconds from submission to the provider's score
    """

    row: SourceRow
    tick: int
    x0: torch.Tensor
    conditioning: Conditioning
    image: torch.Tensor | None
    look: ImageLook | None = None
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    optimality: float = 0.5
