"""Strict loading of safetensors, a diffusers component's or a distributed checkpoint's, into modules made on meta.

Every tensor is accounted for by name before the first byte is read: missing, unexpected and wrongly shaped ones are
listed in one refusal. Persistent buffers are tensors of the checkpoint as well. Nothing but safetensors is opened.
Owns `rl.init_keys_to_skip_loading`.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nftctl.errors import CheckpointUnusable, Finding, ProfileRefused
from nftctl.model.family import LoadReport
from nftctl.profile.schema import Model
from nftctl.run.stored import StoredTensors
from nftctl.tensorblocks import Block, Form
from nftctl.tensorfile import STEM


@dataclass(frozen=True)
class Destination:
    """A meta module, and where its parameters go. `fp32` are name prefixes that keep float32 whatever `dtype` is.

    Persistent buffers are tables: they stay on the CPU, as the file has them, for the family to take what it needs.
    `unread` parameters are checked and stay on the meta device, for `StoredWeights` to fill once they are sharded.
    """

    module: nn.Module
    dtype: torch.dtype
    device: torch.device
    fp32: tuple[str, ...] = ()
    unread: bool = False

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name.startswith(self.fp32) else self.dtype

    def tables(self) -> list[str]:
        """Names of the persistent buffers."""
        parameters = {name for name, _ in self.module.named_parameters()}
        return [name for name in self.module.state_dict() if name not in parameters]


def stored_dtype(model: Model) -> torch.dtype:
    """Precision of the denoiser's own parameters: an optimizer that moves them needs float32."""
    dtype: torch.dtype = torch.float32 if model.train == "full" else getattr(torch, model.dtype)
    return dtype


class Tensors:
    """The open files of a denoiser: names, shapes, and tensors on demand, each in one file or cut over several."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        self.files, self.folder = files, files[0].parent
        self.stored = StoredTensors(files)
        try:
            self._handles = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        except (SafetensorError, OSError) as error:
            raise CheckpointUnusable(f"{self.folder} is damaged: {error}") from error

    @property
    def forms(self) -> Mapping[str, Form]:
        """Dtype and shape of each, by name."""
        return self.stored.forms

    def as_stored(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, as the files have it, on the CPU. One that lies in one file is mapped."""
        blocks = self.stored.wholes[name].blocks
        if len(blocks) > 1:
            return self._joined(name, blocks, rows or slice(None))
        handle = self._handles[blocks[0].path]
        tensor: Tensor = handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        return tensor

    def _joined(self, name: str, blocks: Sequence[Block], rows: slice) -> Tensor:
        """Those rows out of the blocks that hold some of them; of the others nothing is read."""
        shape = self.forms[name][1]
        first, last, _ = rows.indices(shape[0])
        whole: Tensor = self._handles[blocks[0].path].get_slice(name)[:0].new_empty((max(last - first, 0), *shape[1:]))
        for block in blocks:
            start, columns = block.offsets[0], zip(block.offsets[1:], block.shape[1:], strict=True)
            begin, end = max(first, start), min(last, start + block.shape[0])
            if begin < end:
                place = (slice(begin - first, end - first), *(slice(o, o + n) for o, n in columns))
                whole[place] = self._handles[block.path].get_slice(name)[begin - start : end - start]
        return whole

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The same, refused where it holds no floating-point numbers."""
        tensor = self.as_stored(name, rows)
        if not tensor.is_floating_point():
            raise CheckpointUnusable(f"{self.folder}: {name} is {tensor.dtype}, not a floating-point tensor")
        return tensor


def load_strictly(
    files: Sequence[Path],
    stock: nn.Module,
    destinations: Sequence[Destination],
    *,
    optional: tuple[str, ...] = (),
    skip_keys: Sequence[str] = (),
    seed: int = 0,
) -> LoadReport:
    """Fill the destinations, whose parameter names are those of `stock`, from these safetensors files.

    `optional` are prefixes of tensors that may be absent; they are checked but not read unless a destination has them.
    Parameters whose name holds one of `skip_keys` start from their own initialisation, seeded by `seed` and name.
    """
    expected = {name: tuple(t.shape) for name, t in stock.state_dict(keep_vars=True).items()}
    skipped = {name for name in expected if any(key in name for key in skip_keys)}
    _refuse_idle_keys(skip_keys, expected)
    used = {name for d in destinations for name in d.module.state_dict()}
    with ExitStack() as stack:
        tensors = Tensors(files, stack)
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
    wrong = differences(tensors.forms, expected, optional, skipped)
    if not wrong:
        return
    component = any(path.name.startswith(STEM.partition(".")[0]) for path in tensors.files)
    prefix = "" if component else common_prefix(tensors.forms, expected)
    command = f"nftctl convert {shlex.quote(str(tensors.folder))} NEW --like BASE --strip-prefix {shlex.quote(prefix)}"
    raise CheckpointUnusable(
        f"the weights in {tensors.folder} do not match their config, {len(wrong)} of {len(expected)} tensors:\n  "
        + "\n  ".join(wrong),
        hint=f"they have a prefix: {command}" if prefix else "",
    )


def differences(
    forms: Mapping[str, Form],
    expected: Mapping[str, tuple[int, ...]],
    optional: tuple[str, ...] = (),
    skipped: Collection[str] = (),
) -> list[str]:
    """What keeps stored tensors from being those of a model, a line each; `optional` are beginnings of names."""
    wrong = [f"missing {n}" for n in expected if n not in forms and n not in skipped and not n.startswith(optional)]
    wrong += [f"unexpected {name}" for name in forms if name not in expected]
    wrong += [
        f"{name} is {list(forms[name][1])}, the config says {list(expected[name])}"
        for name in sorted(forms.keys() & expected.keys())
        if name not in skipped and forms[name][1] != expected[name]
    ]
    return wrong


def common_prefix(forms: Mapping[str, Form], expected: Mapping[str, object]) -> str:
    """The prefix under which most of the expected names are there, if there is one."""
    first = next(iter(expected))
    for name in forms:
        prefix = name.removesuffix(first)
        if prefix and name.endswith(f".{first}") and sum(f"{prefix}{n}" in forms for n in expected) > len(expected) / 2:
            return prefix
    return ""


def _fill(destination: Destination, tensors: Tensors, skipped: set[str], seed: int) -> None:
    values: dict[str, Tensor] = {}
    for name, parameter in destination.module.named_parameters():
        dtype = destination.dtype_of(name)
        if destination.unread:
            values[name] = torch.empty_like(parameter, dtype=dtype, device="meta")
        elif name in skipped:
            values[name] = seeded_start(destination.module, name, seed).to(destination.device, dtype)
        else:
            values[name] = tensors.read(name).to(device=destination.device, dtype=dtype)
    for name in destination.tables():
        owner, leaf = _owner(destination.module, name)
        values[name] = owner.computed(leaf) if name in skipped else tensors.read(name)
    destination.module.load_state_dict(values, assign=True)
    destination.module.requires_grad_(False).eval()


@dataclass(frozen=True)
class StoredWeights:
    """The parameters of a module that `load_strictly` checked and left unread, and how to read them."""

    files: tuple[Path, ...]
    skip_keys: tuple[str, ...]
    seed: int

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Make every parameter that is on the meta device real on `device`, with its value from the files.

        Of a parameter that is sharded by rows, this rank's rows alone are read, so nobody ever holds the whole module.
        """
        unread = {name: p for name, p in module.named_parameters() if p.device.type == "meta"}
        # What shards the module hooks into this, and so keeps its own buffers in step; `to_empty` would void buffers.
        module._apply(lambda t: torch.empty_like(t, device=device) if t.device.type == "meta" else t)
        with ExitStack() as stack:
            tensors = Tensors(self.files, stack)
            for name, parameter in module.named_parameters():
                if name in unread:
                    self._read(module, name, parameter, tensors)

    def _read(self, module: nn.Module, name: str, parameter: nn.Parameter, tensors: Tensors) -> None:
        # An adapted layer keeps the weight that it adapts one level down.
        stored = name.replace(".base_layer.", ".")
        local, rows = _held_here(parameter)
        if any(key in stored for key in self.skip_keys):
            local.copy_(seeded_start(module, name, self.seed, stored)[rows])
        elif local.numel():
            local.copy_(tensors.read(stored, rows if parameter.dim() else None))


def _held_here(parameter: nn.Parameter) -> tuple[Tensor, slice]:
    """The part of a parameter that this process holds, and which rows of the whole it is."""
    if not isinstance(parameter, DTensor):
        return parameter.data, slice(None)
    placements, mesh = parameter.placements, parameter.device_mesh
    if not placements[-1].is_shard(0) or not all(placement.is_replicate() for placement in placements[:-1]):
        raise ValueError(f"only rows over one dimension of ranks can be read, got {placements}")
    last = mesh.ndim - 1  # any before it repeats the same rows in every shard group
    rows = -(-parameter.shape[0] // mesh.size(last))  # as torch.chunk cuts them: the last ranks may hold fewer, or none
    start = min(rows * mesh.get_local_rank(last), parameter.shape[0])
    return parameter.to_local(), slice(start, min(start + rows, parameter.shape[0]))


def seeded_start(module: nn.Module, name: str, seed: int, stored: str = "") -> Tensor:
    """The value that parameter `name` has in a freshly built layer, drawn from (seed, name) alone, float32 on CPU.

    `stored` is the name that it is drawn by, where an adapter has changed its place in the module.
    """
    owner, leaf = _owner(module, name)
    shape = getattr(owner, leaf).shape
    if not isinstance(owner, nn.Linear | nn.Embedding | nn.Conv2d):
        # Norms are the only other parameters of any family, and they start at one.
        return torch.ones(shape)
    digest = hashlib.sha256(f"init\0{seed}\0{stored or name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        fresh = _fresh(owner)
    value: Tensor = getattr(fresh, leaf).detach()
    return value


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """The submodule that holds the tensor `name`, and what it calls it there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _fresh(owner: nn.Linear | nn.Embedding | nn.Conv2d) -> nn.Module:
    if isinstance(owner, nn.Embedding):
        return nn.Embedding(owner.num_embeddings, owner.embedding_dim)
    if isinstance(owner, nn.Conv2d):
        size, stride = (owner.kernel_size[0], owner.kernel_size[1]), (owner.stride[0], owner.stride[1])
        return nn.Conv2d(owner.in_channels, owner.out_channels, size, stride=stride, bias=owner.bias is not None)
    return nn.Linear(owner.in_features, owner.out_features, bias=owner.bias is not None)


def load_component(component: Any, folder: Path, **precision: torch.dtype) -> Any:
    """A component by its library's own loader: safetensors of this machine only, every tensor accounted for.

    `precision` is the dtype under the name that the library gives it. Raises CheckpointUnusable when the folder is
    incomplete or holds another class.
    """
    try:
        made, info = component.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **precision
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointUnusable(f"no {component.__name__} can be read from {folder}: {error}") from error
    names = [*info["missing_keys"], *info["unexpected_keys"], *(str(m[0]) for m in info["mismatched_keys"])]
    if names:
        raise CheckpointUnusable(f"the weights in {folder} do not match their config: {', '.join(sorted(names))}")
    return made
