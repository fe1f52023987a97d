"""Compilation of a denoiser, layer by layer: one graph for each shape, gradient mode and copy of the weights.

Layers of one kind share their graphs. Prompt lengths change from step to step, so those dimensions are left open.
Refuses to fall back: a layer that cannot be compiled whole, or that would need graphs without end, is an error, since
the eager pass it would become takes half as long again and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nftctl.model.family import Denoiser
from nftctl.profile.schema import Model

GRAPHS = 64
"""Most graphs of one kind of layer: shapes of rollout, training and evaluation, times three copies of the weights."""


def wanted(model: Model, *, device: torch.device, deterministic: bool) -> bool:
    """Whether `model.compile` asks for compilation on this device."""
    if model.compile == "auto":
        return device.type == "cuda" and not deterministic
    return model.compile == "always"


def compile_layers(denoiser: Denoiser, backend: str = "inductor") -> int:
    """Compile the forward of every layer; returns how many. To be called once, after sharding.

    What shards a layer works in hooks around its forward, so these stay outside the graph.
    """
    _refuse_fallbacks()
    layers = denoiser.compile_units()
    for layer in layers:
        compiled = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend=backend)
        layer.forward = _opened(compiled, denoiser.open_dims)
    return len(layers)


def function(work: Callable[..., Tensor], open_dims: Mapping[tuple[int, ...], int]) -> Callable[..., Tensor]:
    """Compile what lies between two library calls. `open_dims` as a denoiser has them: sizes that make no new graph."""
    _refuse_fallbacks()
    return _opened(torch.compile(work, fullgraph=True, dynamic=False), open_dims)


def _refuse_fallbacks() -> None:
    from torch._dynamo import config

    config.recompile_limit = GRAPHS
    config.accumulated_recompile_limit = GRAPHS * 8
    config.fail_on_recompile_limit_hit = True


def _opened(compiled: Callable[..., Any], dims: Mapping[tuple[int, ...], int]) -> Callable[..., Any]:
    """Mark the dimensions, by place among the arguments, that must not make a new graph."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        for place, dim in dims.items():
            found: Any = args
            for index in place:
                found = None if found is None else found[index]
            if isinstance(found, Tensor):
                torch._dynamo.maybe_mark_dynamic(found, dim)
        return compiled(*args, **kwargs)

    return forward


def graphs() -> int:
    """Graphs compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def is_compiled(layer: nn.Module) -> bool:
    """Whether `compile_layers` has taken this layer."""
    return "forward" in vars(layer)
