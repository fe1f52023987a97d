"""FSDP2 over the denoiser: every base parameter a DTensor over all ranks, the adapters replicated beside it in float32.

Or over groups of neighbouring ranks, each with the whole of it: gathers then stay within a group, and gradients of the
base are added up within it and then over the groups.
Owns the memory policy of the gathered weights, the count of all-gathers, and the one gradient reduction of a step.
`gather-once` keeps the base whole between `gather` and `release`; `reshard` gathers each unit where it runs;
`replicate-base` shards nothing. Prompt encoder and decoder stay outside. Every rank has to make the same calls in the
same order. A base that is trained cannot be replicated, and that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nftctl.model.family import Denoiser

Policy = Literal["gather-once", "reshard", "replicate-base"]

# Of a GPU's free memory, what the gathered base may take under `auto`; activations and the decoder get the rest.
GATHERED_SHARE = 0.5


# One collective under two names: 2.13 deprecates the older.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def make_mesh(device: str, world: int, group: int | None) -> DeviceMesh:
    """All ranks as one line, or as a table with a row for each shard group of `group` neighbours. Collective."""
    if group is None or group == world:
        return init_device_mesh(device, (world,))
    if world % group:
        raise ValueError(f"{world} ranks are no whole number of shard groups of {group}")
    return init_device_mesh(device, (world // group, group), mesh_dim_names=("replicate", "shard"))


def holders(parameter: Tensor) -> int:
    """How many ranks hold the same part of a sharded parameter: one, or one in each shard group."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return 1 if mesh is None or mesh.ndim == 1 else mesh.size(0)


class CountedAllGather:
    """FSDP2's all-gather with a count of the collectives that were really launched, and of the bytes that came by them
    from other ranks."""

    def __init__(self) -> None:
        self.calls = 0
        self.received = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.calls += 1
        self.received += output_tensor.nbytes - input_tensor.nbytes
        work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


@dataclass
class Sharding:
    """How a denoiser is sharded: the memory policy, its parameter groups in forward order (root last), the counter.

    frozen   nothing but adapters is trained, so gathered weights never grow stale
    whole    frozen weights are whole on this rank, and forwards need no hooks
    gathering   counts how often gathered weights were given back: the next ones lie elsewhere
    """

    policy: Policy
    units: list[FSDPModule]
    all_gather: CountedAllGather
    frozen: bool
    whole: bool = False
    gathering: int = 0


def shard_denoiser(
    denoiser: Denoiser, mesh: DeviceMesh, policy: str, compute: torch.dtype | None = None, beside: int = 0
) -> None:
    """Shard the base over `mesh` in place, unit by unit, moving each unit to the mesh's device as it is cut.

    `policy` is that of `model.shard`. Adapters have to be there already; they stay whole on every rank.
    `compute` is the precision that weights are gathered in where it is not that of the shards; their gradients come
    back in float32, the mean over the ranks. `beside`: bytes of what lies on a GPU beside a gathered base.
    """
    if denoiser.sharding is not None:
        raise ValueError("the denoiser is sharded already")
    chosen = choose_policy(denoiser, mesh, policy, compute, beside)
    adapters = {p for name, p in denoiser.named_parameters() if "lora_" in name}
    frozen = not any(p.requires_grad for p in denoiser.parameters() if p not in adapters)
    device = _device(mesh)
    for parameter in adapters:
        # FSDP neither shards nor moves what it ignores.
        parameter.data = parameter.data.to(device)
    all_gather = CountedAllGather()
    if chosen == "replicate-base":
        if not frozen:
            raise ValueError("weights that are trained cannot be replicated: every rank would step on its own")
        # What is still to be read is on the meta device, and goes to its place when it is.
        denoiser._apply(lambda t: t if t.is_meta else t.to(device))
        denoiser.sharding = Sharding(chosen, [], all_gather, frozen, whole=True)
        return
    exempt = {denoiser.get_submodule(name) for name in denoiser.fp32_modules}
    units = [
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=chosen == "reshard",
            ignored_params=adapters,
            mp_policy=_precision(None if unit in exempt else compute),
        )
        for unit in (*denoiser.shard_units(), denoiser)
    ]
    for unit in units:
        unit.set_custom_all_gather(cast(Any, all_gather))
        unit.set_reshard_after_backward(chosen == "reshard", recurse=False)
    denoiser.sharding = Sharding(chosen, units, all_gather, frozen)
    _refuse_whole_parameters(denoiser, adapters)


def _precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    # The denoiser casts its own inputs: sigma stays float32.
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)


def choose_policy(
    denoiser: nn.Module, mesh: DeviceMesh, policy: str, compute: torch.dtype | None = None, beside: int = 0
) -> Policy:
    """Resolve `auto`: `gather-once` where the gathered base fits on the fullest GPU of the mesh. Collective on GPUs."""
    if policy in ("gather-once", "reshard", "replicate-base"):
        return cast(Policy, policy)
    if policy != "auto":
        raise ValueError(f"shard policy must be auto, gather-once, reshard or replicate-base, got {policy!r}")
    if mesh.device_type != "cuda":
        return "gather-once"
    here = sum(p.nbytes for p in denoiser.parameters() if p.is_cuda)
    free = torch.tensor(float(torch.cuda.mem_get_info()[0] + here - beside), device=_device(mesh))
    for dimension in range(mesh.ndim):
        dist.all_reduce(free, op=dist.ReduceOp.MIN, group=mesh.get_group(dimension))
    whole = sum(p.numel() * (compute or p.dtype).itemsize for p in denoiser.parameters())
    return "gather-once" if whole <= GATHERED_SHARE * float(free) else "reshard"


SAID: dict[Policy, str] = {
    "gather-once": "gathered once and kept",
    "reshard": "gathered layer by layer in every forward",
    "replicate-base": "whole on every rank",
}
"""What a policy does with the base, in words."""


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _refuse_whole_parameters(denoiser: nn.Module, adapters: set[nn.Parameter]) -> None:
    whole = [n for n, p in denoiser.named_parameters() if p not in adapters and not isinstance(p, DTensor)]
    if whole:
        raise RuntimeError(f"not sharded: {', '.join(whole)}")


def gather(denoiser: Denoiser) -> None:
    """Make the base whole on this rank until `release`. Collective; does nothing when whole, unsharded or `reshard`."""
    sharding = denoiser.sharding
    if sharding is not None and sharding.policy == "gather-once" and not sharding.whole:
        for unit in sharding.units:
            unit.unshard()
        sharding.whole = sharding.frozen


def release(denoiser: Denoiser) -> None:
    """Free the gathered base; the shards remain. Local; forwards afterwards gather on their own and keep the result."""
    sharding = denoiser.sharding
    if sharding is not None:
        for unit in sharding.units:
            unit.reshard()
        sharding.gathering += sharding.whole and bool(sharding.units)
        sharding.whole = sharding.policy == "replicate-base"


def is_frozen(denoiser: Denoiser) -> bool:
    """Whether the base of a sharded denoiser never moves."""
    return denoiser.sharding is not None and denoiser.sharding.frozen


def end_step(denoiser: Denoiser) -> None:
    """Free what a step gathered, unless it is frozen: the next step would gather the same bits into the same room."""
    if denoiser.sharding is not None and not denoiser.sharding.frozen:
        release(denoiser)


def received(denoiser: Denoiser) -> int:
    """Bytes of the base that this rank has been sent by others so far."""
    return 0 if denoiser.sharding is None else denoiser.sharding.all_gather.received


def gathers(denoiser: Denoiser) -> int:
    """All-gathers launched by this rank so far: one per parameter group and gathering, none in a world of one."""
    return 0 if denoiser.sharding is None else denoiser.sharding.all_gather.calls


@torch.no_grad()
def reduce_gradients(params: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replace each gradient by its mean over the ranks of `group` (None: the default one): one float32 all-reduce.

    Parameters without a gradient count as zero and get one, so that every rank sends the same bucket.
    """
    held = list(params)
    if not held:
        return
    for parameter in held:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [cast(Tensor, parameter.grad) for parameter in held]
    bucket = torch.cat([grad.float().flatten() for grad in grads])
    dist.all_reduce(bucket, group=group)
    bucket /= dist.get_world_size(group)
    for parameter, mean in zip(held, torch.split(bucket, [g.numel() for g in grads]), strict=True):
        # In float32 they stay where they were reduced: a copy for every tensor would cost more than the sum.
        parameter.grad = mean.view_as(parameter).to(parameter.dtype)
