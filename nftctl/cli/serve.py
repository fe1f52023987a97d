"""`nftctl reward-serve`: scorers behind both reward protocols, until they are stopped.

Prints one line to stdout when they can be reached. The bearer token comes from the environment and is never printed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from nftctl.cli.console import Console

TOKEN_VARIABLE = "NFTCTL_REWARD_TOKEN"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(scorers: Sequence[str], *, host: str, port: int, revision: str, workers: int, parent_pid: int | None) -> None:
    """Serve until SIGINT or SIGTERM, or until the process `parent_pid` is gone. Raises RewardFailed."""
    from nftctl.reward.server import serve as serve_scorers

    console = Console()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and host not in LOOPBACK:
        console.warn(f"everybody who can reach {host} may ask for scores: {TOKEN_VARIABLE} is not set")

    def ready(url: str) -> None:
        console.data(f"listening on {url}")
        if parent_pid is None:
            console.say(f"the revision to pin, and whether all is well: nftctl reward-ping --url {url}")

    serve_scorers(
        scorers, host, port, token=token, revision=revision, workers=workers, parent_pid=parent_pid, ready=ready
    )
