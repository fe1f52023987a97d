"""How many machines a profile needs, and what each has to have. Knows no cluster; refuses no profile."""

from __future__ import annotations

from dataclasses import dataclass

from nftctl.profile.schema import Profile

CPUS_PER_GPU = 4
"""CPUs beside each GPU where nothing is said: its rank, and room for decoding, scoring and saving."""


@dataclass(frozen=True, slots=True)
class Size:
    """Machines of one kind. `gpus` is 0 where the ranks compute on CPUs; GPUs and CPUs are those of one node."""

    nodes: int
    ranks: int
    ranks_per_node: int
    gpus: int
    cpus: int

    def describe(self) -> str:
        """`8 ranks on 2 nodes with 4 GPUs and 16 CPUs each`."""
        each = " each" if self.nodes > 1 else ""
        parts = [f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        parts.append(f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}")
        nodes = f"{self.nodes} nodes" if self.nodes > 1 else "1 node"
        return f"{self.ranks} ranks on {nodes} with {' and '.join(parts)}{each}"


def size_of(profile: Profile, per_node: int, cpus: int | None = None) -> Size:
    """The fewest nodes of at most `per_node` ranks, which are one GPU each unless grid.device is cpu, filled evenly.

    A shard group that fits on a node is not cut. `cpus` is what a node is asked for; None: one per rank, with a GPU
    `CPUS_PER_GPU`.
    """
    group = profile.grid.shard_group or 1
    group = group if group <= per_node else 1
    groups = -(-profile.ranks // group)
    nodes = -(-groups // (per_node // group))
    ranks_per_node = -(-groups // nodes) * group
    gpus = 0 if profile.grid.device == "cpu" else ranks_per_node
    return Size(nodes, profile.ranks, ranks_per_node, gpus, cpus or ranks_per_node * (CPUS_PER_GPU if gpus else 1))
