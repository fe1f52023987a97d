"""The head of a cluster that a run has joined: whether it still answers, and which nodes it counts as dead.

Ranks and driver talk past the head and go on without it, but Ray's own client ends the process after a minute. Raises
RanksLost earlier, so that the run can say what happened. Asks by a bare connection, which needs no Ray.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nftctl.engine.lost import RanksLost
from nftctl.profile.endpoint import endpoint

SILENCE_S = 20.0
"""How long a head may refuse connections before it counts as gone; one that is restarted in time is none."""
LOOK_S = 2.0
"""Seconds between two looks."""
CONNECT_S = 1.0
ASK_S = 5.0
"""Longest wait for the table of nodes."""


abandoned = False
"""Whether this process left a cluster whose head is gone. Ray then cannot take its leave: it would wait for that head
and crash in the end, so the process has to end without its exit handlers."""


class HeadWatch:
    """Looks at one address, now and then."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._looked = -LOOK_S
        self._since: float | None = None

    def look(self) -> None:
        """When it is time to look: raise RanksLost if the head has not accepted a connection for SILENCE_S."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        reason = self.silence()
        if not reason:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= SILENCE_S:
            raise RanksLost(
                f"the head of the Ray cluster at {self.address} has not answered for {SILENCE_S:.0f} s: {reason}"
            )

    def silence(self) -> str:
        """Why the head does not answer now; empty when it does."""
        try:
            socket.create_connection(endpoint(self.address), timeout=CONNECT_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""


def dead_nodes(ids: Collection[str]) -> dict[str, str]:
    """Of these nodes, those that Ray counts as dead or that do not answer, with the reason.

    None when the head does not list them in time. Ray takes a while to notice what a node that is asked gives away.
    """
    import ray

    def table() -> list[dict[str, Any]]:
        return list(ray.nodes())

    thread = ThreadPoolExecutor(1, thread_name_prefix="nodes")
    try:
        rows = thread.submit(table).result(timeout=ASK_S)
    except Exception:  # whatever it is: this only adds to what is said of another failure
        return {}
    finally:
        thread.shutdown(wait=False)
    found = {row["NodeID"]: _silence(row) for row in rows if row["NodeID"] in ids}
    return {node: reason for node, reason in found.items() if reason}


def _silence(row: Mapping[str, Any]) -> str:
    """Why a node of Ray's table is dead; empty for one that answers."""
    if not row["Alive"]:
        return " ".join(str(row.get("DeathReasonMessage") or "Ray gives no reason").split())
    host, port = row["NodeManagerAddress"], row["NodeManagerPort"]
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"nothing answers at {host}:{port}: {error.strerror or error}"
    return ""
