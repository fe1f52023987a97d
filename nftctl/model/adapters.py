"""The LoRA pair `policy` and `old` on one frozen base, by peft; adapters off is the reference.

Both are float32 whatever the base is, and compute in the base's precision. Owns which of the three a forward uses and
how old follows policy. Policy always requires gradients and old never does, whichever is active. Refuses targets that
match nothing, and any that matches in the prompt encoder, whose cached keys and values an adapter would make stale.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from nftctl.errors import Finding, ProfileRefused
from nftctl.model.family import Denoiser
from nftctl.model.rows import Rounded
from nftctl.profile.schema import Lora
from nftctl.profile.targets import malformed, matched, selects

POLICY, OLD, EMA = "policy", "old", "ema"
Weights = Literal["policy", "old", "reference", "ema"]


def lora_config(lora: Lora, modules: Sequence[str]) -> LoraConfig:
    """The adapter's peft configuration for modules by their names: peft reads no pattern of ours."""
    names: Any = list(modules)
    alpha: Any = lora.alpha
    config = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0)
    config._register_custom_module({nn.Linear: AdaptedLinear})
    return config


class AdaptedLinear(Linear):  # type: ignore[misc]
    """peft's layer with one active adapter, computed in the precision of its input.

    peft goes through float32 whenever the adapter is float32: on a bfloat16 base that is a float32 copy of every
    activation, and a tenth of a rollout's time on top.
    """

    ready: tuple[Tensor, Tensor] | None = None
    """A and B of the active adapter in the base's precision, for as long as `weights` says that nothing moves them."""

    def forward(self, x: Tensor | Rounded, *_: Any, **__: Any) -> Tensor:
        result: Tensor = self.base_layer(x)
        if not self.adapts:
            return result
        exact, down = unrounded(x), self.pair[0]
        return self.raised(result, nn.functional.linear(exact, down.to(exact.dtype)))

    def raised(self, result: Tensor, low: Tensor) -> Tensor:
        """The base's answer [..., out] and the adapter's, of which `low` [..., rank] is the first product."""
        return result + nn.functional.linear(low, self.pair[1].to(low.dtype)) * self.scaling[self._active_adapter[0]]

    @property
    def adapts(self) -> bool:
        """Whether an adapter is on."""
        return not self._disable_adapters

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of the active adapter."""
        if self.ready is not None:
            return self.ready
        name: Any = self._active_adapter[0]
        down: Any = self.lora_A[name].weight
        up: Any = self.lora_B[name].weight
        return down, up


def unrounded(x: Tensor | Rounded) -> Tensor:
    """Of rounded rows those before they were rounded; raises ValueError where they were not kept."""
    if isinstance(x, Tensor):
        return x
    if x.exact is None:
        raise ValueError("an adapter reads rows of which only the rounded ones were kept")
    return x.exact


def reads_exact(*modules: nn.Module) -> bool:
    """Whether one of these has an adapter on, which reads its rows unrounded."""
    return any(isinstance(module, AdaptedLinear) and module.adapts for module in modules)


def together(x: Tensor | Rounded, *modules: nn.Module) -> list[Tensor]:
    """What each of several linear modules makes of x [..., in], one by one as far as results go.

    Adapters whose matrices nothing moves now (`ready`) read x once for all of them: a product with so few columns takes
    as long as reading it.
    """
    waits = [isinstance(module, AdaptedLinear) and module.adapts and module.ready is not None for module in modules]
    if sum(waits) < 2:
        return [module(x) for module in modules]
    adapted = cast("list[AdaptedLinear]", [module for module, wait in zip(modules, waits, strict=True) if wait])
    downs = [module.pair[0] for module in adapted]
    lows = iter(nn.functional.linear(unrounded(x), torch.cat(downs)).split([len(down) for down in downs], dim=-1))
    return [
        cast(AdaptedLinear, module).raised(cast(Any, module).base_layer(x), next(lows)) if wait else module(x)
        for module, wait in zip(modules, waits, strict=True)
    ]


def match_targets(denoiser: Denoiser, targets: list[str]) -> list[str]:
    """Names of the linear modules that the targets select; raises ProfileRefused for any that may not be one."""
    linear = [name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear)]
    findings = [f for target in targets if (f := _judge(target, linear, denoiser.encoder_modules)) is not None]
    if not targets:
        findings = [_finding("lora-matches-nothing", "there are no targets", linear)]
    if findings:
        raise ProfileRefused(findings)
    return [name for name in linear if any(selects(target, name) for target in targets)]


def _judge(target: str, linear: list[str], encoder: frozenset[str]) -> Finding | None:
    if reason := malformed(target):
        return _finding("lora-pattern", f"{target!r} is no regular expression: {reason}", linear)
    if touched := sorted(name for name in encoder if selects(target, name)):
        text = f"{target!r} selects {touched[0]} of the prompt encoder, whose output is computed once and kept"
        return _finding("lora-touches-prompt-encoder", text, linear)
    if not any(selects(target, name) for name in linear):
        return _finding("lora-matches-nothing", f"{target!r} selects no linear module of the denoiser", linear)
    return None


def _finding(code: str, message: str, linear: list[str]) -> Finding:
    leaves = sorted({name.rpartition(".")[2] for name in linear})
    return Finding(code, "model.lora.targets", message, help=f"the denoiser has {', '.join(leaves)}")


def add_adapters(denoiser: Denoiser, lora: Lora, *, seed: int, ema: bool = False) -> None:
    """Inject `policy` and its exact copies `old` and, if asked for, `ema`; freeze the base; leave `policy` active.

    A is drawn from (seed, module name) alone: N(0, 1/rank) for `gaussian`, U(-1/sqrt(n), 1/sqrt(n)) for `kaiming`.
    """
    if lora_layers(denoiser):
        raise ValueError("the denoiser already has its adapters")
    names = match_targets(denoiser, lora.targets)
    denoiser.requires_grad_(False)
    config, wanted = lora_config(lora, names), (POLICY, OLD, EMA) if ema else (POLICY, OLD)
    # peft initialises from the global generator, and says at the second adapter that there is a first.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for adapter in wanted:
            inject_adapter_in_model(config, denoiser, adapter_name=adapter)
    layers = lora_layers(denoiser)
    if sorted(layers) != sorted(names):
        raise RuntimeError(f"peft adapted {sorted(layers)}, asked for {sorted(names)}")
    for name, layer in layers.items():
        for side in (layer.lora_A, layer.lora_B):
            side.float()
            if any(p.is_meta for p in side.parameters()):  # as the base is that they adapt, which is yet to be read
                side.to_empty(device="cpu")
        _draw(layer.lora_A[POLICY].weight, name, lora, seed)
        nn.init.zeros_(layer.lora_B[POLICY].weight)
        layer._active_adapter = [POLICY]
        for adapter in wanted:
            layer.lora_A[adapter].requires_grad_(adapter == POLICY)
            layer.lora_B[adapter].requires_grad_(adapter == POLICY)
    for adapter in wanted[1:]:
        follow(denoiser, adapter, 0.0)


@torch.no_grad()
def _draw(weight: nn.Parameter, name: str, lora: Lora, seed: int) -> None:
    digest = hashlib.sha256(f"lora\0{seed}\0{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    value = torch.empty(weight.shape)
    if lora.init == "gaussian":
        nn.init.normal_(value, std=1.0 / lora.rank, generator=generator)
    else:
        nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
    weight.copy_(value)


def lora_layers(denoiser: nn.Module) -> dict[str, Any]:
    """The adapted modules by their diffusers names, in module order."""
    # Adapters are added once, and a walk over all modules takes longer than most of what is asked of them.
    found: dict[str, Any] = denoiser.__dict__.get("_adapted", {})
    if not found:
        found = {name: module for name, module in denoiser.named_modules() if isinstance(module, LoraLayer)}
        denoiser.__dict__["_adapted"] = found
    return dict(found)


def adapted_modules(denoiser: nn.Module, targets: Sequence[str]) -> dict[str, int]:
    """How many adapted modules each target selected; empty without adapters."""
    layers = lora_layers(denoiser)
    return matched(targets, layers) if layers else {}


def adapter_names(denoiser: nn.Module) -> list[str]:
    """The adapters that there are, `policy` first."""
    layer = next(iter(lora_layers(denoiser).values()), None)
    return [] if layer is None else [name for name in (POLICY, OLD, EMA) if name in layer.lora_A]


def parameters(denoiser: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """One adapter, sorted by name, e.g. `layers.0.self_attn.add_q_proj.lora_A` [rank, in]."""
    found = {}
    for name, layer in lora_layers(denoiser).items():
        found[f"{name}.lora_A"] = layer.lora_A[adapter].weight
        found[f"{name}.lora_B"] = layer.lora_B[adapter].weight
    return dict(sorted(found.items()))


def policy_parameters(denoiser: nn.Module) -> dict[str, nn.Parameter]:
    """The trained adapter."""
    return parameters(denoiser, POLICY)


def old_parameters(denoiser: nn.Module) -> dict[str, nn.Parameter]:
    """The moving old adapter under the same keys as `policy_parameters`."""
    return parameters(denoiser, OLD)


@contextmanager
def weights(denoiser: Denoiser, which: Weights) -> Iterator[None]:
    """Let forwards inside use the policy, the old policy, or the bare base; restores what was active before.

    Leave only after a backward that recomputes activations; a plain backward may come later.
    """
    layers = list(lora_layers(denoiser).values())
    before = [(layer._active_adapter, layer._disable_adapters, layer.ready) for layer in layers]
    copy_before, denoiser.copy_in_use = denoiser.copy_in_use, which
    # peft's own switches also flip requires_grad, so the two fields that they set are set here alone.
    try:
        ready = [None] * len(layers) if which == "reference" or torch.is_grad_enabled() else _cast(denoiser, which)
        for layer, pair in zip(layers, ready, strict=True):
            layer._disable_adapters = which == "reference"
            if which != "reference":
                layer._active_adapter = [which]
            layer.ready = pair
        yield
    finally:
        denoiser.copy_in_use = copy_before
        for layer, (active, disabled, pair) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters, layer.ready = active, disabled, pair


def _cast(denoiser: Denoiser, adapter: str) -> Sequence[tuple[Tensor, Tensor] | None]:
    """Both matrices of every layer in the base's precision: once for all forwards of a rollout, always in one place."""
    layers = list(lora_layers(denoiser).values())
    if not layers or layers[0].base_layer.weight.dtype == layers[0].lora_A[adapter].weight.dtype:
        return [None] * len(layers)
    kept: dict[str, list[Tensor]] = denoiser.__dict__.setdefault("_in_base_precision", {})
    now = [side[adapter].weight.detach() for layer in layers for side in (layer.lora_A, layer.lora_B)]
    if adapter not in kept:
        dtypes = [layer.base_layer.weight.dtype for layer in layers for _ in range(2)]
        kept[adapter] = [tensor.to(dtype) for tensor, dtype in zip(now, dtypes, strict=True)]
    else:
        torch._foreach_copy_(kept[adapter], now)
    return list(zip(kept[adapter][::2], kept[adapter][1::2], strict=True))


def refresh_old(denoiser: nn.Module, eta: float) -> None:
    """Let `old` follow the policy."""
    follow(denoiser, OLD, eta)


@torch.no_grad()
def follow(denoiser: nn.Module, adapter: str, kept: float) -> None:
    """adapter = kept * adapter + (1 - kept) * policy for every tensor; `kept` in [0, 1), and 0 is a bitwise copy."""
    if not 0.0 <= kept < 1.0:
        raise ValueError(f"the kept share must be in [0, 1), got {kept}")
    moved: list[Tensor] = list(parameters(denoiser, adapter).values())
    policy: list[Tensor] = list(parameters(denoiser, POLICY).values())
    if kept == 0.0:
        torch._foreach_copy_(moved, policy)
    else:
        torch._foreach_mul_(moved, kept)
        torch._foreach_add_(moved, policy, alpha=1.0 - kept)


@torch.no_grad()
def squared_update(denoiser: nn.Module, adapter: str) -> float:
    """Squared norm of what an adapter adds to the weights of all its modules, scaling x B A, which is never formed.

    |B A|^2 is the sum of all entries of (B^T B) * (A A^T), two matrices as wide as the rank.
    """
    alike: dict[tuple[float, ...], list[Any]] = {}
    for layer in lora_layers(denoiser).values():
        key = (layer.scaling[adapter], *layer.lora_A[adapter].weight.shape, layer.out_features)
        alike.setdefault(key, []).append(layer)
    totals = []
    for (scaling, *_), layers in alike.items():
        down = torch.stack([layer.lora_A[adapter].weight for layer in layers])
        up = torch.stack([layer.lora_B[adapter].weight for layer in layers])
        totals.append(((up.mT @ up) * (down @ down.mT)).sum(dtype=torch.float64) * scaling**2)
    return float(torch.stack(totals).sum()) if totals else 0.0
