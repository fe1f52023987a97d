"""What `grid.address` may be: HOST:PORT beside `local` and `auto`, and never Ray's client mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nftctl.profile.endpoint import endpoint
from nftctl.profile.preflight import check


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.1:6379", ("10.0.0.1", 6379)), ("head:7", ("head", 7)), ("[::1]:6379", ("::1", 6379))],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert endpoint(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "head",
        "head:port",
        "head:99999",
        "head:0",
        "http://head:1",
        ":1",
        "",
        "a:1/b",
        "a b:1",
        "u@h:1",
        "h:1?x",
        "h:1#x",
    ],
)
def test_what_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="is not local, auto or HOST:PORT"):
        endpoint(address)


@pytest.mark.parametrize("address", ["ray://head", "ray://head:10001", "ray://"])
def test_client_mode_is_refused_with_its_reason(load: Callable, address: str) -> None:
    (finding,) = check(load({"grid.address": address}))
    assert finding.code == "grid-address"
    assert f'grid.address = "{address}" is Ray\'s client mode: the driver would stand outside' in finding.message
    assert "run nftctl on a node of the cluster" in finding.help


@pytest.mark.parametrize("address", ["local", "auto", "head:6379"])
def test_these_are_accepted(load: Callable, address: str) -> None:
    assert check(load({"grid.address": address})) == []
