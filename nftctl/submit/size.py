"""How many machines a profile needs, and what each has to have. Knows no cluster; refuses no profile.

Owns what `grid.device = "auto"` means where no machine can be looked at: no GPUs under a contract that is made for
CPUs, and one for each rank under every other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nftctl.profile.schema import Profile
from nftctl.profile.t2i import T2I_PROFILES

CPUS_PER_GPU = 4
"""CPUs beside each GPU where nothing is said: its rank, and room for decoding, scoring and saving."""


@dataclass(frozen=True, slots=True)
class Size:
    """Machines of one kind. `gpus` is 0 where the ranks compute on CPUs; GPUs and CPUs are those of one node.

    `why` says, where the profile leaves the device open, what is asked for, and which key asks for the other.
    """

    nodes: int
    ranks: int
    ranks_per_node: int
    gpus: int
    cpus: int
    why: str = field(default="", compare=False)

    def describe(self) -> str:
        """`8 ranks on 2 nodes with 4 GPUs and 16 CPUs each`."""
        each = " each" if self.nodes > 1 else ""
        parts = [f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        parts.append(f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}")
        nodes = f"{self.nodes} nodes" if self.nodes > 1 else "1 node"
        return f"{self.ranks} ranks on {nodes} with {' and '.join(parts)}{each}"


def size_of(profile: Profile, per_node: int, cpus: int | None = None) -> Size:
    """The fewest nodes of at most `per_node` ranks, which are one GPU each unless they compute on CPUs, filled evenly.

    A shard group that fits on a node is not cut. `cpus` is what a node is asked for; None: one per rank, with a GPU
    `CPUS_PER_GPU`.
    """
    group = profile.grid.shard_group or 1
    group = group if group <= per_node else 1
    groups = -(-profile.ranks // group)
    nodes = -(-groups // (per_node // group))
    ranks_per_node = -(-groups // nodes) * group
    gpus = 0 if wants_no_gpus(profile) else ranks_per_node
    cpus = cpus or ranks_per_node * (CPUS_PER_GPU if gpus else 1)
    return Size(nodes, profile.ranks, ranks_per_node, gpus, cpus, _why(profile))


def wants_no_gpus(profile: Profile) -> bool:
    """Whether the ranks are to compute on CPUs: where the profile says so, or says nothing and is made for them.

    A node that was given no GPUs has none to show, so `auto` then takes the CPU there.
    """
    return profile.grid.device == "cpu" or (profile.grid.device == "auto" and _is_made_for_cpus(profile))


def _is_made_for_cpus(profile: Profile) -> bool:
    contract = T2I_PROFILES.get(profile.rl.profile)
    return contract is not None and bool(contract.embedded)  # the packaged bases are


def _why(profile: Profile) -> str:
    if profile.grid.device != "auto":
        return ""
    if _is_made_for_cpus(profile):
        return (
            f'grid.device is "auto", and {profile.rl.profile} is made for CPUs: no GPUs are asked for; '
            'grid.device = "cuda" asks for them'
        )
    return 'grid.device is "auto": a GPU is asked for per rank; grid.device = "cpu" asks for none'
