"""The copies of a denoiser's weights: policy (trained), old (samples and anchors), reference (frozen), EMA (looked at).

Owns which copy a forward uses, how old and the EMA follow the policy, how gradients of all ranks become one, and what a
checkpoint holds. Two ways: adapters on one frozen base, whole on every rank; or all weights of the denoiser, each copy
cut over the ranks like the denoiser itself. No copy is ever made, moved or averaged by a collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nftctl.model import adapters, shard
from nftctl.model.family import Denoiser

Weights = Literal["policy", "old", "reference", "ema"]


def copies_of(denoiser: Denoiser) -> Copies:
    """The copies that the denoiser was given, or those of its adapters."""
    return denoiser.copies or AdapterCopies(denoiser)


class Copies(ABC):
    """What roles and checkpoints need of the weights, whichever way they are trained."""

    parameters: dict[str, nn.Parameter]
    """The trained policy by name, sorted; what the optimizer holds."""

    @abstractmethod
    def use(self, which: Weights) -> AbstractContextManager[None]:
        """Let forwards inside use that copy. Leave only after a backward that recomputes activations."""

    @abstractmethod
    def refresh_old(self, eta: float) -> None:
        """old = eta * old + (1 - eta) * policy; 0 is a bitwise copy."""

    @abstractmethod
    def average(self, share: float) -> None:
        """ema = share * ema + (1 - share) * policy; does nothing when no EMA is kept."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """`policy.*`, `old.*` and, where it is kept, `ema.*`: the tensors themselves."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give every tensor of `state` its value."""

    @abstractmethod
    def reduce_and_clip(self, max_norm: float) -> float:
        """Make the gradients those of all ranks, clip them; returns the norm before, the same on every rank."""

    @abstractmethod
    def stepped(self) -> None:
        """Say that the optimizer has moved the policy."""

    @abstractmethod
    def drift(self) -> tuple[float, float] | None:
        """This rank's part of two squared norms, which add up over the ranks: what the policy's weights differ by from
        the reference's, and those of the reference, of adapted modules alone. None where there is no such copy."""


class AdapterCopies(Copies):
    """Adapters on one frozen base; with all of them off it is the reference."""

    def __init__(self, denoiser: Denoiser) -> None:
        self._denoiser = denoiser
        self.parameters = adapters.policy_parameters(denoiser)
        self._saved: dict[str, Tensor] = {}
        self._base: float | None = None

    def use(self, which: Weights) -> AbstractContextManager[None]:
        return adapters.weights(self._denoiser, which)

    def refresh_old(self, eta: float) -> None:
        adapters.follow(self._denoiser, adapters.OLD, eta)

    def average(self, share: float) -> None:
        if adapters.EMA in adapters.adapter_names(self._denoiser):
            adapters.follow(self._denoiser, adapters.EMA, share)

    def state(self) -> dict[str, Tensor]:
        # Looked up once: a walk over all modules at every save would take longer than the copy of what it finds. No
        # adapter is added or replaced after this was made; the optimizer goes by the same.
        if not self._saved:
            self._saved = {
                f"{adapter}.{name}": parameter
                for adapter in adapters.adapter_names(self._denoiser)
                for name, parameter in adapters.parameters(self._denoiser, adapter).items()
            }
        return dict(self._saved)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.state().items():
            parameter.copy_(tensors[name])

    def reduce_and_clip(self, max_norm: float) -> float:
        trained = list(self.parameters.values())
        shard.reduce_gradients(trained, dist.group.WORLD)
        return float(torch.nn.utils.clip_grad_norm_(trained, max_norm))

    def stepped(self) -> None:
        # Adapters are whole on every rank: the next forward reads what the optimizer wrote.
        pass

    @torch.no_grad()
    def drift(self) -> tuple[float, float]:
        world = dist.get_world_size()
        layers = adapters.lora_layers(self._denoiser).values()
        if self._base is None:
            weights = [layer.base_layer.weight for layer in layers]
            held = (shard.holders(w) if isinstance(w, DTensor) else world for w in weights)
            self._base = sum(_square(_local(w)) / count for w, count in zip(weights, held, strict=True))
        return adapters.squared_update(self._denoiser, adapters.POLICY) / world, self._base


class FullCopies(Copies):
    """All weights of a sharded denoiser. The copy in use lies in its parameters; the others lie beside, shard by shard.

    Another copy is used by exchanging the contents, so that nothing is held twice; what was gathered is let go of,
    since it is of the copy before. Old is not exchanged while it is the policy to the bit.
    """

    def __init__(self, denoiser: Denoiser, *, old: bool, reference: bool, ema: bool) -> None:
        self._denoiser = denoiser
        shard.release(denoiser)
        self.parameters = dict(sorted(denoiser.named_parameters()))
        kept = [name for name, wanted in (("old", old), ("reference", reference), ("ema", ema)) if wanted]
        self._beside = {which: {n: _local(p).clone() for n, p in self.parameters.items()} for which in kept}
        self._same = set(kept)
        self._active: Weights = "policy"
        self._base = sum(map(_square, self._beside["reference"].values())) if reference else None

    @contextmanager
    def use(self, which: Weights) -> Iterator[None]:
        if self._active != "policy":
            raise RuntimeError(f"{which} was asked for while {self._active} is in use")
        if which == "policy" or which in self._same:
            yield
            return
        self._exchange(which)
        self._active = which
        try:
            yield
        finally:
            self._exchange(which)
            self._active = "policy"

    @torch.no_grad()
    def _exchange(self, which: Weights) -> None:
        if which not in self._beside:
            raise RuntimeError(f"this run keeps no copy {which!r}")
        shard.release(self._denoiser)
        for name, parameter in self.parameters.items():
            here, beside = _local(parameter), self._beside[which][name]
            before = here.clone()
            here.copy_(beside)
            beside.copy_(before)

    def refresh_old(self, eta: float) -> None:
        self._follow("old", eta)

    def average(self, share: float) -> None:
        if "ema" in self._beside:
            self._follow("ema", share)

    @torch.no_grad()
    def _follow(self, which: str, kept: float) -> None:
        if kept == 0.0:
            self._same.add(which)
        for name, beside in self._beside[which].items():
            policy = _local(self.parameters[name])
            if kept == 0.0:
                beside.copy_(policy)
            else:
                beside.mul_(kept).add_(policy, alpha=1.0 - kept)

    def state(self) -> dict[str, Tensor]:
        shard.release(self._denoiser)
        saved: dict[str, Tensor] = {f"policy.{name}": p for name, p in self.parameters.items()}
        for which in ("old", "ema"):
            for name, beside in self._beside.get(which, {}).items():
                saved[f"{which}.{name}"] = _like(self.parameters[name], beside)
        return saved

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        shard.release(self._denoiser)
        for name, parameter in self.parameters.items():
            _local(parameter).copy_(_local(tensors[f"policy.{name}"]))
            for which in ("old", "ema"):
                if which in self._beside:
                    self._beside[which][name].copy_(_local(tensors[f"{which}.{name}"]))
        # Whether they are the policy is known to the counters, not to the tensors; an exchange too many does no harm.
        self._same.clear()

    def reduce_and_clip(self, max_norm: float) -> float:
        # The backward has scattered the sums already.
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def stepped(self) -> None:
        # Gathered weights are those before the step, and would go on being used in silence.
        shard.release(self._denoiser)
        self._same.clear()

    @torch.no_grad()
    def drift(self) -> tuple[float, float] | None:
        if self._base is None:
            return None
        shard.release(self._denoiser)
        beside = self._beside["reference"]
        # One tensor at a time: all differences together would be another copy of the weights.
        gaps = [torch.linalg.vector_norm(_local(p) - beside[name]) for name, p in self.parameters.items()]
        return float(torch.stack(gaps).to("cpu", torch.float64).square().sum()), self._base


def _square(weight: Tensor) -> float:
    """Squared norm in float64, so that it is the same however the weights are cut."""
    return float(torch.linalg.vector_norm(weight, dtype=torch.float64).square())


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, with its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    made = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=cast(tuple[int, ...], parameter.stride()),
    )
    return made
