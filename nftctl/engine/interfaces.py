"""The network interface that ranks of different nodes talk over: the node's own by its address in Ray, or a named one.

Owns GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of a rank. Left alone, gloo takes whatever the host's name resolves to,
which on many hosts is loopback. Refuses a named interface that a node lacks or that has no address.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from nftctl.errors import EnvironmentUnfit

_SIOCGIFADDR = 0x8915
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def addresses() -> dict[str, str]:
    """IPv4 address by interface, of those that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def choose(found: Mapping[str, str], ip: str, named: str, host: str) -> tuple[str, str]:
    """Interface and address to use on `host`, whose address in Ray is `ip`; no interface where none has that address.

    Raises EnvironmentUnfit for a `named` one that is not among `found`.
    """
    if named:
        if named not in found:
            listed = ", ".join(f"{name} {address}" for name, address in found.items())
            raise EnvironmentUnfit(
                f'grid.interface = "{named}": {host} has no such interface with an IPv4 address (it has {listed})',
                hint="name one that every node has, or leave grid.interface out",
            )
        return named, found[named]
    return next((name for name, address in found.items() if address == ip), ""), ip


def bind(name: str, *, asked: bool) -> None:
    """Make gloo and NCCL of this process use the interface; what a node's own environment says wins, unless `asked`."""
    for variable, value in zip(VARIABLES, (name, f"={name}"), strict=True):
        if name and (asked or variable not in os.environ):
            os.environ[variable] = value
