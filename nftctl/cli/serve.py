"""`nftctl reward-serve`: a packaged scorer behind the reward protocol, in this process, until it is stopped.

Prints one line to stdout when it can be reached. The bearer token comes from the environment and is never printed.
"""

from __future__ import annotations

import os

from nftctl.cli.console import Console

TOKEN_VARIABLE = "NFTCTL_REWARD_TOKEN"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(scorer: str, *, host: str, port: int, revision: str, parent_pid: int | None) -> None:
    """Serve until SIGINT or SIGTERM, or until the process `parent_pid` is gone. Raises RewardFailed."""
    from nftctl.reward.server import serve as serve_scorer

    console = Console()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and host not in LOOPBACK:
        console.warn(f"everybody who can reach {host} may ask for scores: {TOKEN_VARIABLE} is not set")

    def ready(url: str) -> None:
        console.data(f"listening on {url}")

    serve_scorer(scorer, host, port, token=token, revision=revision, parent_pid=parent_pid, ready=ready)
