"""Strict loading of a diffusers component's safetensors into modules made on the meta device.

Every tensor is accounted for by name before the first byte is read: missing, unexpected and wrongly shaped ones are
all listed in one refusal. Nothing but safetensors is opened. Owns `rl.init_keys_to_skip_loading`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nftctl.errors import CheckpointUnusable, Finding, ProfileRefused
from nftctl.model.family import LoadReport
from nftctl.tensorfile import weight_files


@dataclass(frozen=True)
class Destination:
    """A meta module, and where its parameters go. `fp32` are name prefixes that keep float32 whatever `dtype` is."""

    module: nn.Module
    dtype: torch.dtype
    device: torch.device
    fp32: tuple[str, ...] = ()

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name.startswith(self.fp32) else self.dtype


class Tensors:
    """The open files of a component: names, shapes, and tensors on demand."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.handles: dict[str, Any] = {}
        for file in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointUnusable(f"{file} is damaged: {error}") from error
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self.handles:
                    raise CheckpointUnusable(f"{folder} holds {name} twice")
                self.handles[name] = handle

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.handles[name].get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor: Tensor = self.handles[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise CheckpointUnusable(f"{self.folder}: {name} is {tensor.dtype}, not a floating-point tensor")
        return tensor.to(device=device, dtype=dtype)


def load_strictly(
    folder: Path,
    stock: nn.Module,
    destinations: Sequence[Destination],
    *,
    optional: tuple[str, ...] = (),
    skip_keys: Sequence[str] = (),
    seed: int = 0,
) -> LoadReport:
    """Fill the destinations, whose parameter names are those of `stock`, from the safetensors in `folder`.

    `optional` are prefixes of tensors that may be absent; they are checked but not read unless a destination has them.
    Parameters whose name holds one of `skip_keys` start from their own initialisation, seeded by `seed` and name.
    """
    expected = {name: tuple(t.shape) for name, t in stock.state_dict(keep_vars=True).items()}
    skipped = {name for name in expected if any(key in name for key in skip_keys)}
    _refuse_idle_keys(skip_keys, expected)
    used = {name for d in destinations for name, _ in d.module.named_parameters()}
    with ExitStack() as stack:
        tensors = Tensors(folder, stack)
        _refuse_differences(tensors, expected, skipped, optional)
        for destination in destinations:
            _fill(destination, tensors, skipped, seed)
    return LoadReport(len(used - skipped), len(used), tuple(sorted(used & skipped)))


def _refuse_idle_keys(skip_keys: Sequence[str], expected: Mapping[str, object]) -> None:
    findings = [
        Finding(
            "init-key-matches-nothing",
            "rl.init_keys_to_skip_loading",
            f"no parameter name holds {key!r}",
            help=f"names look like {next(iter(expected))}",
        )
        for key in skip_keys
        if not any(key in name for name in expected)
    ]
    if findings:
        raise ProfileRefused(findings)


def _refuse_differences(
    tensors: Tensors, expected: Mapping[str, tuple[int, ...]], skipped: set[str], optional: tuple[str, ...]
) -> None:
    there = tensors.handles.keys()
    wrong = [f"missing {name}" for name in expected if name not in there and name not in skipped]
    wrong = [line for line in wrong if not line.removeprefix("missing ").startswith(optional or ("\0",))]
    wrong += [f"unexpected {name}" for name in there if name not in expected]
    for name in sorted(there & expected.keys()):
        if name not in skipped and tensors.shape(name) != expected[name]:
            wrong.append(f"{name} is {list(tensors.shape(name))}, the config says {list(expected[name])}")
    if wrong:
        raise CheckpointUnusable(
            f"the weights in {tensors.folder} do not match their config, {len(wrong)} of {len(expected)} tensors:\n  "
            + "\n  ".join(wrong)
        )


def _fill(destination: Destination, tensors: Tensors, skipped: set[str], seed: int) -> None:
    values: dict[str, Tensor] = {}
    for name, _ in destination.module.named_parameters():
        dtype = destination.dtype_of(name)
        if name in skipped:
            values[name] = seeded_start(destination.module, name, seed).to(destination.device, dtype)
        else:
            values[name] = tensors.read(name, dtype, destination.device)
    destination.module.load_state_dict(values, assign=True)
    destination.module.requires_grad_(False).eval()


def seeded_start(module: nn.Module, name: str, seed: int) -> Tensor:
    """The value that parameter `name` has in a freshly built layer, drawn from (seed, name) alone, float32 on CPU."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    shape = getattr(owner, leaf).shape
    if not isinstance(owner, nn.Linear | nn.Embedding):
        # Norms are the only other parameters of the towers, and they start at one.
        return torch.ones(shape)
    digest = hashlib.sha256(f"init\0{seed}\0{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        fresh = _fresh(owner)
    value: Tensor = getattr(fresh, leaf).detach()
    return value


def _fresh(owner: nn.Linear | nn.Embedding) -> nn.Module:
    if isinstance(owner, nn.Embedding):
        return nn.Embedding(owner.num_embeddings, owner.embedding_dim)
    return nn.Linear(owner.in_features, owner.out_features, bias=owner.bias is not None)
