"""What went wrong in one HTTP exchange, in words: phase, sentence, hint, and whether another attempt makes sense.

Owns the difference between refused, unresolved, TLS, time-out, lost connection, HTTP status and not-HTTP, each with its
own sentence. Refuses to quote at length: a service's own words are cut to one short line.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nftctl.reward.protocol import parse_error

Phase = Literal["connect", "read", "status", "parse"]

RETRIED_STATUS = frozenset({408, 425, 429})
QUOTE = 200


class ExchangeFailed(Exception):
    """One attempt that gave no answer. `wait_s` is what the service asked for by Retry-After."""

    def __init__(
        self, phase: Phase, sentence: str, *, hint: str = "", retry: bool = False, wait_s: float | None = None
    ) -> None:
        super().__init__(sentence)
        self.phase = phase
        self.sentence = sentence
        self.hint = hint
        self.retry = retry
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sentence about a limit has to name: seconds, seconds, images per request, bytes of the body sent."""

    connect_s: float
    read_s: float
    max_items: int
    body_bytes: int = 0


def from_transport(error: Exception, phase: Phase, limits: Limits) -> ExchangeFailed:
    """The failure behind an exception of the HTTP client; `phase` says whether the connection was there."""
    import aiohttp

    retry = True
    hint = ""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        sentence = f"the host name {error.host!r} cannot be resolved ({_cause(error)})"
        hint = "check the host name in the url"
    elif isinstance(error, aiohttp.ClientSSLError | aiohttp.ServerFingerprintMismatch):
        phase, retry = "connect", False
        sentence = f"the TLS handshake failed ({_cause(error)})"
        hint = "check the service's certificate, or use http:// if it speaks plain HTTP"
    elif isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        sentence = "the connection was refused, nothing listens there"
        hint = "start the service, or correct the url"
    elif isinstance(error, aiohttp.ClientConnectorError):
        sentence = f"no connection could be made ({_cause(error)})"
    elif isinstance(error, TimeoutError) and phase == "connect":
        sentence = f"no connection within the connect time-out of {limits.connect_s:g} s"
    elif isinstance(error, TimeoutError):
        sentence = f"connected, but silent: no answer within the read time-out of {limits.read_s:g} s"
    elif isinstance(error, aiohttp.ClientResponseError):
        retry = False
        sentence = f"the answer is not HTTP ({_line(error.message)})"
        hint = "check the port, and whether the service wants https://"
    else:
        sentence = f"the connection was lost before the answer was complete ({_cause(error)})"
    return ExchangeFailed(phase, sentence, hint=hint, retry=retry)


def from_status(status: int, headers: Mapping[str, str], body: bytes, limits: Limits) -> ExchangeFailed:
    """The failure behind an HTTP status other than 200."""
    said = _line(parse_error(body) or body.decode("utf-8", "replace"))
    sentence = f"HTTP {status}" + (f": {said}" if said else "")
    hint = ""
    if status in (401, 403):
        sentence = f"HTTP {status}, the bearer token was not accepted" + (f": {said}" if said else "")
        hint = "set the environment variable that the provider's token_env names"
    elif status == 413:
        sentence = f"HTTP 413, a body of {_size(limits.body_bytes)} was too large" + (f": {said}" if said else "")
        hint = f"lower reward.max_items_per_request (now {limits.max_items})"
    elif 300 <= status < 400:
        sentence = f"HTTP {status}, a redirect, which is not followed"
        hint = "give the final url"
    retry = status in RETRIED_STATUS or status >= 500
    wait_s = retry_after(headers.get("Retry-After", "")) if retry else None
    return ExchangeFailed("status", sentence, hint=hint, retry=retry, wait_s=wait_s)


def retry_after(value: str) -> float | None:
    """Seconds that a Retry-After header asks for (a number or an HTTP date), at least 0; None when it says nothing."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
        return max(0.0, moment.timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _cause(error: BaseException) -> str:
    """Type and text, since many transport errors have an empty text."""
    import aiohttp

    inner: BaseException = error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        inner = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        inner = error.os_error
    text = _line(str(inner))
    return f"{type(inner).__name__}: {text}" if text else type(inner).__name__


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= QUOTE else line[: QUOTE - 1] + "…"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
