"""What `grid.address` may be: `local`, `auto`, or HOST:PORT of a running Ray cluster. Looks at the text alone."""

from __future__ import annotations

from urllib.parse import urlsplit

CLIENT_MODE = "ray://"
CLIENT_MODE_REASON = (
    "is Ray's client mode: the driver would stand outside of the cluster, behind a proxy that ends every rank when one "
    "connection breaks and does not say why a rank died"
)
CLIENT_MODE_HELP = 'run nftctl on a node of the cluster, with grid.address = "HOST:PORT" (6379 is Ray\'s usual port)'


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. ValueError says what else the text is, ready to follow it in a sentence."""
    if address.startswith(CLIENT_MODE):
        raise ValueError(CLIENT_MODE_REASON)
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = None, None, None
    if not parts or not host or not port or parts.netloc != address or set(address) & {"@", " "}:
        raise ValueError("is not local, auto or HOST:PORT")
    return host, port
