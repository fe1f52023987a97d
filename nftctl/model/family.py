"""What a model family has to supply: a prompt encoder, a denoiser and a decoder, in rectified-flow coordinates.

Owns the protocol only. x_t = (1 - sigma) x0 + sigma eps and v = eps - x0 everywhere; timestep scale, sign and packing
stay inside a family, while guidance, sampling, noising and loss stay outside it. Refuses nothing by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from nftctl.model.copies import Copies
    from nftctl.model.decoder import Decoded
    from nftctl.model.recorded import Recorder
    from nftctl.model.shard import Sharding
    from nftctl.model.weights import StoredWeights


class Conditioning(ABC):
    """What a denoiser reads of one prompt, or of the prompts of a batch; opaque outside its family."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Prompts held."""

    @property
    @abstractmethod
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens that the denoiser reads of each row."""

    @classmethod
    @abstractmethod
    def batch(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the rows of `parts` in order, padded to the longest, padding masked exactly."""


class PromptEncoder(Protocol):
    """Frozen map from prompts to conditioning; every unique prompt is encoded once and then remembered."""

    @property
    def encoded(self) -> int:
        """Prompts really encoded so far; a remembered prompt does not count."""
        ...

    @property
    def visits(self) -> int:
        """Times that the encoder's weights had to be on the device for it."""
        ...

    @property
    def needs_room(self) -> bool:
        """Whether a visit takes as much of the device as all of the weights: the gathered base then has to go."""
        ...

    def check(self, prompt: str, *, negative: bool = False) -> None:
        """Refuse, with ProfileRefused, a prompt that cannot be encoded; encodes nothing."""
        ...

    def visit(self) -> AbstractContextManager[None]:
        """Calls of `encode` inside are one visit; the weights come with the first prompt that has to be encoded."""
        ...

    def encode(
        self, prompts: Sequence[str], *, negative: bool = False, ahead: Sequence[str] = ()
    ) -> list[Conditioning]:
        """Return one single-row conditioning per prompt. `negative` marks prompts of the unconditional branch.

        `ahead` are prompts that will be asked for next: what is encoded of them now costs no visit then.
        """
        ...


Reading = tuple[Tensor | int | None, ...]
"""What the layers read of a batch's prompts and places, laid out flat."""


class Denoiser(nn.Module, ABC):
    """The adapted, sharded and compiled part: (x_t, sigma, prompt) -> v.

    Module names are those of the diffusers transformer, so that adapters load upstream.
    """

    forwards: int = 0
    """Rows denoised so far, all weights and grad modes together."""
    encoder_modules: frozenset[str] = frozenset()
    """Linear modules of the same checkpoint that live in the prompt encoder, by their diffusers names."""
    open_dims: ClassVar[Mapping[tuple[int, ...], int]] = {}
    """Of a layer's forward: place of a tensor among the arguments, (2,) or, in a tuple, (2, 0) -> dimension whose size
    changes with the prompts."""
    fp32_modules: tuple[str, ...] = ()
    """Sharding units that compute in float32 whatever the precision of the rest is."""
    gradient_checkpointing: bool = False
    """Whether the backward recomputes each layer from its input instead of keeping what the layer left."""
    sharding: Sharding | None = None
    """Set by `shard.shard_denoiser`; None while the weights are whole."""
    copies: Copies | None = None
    """Set where all weights are trained; None: the copies are the adapters (see `copies.copies_of`)."""

    recorder: Recorder | None = None
    """Set where forwards with whole weights are recorded and played."""
    copy_in_use: str = "policy"
    """The copy of the weights that forwards use now."""
    lowered: bool = False
    """Whether forwards multiply in FP8 now."""

    def forward(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return v [B, C, T, H, W] float32 from x of that shape and sigma [B] float32 in [0, 1]."""
        self.check(x, sigma, conditioning)
        self.forwards += x.shape[0]
        if self.recorder is not None and self._whole:
            return self.recorder.velocity(x, sigma, conditioning)
        return self.velocity(x, sigma, self.reading(x, conditioning) or ())

    @abstractmethod
    def check(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> None:
        """Raise ValueError for shapes that do not belong together."""

    @abstractmethod
    def reading(self, x: Tensor, conditioning: Conditioning, *, fixed: bool = False) -> Reading | None:
        """What the layers read beside x; computed once for a conditioning and a shape of x.

        `fixed` has batches of one number of rows share few shapes, whatever their prompts are; None where it cannot.
        """

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, reading: Reading) -> Tensor:
        """The work of `forward`: nothing in it depends on a tensor's contents but through kernels."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs) if self._whole else super().__call__(*args, **kwargs)

    @property
    def _whole(self) -> bool:
        return self.sharding is not None and self.sharding.whole

    def call(self, module: nn.Module, *inputs: Any) -> Any:
        """A submodule's output, without what sharding hooks around it where the weights are whole and frozen.

        Those hooks then have nothing to do, and take a fifth of the time of a small image's rollout.
        """
        return module.forward(*inputs) if self._whole else module(*inputs)

    def run(self, layer: nn.Module, *inputs: Any) -> Any:
        """A layer's output. What the layer depends on must be unchanged at the backward, which may run it again."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            # No layer draws random numbers, so there is no generator to restore.
            call = layer.forward if self._whole else layer
            return checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.call(layer, *inputs)

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers of a token."""

    @abstractmethod
    def tokens(self, latent_shape: tuple[int, int, int, int]) -> int:
        """Image tokens of a latent (C, T, H, W)."""

    @abstractmethod
    def shard_units(self) -> list[nn.Module]:
        """Submodules that get a parameter group of their own, in the order in which forward runs them."""

    @abstractmethod
    def compile_units(self) -> list[nn.Module]:
        """The layers: submodules of one kind that hold nearly all of the work."""


class Decoder(Protocol):
    """Frozen map from latents to pixels."""

    def begin(self, x0: Tensor) -> Decoded:
        """Start making images of x0 [B, C, T, h, w]; waits for no device."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """Return uint8 [B, T, H, W, 3] on the CPU; raises TrainingFailed where a number is not finite."""
        ...


@dataclass(frozen=True)
class LoadReport:
    """What came from the checkpoint: tensors loaded of those expected, and those left at their seeded start."""

    loaded: int
    expected: int
    initialised: tuple[str, ...] = ()


@dataclass
class Family:
    """A loaded base model."""

    name: str
    encoder: PromptEncoder
    denoiser: Denoiser
    decoder: Decoder
    latent_shape: tuple[int, int, int, int]
    """(C, T, H, W) of one sample."""
    clamp_x0: bool
    """Whether the final latent is clamped to [-1, 1] before decode and training: latents that are pixels."""
    lora_prefix: str
    """Component name before each module name in an exported adapter."""
    report: LoadReport = field(default_factory=lambda: LoadReport(0, 0))
    stored: StoredWeights | None = None
    """Where the denoiser's parameters are to be read from, when they were left on the meta device."""

    def batch(self, conds: Sequence[Conditioning]) -> Conditioning:
        """Join single- or many-row conditionings into one batch, in order."""
        if not conds:
            raise ValueError("a batch needs at least one conditioning")
        return type(conds[0]).batch(conds)

    def noise_shape(self, rows: int) -> torch.Size:
        """Shape [rows, C, T, H, W] of a batch of latents."""
        return torch.Size((rows, *self.latent_shape))
