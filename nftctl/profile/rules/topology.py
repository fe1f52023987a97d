"""Where the run is placed: one Ray actor group that is one FSDP world, one rank per sample of a group."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from nftctl.profile.diagnose import shown
from nftctl.profile.endpoint import CLIENT_MODE, CLIENT_MODE_HELP, endpoint
from nftctl.profile.rules.rule import Facts, Problem, Rule

INTERFACE_BYTES = 15
"""Longest name of a network interface (IFNAMSIZ, less its end)."""


def _backend(facts: Facts) -> Iterator[Problem]:
    if facts.profile.grid.backend != "ray":
        yield Problem("grid.backend", 'grid.backend must be "ray": the five roles are one Ray actor group')


def _grouping(facts: Facts) -> Iterator[Problem]:
    if facts.profile.grid.grouping != "single":
        message = 'grid.grouping must be "single": data, rollout, reward, replay and policy share one process per rank'
        yield Problem("grid.grouping", message)


def _placement(facts: Facts) -> Iterator[Problem]:
    if facts.profile.grid.gpu_placement != "colocated":
        message = 'grid.gpu_placement must be "colocated": the actors form one distributed FSDP world'
        yield Problem("grid.gpu_placement", message)


def _gpus_per_role(facts: Facts) -> Iterator[Problem]:
    if facts.profile.grid.gpus_per_role is not None:
        message = "grid.gpus_per_role must stay unset: colocated roles have no GPUs of their own"
        yield Problem("grid.gpus_per_role", message, help="remove the key")


def _group_size(facts: Facts) -> Iterator[Problem]:
    size = facts.profile.rl.group_size
    if size < 2:
        message = f"rl.group_size must be at least 2, got {size}: an advantage compares the samples of a group"
        yield Problem("rl.group_size", message)


def _address(facts: Facts) -> Iterator[Problem]:
    address = facts.profile.grid.address
    if address in ("local", "auto"):
        return
    try:
        endpoint(address)
    except ValueError as error:
        help = "remove the key: the run then starts a Ray of its own on this machine"
        if address.startswith(CLIENT_MODE):
            help = CLIENT_MODE_HELP
        yield Problem("grid.address", f'grid.address = "{address}" {error}', help)


def _interface(facts: Facts) -> Iterator[Problem]:
    """What no node can have; whether a node has it is asked of the node."""
    name = facts.profile.grid.interface
    if not name:
        return
    wrong = sorted({c for c in name if c.isspace() or not c.isprintable() or c in "/:,"})
    if wrong:
        reason = f"has {', '.join('a space' if c == ' ' else shown(c) for c in wrong)} in it"
    elif len(name.encode()) > INTERFACE_BYTES:
        reason = f"has {len(name.encode())} bytes, and a name has at most {INTERFACE_BYTES}"
    elif name in (".", ".."):
        reason = "names a folder"
    else:
        return
    help = "one name that every node has, such as eth0, or remove the key"
    yield Problem("grid.interface", f"grid.interface = {shown(name)} is no network interface: it {reason}", help)


def _interface_missing(facts: Facts) -> Iterator[Problem]:
    """Only for ranks that are all on this machine: what nodes of a cluster have is asked of them."""
    grid = facts.profile.grid
    if not grid.interface or grid.address != "local":
        return
    there = [name for _, name in socket.if_nameindex()]
    if grid.interface not in there and not list(_interface(facts)):
        message = (
            f"grid.interface = {shown(grid.interface)} is not on this machine, where the run starts a Ray of its own"
        )
        yield Problem("grid.interface", message, f"there are {', '.join(there)}; or remove the key")


def _role_shape(facts: Facts) -> Iterator[Problem]:
    grid, size = facts.profile.grid, facts.profile.rl.group_size
    why = f"rl.group_size = {size} means {size} model ranks"
    if grid.ranks is not None and grid.ranks != size:
        help = "remove grid.ranks, or make it equal to rl.group_size"
        yield Problem("grid.ranks", f"grid.ranks must be {size}, got {grid.ranks}: {why}", help)
    if grid.num_replicas != 1:
        yield Problem(
            "grid.num_replicas", f"grid.num_replicas must be 1, got {grid.num_replicas}: there is one replica"
        )
    if grid.shapes is None:
        return
    wanted = f"{{policy = [1, {size}], rollout = [1, {size}]}}"
    if grid.shapes != {"policy": [1, size], "rollout": [1, size]}:
        message = f"grid.shapes must give policy and rollout the shape [1, {size}] and nothing else: {why}"
        yield Problem("grid.shapes", message, f"grid.shapes = {wanted}, or remove the key")


def _shard_group(facts: Facts) -> Iterator[Problem]:
    group, ranks = facts.profile.grid.shard_group, facts.profile.rl.group_size
    if group is None:
        return
    if ranks % group:
        divisors = [n for n in range(2, ranks + 1) if ranks % n == 0]
        message = f"grid.shard_group = {group} does not divide the {ranks} ranks of rl.group_size"
        yield Problem("grid.shard_group", message, f"take {_listed(divisors)}, or remove the key")
    elif facts.profile.model.shard == "replicate-base":
        message = f'grid.shard_group = {group} shards the base, and model.shard = "replicate-base" keeps it whole'
        yield Problem("grid.shard_group", message, "remove one of them")


def _listed(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers)) or "no group"


def _replicated(facts: Facts) -> Iterator[Problem]:
    model = facts.profile.model
    if model.shard == "replicate-base" and model.train == "full":
        message = 'model.shard = "replicate-base" keeps the base whole on each rank, and model.train = "full" moves it'
        yield Problem("model.shard", message, 'only a frozen base can be replicated: model.shard = "auto" shards it')


def _fp8(facts: Facts) -> Iterator[Problem]:
    if facts.profile.rl.rollout_precision == "fp8" and facts.profile.model.shard == "reshard":
        message = 'rl.rollout_precision = "fp8" quantises weights that are whole, and model.shard = "reshard" never'
        message += " gathers more than a layer"
        yield Problem("rl.rollout_precision", message, 'model.shard = "gather-once", or rl.rollout_precision = "base"')


RULES = (
    Rule("grid-backend", "The five roles are one Ray actor group.", _backend),
    Rule("grid-grouping", "Data, rollout, reward, replay and policy share one process per rank.", _grouping),
    Rule("grid-placement", "The actors form one distributed FSDP world.", _placement),
    Rule("gpus-per-role", "Colocated roles take no GPUs of their own.", _gpus_per_role),
    Rule("group-size", "An advantage compares at least two samples of a prompt.", _group_size),
    Rule(
        "grid-address",
        "A run has a Ray of its own, or joins one as a member: local, auto or HOST:PORT, never ray://.",
        _address,
    ),
    Rule("grid-interface", "Ranks talk over one interface, whose name an interface can have.", _interface),
    Rule("grid-interface-missing", "The one machine of a private Ray has the interface.", _interface_missing),
    Rule("role-shape", "Policy and rollout are one replica with one rank per sample of a group.", _role_shape),
    Rule("shard-group", "Shard groups are of one size, and something is sharded over them.", _shard_group),
    Rule("shard-replicated", "Only a frozen base is replicated.", _replicated),
    Rule("fp8-not-whole", "What is quantised is whole.", _fp8),
)
