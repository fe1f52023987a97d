"""Whether the head of a cluster still answers, and which nodes do not. No Ray is started."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import ray

from nftctl.engine import head
from nftctl.engine.head import HeadWatch, dead_nodes
from nftctl.engine.lost import RanksLost


@pytest.fixture
def closed() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_head_is_given_up_after_a_while_of_silence_and_not_before(
    monkeypatch: pytest.MonkeyPatch, closed: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(head.time, "monotonic", lambda: now[0])
    watch = HeadWatch(f"127.0.0.1:{closed}")
    for now[0] in (100.0, 110.0, 119.9):
        watch.look()
    now[0] = 120.0  # too soon for another look
    watch.look()
    now[0] = 122.0
    with pytest.raises(RanksLost, match=rf"at 127\.0\.0\.1:{closed} has not answered for 20 s: Connection refused"):
        watch.look()
    assert watch.silence() == "Connection refused"


def test_a_head_that_comes_back_in_time_was_never_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(head.time, "monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    watch = HeadWatch(f"127.0.0.1:{port}")
    watch.look()
    now[0] = 119.0
    with socket.create_server(("127.0.0.1", port)):
        watch.look()
    now[0] = 121.0
    watch.look()  # silent again, and for the first time
    now[0] = 140.9
    watch.look()


def test_dead_nodes_are_those_that_ray_or_their_silence_gives_away(
    monkeypatch: pytest.MonkeyPatch, closed: int
) -> None:
    def row(name: str, port: int, **changes: Any) -> dict[str, Any]:
        alive = {"NodeID": name, "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        return alive | changes

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        gone = {"Alive": False, "DeathReasonMessage": "health check\nfailed"}
        rows = [row("a", port), row("b", closed), row("c", port, **gone), row("other", closed)]
        monkeypatch.setattr(ray, "nodes", lambda: rows)
        assert dead_nodes({"a", "b", "c"}) == {
            "b": f"nothing answers at 127.0.0.1:{closed}: Connection refused",
            "c": "health check failed",
        }


def test_a_table_that_does_not_come_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("not connected")

    monkeypatch.setattr(ray, "nodes", fail)
    assert dead_nodes({"a"}) == {}
