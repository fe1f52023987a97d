"""The interface that ranks talk over. The machine's own are asked only for loopback, which every Linux has."""

from __future__ import annotations

import os

import pytest

from nftctl.engine.interfaces import VARIABLES, addresses, bind, choose
from nftctl.errors import EnvironmentUnfit

FOUND = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "192.168.1.7"}


def test_this_machine_has_loopback() -> None:
    assert addresses()["lo"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("ip", "named", "chosen"),
    [
        ("10.0.0.7", "", ("eth0", "10.0.0.7")),
        ("10.0.0.7", "ib0", ("ib0", "192.168.1.7")),
        ("10.9.9.9", "", ("", "10.9.9.9")),  # an address that is no interface's, behind a translation
    ],
)
def test_the_nodes_own_or_the_named_one(ip: str, named: str, chosen: tuple[str, str]) -> None:
    assert choose(FOUND, ip, named, "node a") == chosen


def test_a_missing_one_is_refused_with_what_there_is() -> None:
    with pytest.raises(EnvironmentUnfit) as caught:
        choose(FOUND, "10.0.0.7", "bond0", "node a")
    assert caught.value.message == (
        'grid.interface = "bond0": node a has no such interface with an IPv4 address '
        "(it has lo 127.0.0.1, eth0 10.0.0.7, ib0 192.168.1.7)"
    )


def test_the_nodes_environment_wins_over_a_choice_and_not_over_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    bind("eth0", asked=False)
    assert [os.environ[name] for name in VARIABLES] == ["mine", "=eth0"]
    bind("ib0", asked=True)
    assert [os.environ[name] for name in VARIABLES] == ["ib0", "=ib0"]
    bind("", asked=False)
    assert [os.environ[name] for name in VARIABLES] == ["ib0", "=ib0"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
