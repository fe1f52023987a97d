"""Which node each rank of a run gets, decided from what a survey saw: the same free room gives the same seats.

Owns `grid.strategy` and the order of ranks: those of one node are neighbours, and nodes stand in the order of their
addresses. Whole shard groups go to one node where they fit. Refuses nothing: no seats are an empty answer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Strategy = Literal["pack", "spread"]


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `here`: it runs on this machine, so a driver can join through it. `python` is known only here."""

    host: str
    ip: str
    here: bool
    python: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    id: str = ""

    def room(self, bundle: Mapping[str, float]) -> int:
        """How many bundles fit on it now."""
        return min(int(self.free.get(name, 0.0) // amount) for name, amount in bundle.items())

    @property
    def place(self) -> str:
        """Address and name, for people."""
        return f"{self.ip} ({self.host})" if self.host != self.ip else self.ip


def amounts(resources: Mapping[str, float]) -> str:
    """`3 CPU, 2 GPU`."""
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))


def bundle_of(device: str) -> dict[str, float]:
    """What one rank takes."""
    return {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}


def seat(
    nodes: Sequence[Node], bundle: Mapping[str, float], ranks: int, strategy: Strategy, shard_group: int | None = None
) -> tuple[Node, ...]:
    """The node of every rank, in rank order; empty when there is no room.

    `pack` takes one node where one is enough, this machine's before others, else the fewest; `spread` gives all nodes
    with room as equal a share as they can take. Shard groups stay whole, unless there is room only for parts of them.
    """
    ordered = sorted(nodes, key=_address)
    for unit in (shard_group or 1, 1):
        room = [node.room(bundle) // unit for node in ordered]
        if ranks % unit == 0 and sum(room) >= ranks // unit:
            shares = (_packed if strategy == "pack" else _spread)(ordered, room, ranks // unit)
            return tuple(node for node, share in zip(ordered, shares, strict=True) for _ in range(share * unit))
    return ()


def _address(node: Node) -> tuple[int, int, str]:
    try:
        address = ipaddress.ip_address(node.ip)
    except ValueError:
        return 0, 0, f"{node.ip} {node.id}"
    return address.version, int(address), node.id


def _packed(nodes: Sequence[Node], room: Sequence[int], wanted: int) -> list[int]:
    shares = [0] * len(nodes)
    enough = [i for i in range(len(nodes)) if room[i] >= wanted]
    if enough:
        shares[min(enough, key=lambda i: (not nodes[i].here, room[i]))] = wanted
        return shares
    for i in sorted(range(len(nodes)), key=lambda i: -room[i]):
        shares[i] = min(room[i], wanted - sum(shares))
    return shares


def _spread(nodes: Sequence[Node], room: Sequence[int], wanted: int) -> list[int]:
    shares = [0] * len(nodes)
    for _ in range(wanted):
        shares[min((i for i in range(len(nodes)) if shares[i] < room[i]), key=lambda i: shares[i])] += 1
    return shares


def first_ranks(seats: Sequence[Node]) -> dict[int, Node]:
    """The lowest rank of every node, with its node."""
    return {rank: node for rank, node in enumerate(seats) if rank == 0 or seats[rank - 1].id != node.id}


def told(seats: Sequence[Node], shard_group: int | None = None) -> str:
    """`ranks 0-1 on 10.0.0.1 (a), 2-3 on 10.0.0.2 (b)`, and which shard groups are torn."""
    runs = [list(run) for _, run in groupby(enumerate(seats), key=lambda item: item[1].id)]
    text = "ranks " + ", ".join(f"{span([rank for rank, _ in run])} on {run[0][1].place}" for run in runs)
    size = shard_group or 1
    torn = [
        span(range(start, start + size))
        for start in range(0, len(seats), size)
        if len({node.id for node in seats[start : start + size]}) > 1
    ]
    if torn:
        text += f"; no room for whole shard groups: ranks {', '.join(torn)} gather their weights between nodes"
    return text


def span(ranks: Sequence[int]) -> str:
    """Neighbouring ranks as `2-3`, others one by one: `1, 3`."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
