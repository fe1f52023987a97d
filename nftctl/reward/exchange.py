"""HTTP with one reward service, whatever its protocol: time-outs, one deadline, retries, splitting, and the words.

Owns everything of a client that is not in a protocol's bytes. Every way of failing is a RewardFailed with URL, phase,
time and cause; no failure is ever a number. Refuses to follow redirects, to use proxies from the environment, and to
let the bearer token into a message.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import stamina
import yarl

from nftctl.errors import RewardFailed
from nftctl.reward.failures import ExchangeFailed, Limits, Phase, from_status, from_transport
from nftctl.reward.protocol import Item, RevisionDiffers, Score, ServiceInfo, check_key

T = TypeVar("T")

LONGEST_BACKOFF_S = 5.0
FIRST_POLL_S = 0.02
LONGEST_POLL_S = 1.0
PARTS_AT_ONCE = 4
REPLY_LIMIT = 16 * 2**20
CHUNK = 2**18
DEADLINE_HINT = "a slow service needs a longer reward.deadline_s"

_log = logging.getLogger(__name__)


class ServiceAway(RewardFailed):
    """No answer, of a kind that may be another one in a moment: what retries were spent on, or the deadline."""


@dataclass(slots=True)
class Counts:
    """What a client did so far: requests, HTTP attempts made for them, attempts beyond the first, images scored."""

    requests: int = 0
    attempts: int = 0
    retries: int = 0
    images: int = 0


@dataclass(slots=True)
class Call:
    """One request: what is sent, until when, and where it stands, for its messages.

    subject   what the request is about, said at the head of every message: `task 1e29`
    not_yet   a status that means "ask again later", until the deadline; `waiting` says what that means
    """

    method: str
    url: yarl.URL
    body: bytes
    headers: dict[str, str]
    limits: Limits
    deadline: float
    subject: str = ""
    not_yet: int | None = None
    waiting: str = ""
    started: float = field(default_factory=time.monotonic)
    attempts: int = 0
    phase: Phase = "connect"
    last: ExchangeFailed | None = None
    polled: bool = False


def deadline_in(seconds: float) -> float:
    """The moment `seconds` from now, as the clients want it (time.monotonic)."""
    return time.monotonic() + seconds


class ServiceClient(ABC):
    """One provider's service at `url`, pinned to `revision`; a protocol adds `info` and `_score_part`.

    Inside `async with` connections are kept; a call outside it, or on another event loop, opens and closes its own, so
    a client may be used from successive `asyncio.run` calls. `counts` is the sum over all of them. Seconds everywhere.
    """

    def __init__(
        self,
        url: str,
        revision: str,
        token: str = "",
        *,
        connect_timeout: float = 5.0,
        read_timeout: float = 30.0,
        retries: int = 3,
        max_items: int = 16,
        backoff: float = 0.1,
    ) -> None:
        self.url = _base(url)
        self.revision = revision
        self.counts = Counts()
        self._token = _checked(token)
        self._connect_s = connect_timeout
        self._read_s = read_timeout
        self._retries = retries
        self._max_items = max_items
        self._backoff = backoff
        self._kept: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.url)!r}, {self.revision!r})"

    async def __aenter__(self) -> Self:
        if self._kept is not None:
            raise RuntimeError(f"{self!r} is entered already")
        self._loop = asyncio.get_running_loop()
        self._kept = self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept, self._kept, self._loop = self._kept, None, None
        if kept is not None:
            await kept.close()

    async def info(self, *, deadline: float | None = None, compare: bool = True) -> ServiceInfo:
        """What the service declares. `compare=False` takes any revision (to ask an unknown service which it has).

        Raises RewardFailed; RevisionDiffers when it is not the pinned one. Without `deadline`, connect + read time-out.
        """
        by = deadline_in(self._connect_s + self._read_s) if deadline is None else deadline
        async with self._session() as session:
            return await self._ask_info(session, by, compare)

    async def score(self, items: Sequence[Item], *, key: str, deadline: float) -> list[Score]:
        """One score per item, in order. `deadline` (see `deadline_in`) bounds the whole call, retries included.

        More items than the service or the profile allow go as several requests, with keys `key/0`, `key/1`, ...
        Raises RewardFailed, or RevisionDiffers.
        """
        check_key(key)
        if not self.revision:
            raise RewardFailed(f"no revision is pinned for the reward service {self.url}")
        if not items:
            return []
        async with self._session() as session:
            size = await self._largest(session, deadline)
            parts = [items[n : n + size] for n in range(0, len(items), size)]
            keys = [f"{key}/{n}" for n in range(len(parts))] if len(parts) > 1 else [key]
            gate = asyncio.Semaphore(PARTS_AT_ONCE)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._gated(gate, session, part, k, deadline))
                        for part, k in zip(parts, keys, strict=True)
                    ]
            except BaseExceptionGroup as failures:
                # One sentence is enough: the others failed of the same cause or were cancelled by the first.
                raise _first(failures) from None
        return [score for task in tasks for score in task.result()]

    async def _gated(
        self, gate: asyncio.Semaphore, session: aiohttp.ClientSession, part: Sequence[Item], key: str, deadline: float
    ) -> list[Score]:
        async with gate:
            scores = await self._score_part(session, part, key, deadline)
        self.counts.images += len(scores)
        return scores

    @abstractmethod
    async def _ask_info(self, session: aiohttp.ClientSession, deadline: float, compare: bool) -> ServiceInfo:
        """One exchange that says whether the service is there and what it declares."""

    @abstractmethod
    async def _largest(self, session: aiohttp.ClientSession, deadline: float) -> int:
        """Images that one request may hold."""

    @abstractmethod
    async def _score_part(
        self, session: aiohttp.ClientSession, items: Sequence[Item], key: str, deadline: float
    ) -> list[Score]:
        """Scores of the images of one request."""

    # -- one request ----------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: bytes, headers: dict[str, str], deadline: float) -> Call:
        limits = Limits(self._connect_s, self._read_s, self._max_items, len(body))
        return Call(method, self.url.joinpath(path[1:]), body, headers, limits, deadline)

    async def _request(self, session: aiohttp.ClientSession, call: Call, parse: Callable[[bytes], T]) -> T:
        """One logical request: attempts until an answer, a final failure, or the deadline."""
        self.counts.requests += 1
        left = call.deadline - call.started
        if left <= 0:
            raise self._failed(call, "connect", "the deadline had passed before anything was sent", DEADLINE_HINT)
        try:
            async with asyncio.timeout(left):
                reply = await self._answer(session, call)
        except ExchangeFailed as failed:
            kind = ServiceAway if failed.retry else RewardFailed
            raise self._failed(call, failed.phase, failed.sentence, failed.hint, kind) from None
        except TimeoutError:
            raise self._late(call) from None
        try:
            return parse(reply)
        except RewardFailed as error:
            differs = isinstance(error, RevisionDiffers)
            raise self._failed(
                call, "parse", error.message, error.hint, RevisionDiffers if differs else RewardFailed
            ) from None

    async def _answer(self, session: aiohttp.ClientSession, call: Call) -> bytes:
        """The body of a 200; where the protocol has a "not yet", asked for again and again."""
        pause = FIRST_POLL_S
        while True:
            reply = await self._attempts(session, call)
            if reply is not None:
                return reply
            call.polled = True
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
            pause = min(1.5 * pause, LONGEST_POLL_S)

    async def _attempts(self, session: aiohttp.ClientSession, call: Call) -> bytes | None:
        def again(error: Exception) -> bool | float:
            if not isinstance(error, ExchangeFailed) or not error.retry:
                return False
            if error.wait_s is None:
                return True
            if time.monotonic() + error.wait_s >= call.deadline:
                error.sentence += f"; it asks to wait {error.wait_s:g} s, which is past the deadline"
                return False
            return error.wait_s + random.uniform(0, self._backoff)

        async for attempt in stamina.retry_context(
            on=again,
            attempts=self._retries + 1,
            timeout=None,  # the deadline is around the whole chain
            wait_initial=self._backoff,
            wait_max=max(self._backoff, LONGEST_BACKOFF_S),
            wait_jitter=self._backoff,
        ):
            with attempt:
                self.counts.attempts += 1
                self.counts.retries += attempt.num > 1
                call.attempts += 1
                return await self._attempt(session, call)
        raise AssertionError("unreachable: stamina returns or raises")

    async def _attempt(self, session: aiohttp.ClientSession, call: Call) -> bytes | None:
        """One HTTP exchange: the body of a 200, None for "not yet", or ExchangeFailed."""
        call.phase, call.last = "connect", None
        try:
            async with (
                asyncio.timeout(None) as silence,
                session.request(
                    call.method,
                    call.url,
                    data=_sent(call, silence) if call.body else None,
                    headers=call.headers,
                    allow_redirects=False,
                    trace_request_ctx=call,
                ) as response,
            ):
                reply = await _read(response)
                if response.status == call.not_yet:
                    return None
                if response.status != 200:
                    # Blotted before it is cut to a line, or half a token could stay.
                    said = self._redacted(reply.decode("utf-8", "replace")).encode()
                    raise from_status(response.status, response.headers, said, call.limits)
                return reply
        except ExchangeFailed as failed:
            call.last = failed
        except (aiohttp.ClientError, OSError) as error:
            call.last = from_transport(error, call.phase, call.limits)
        _log.info("attempt %d at %s: %s", call.attempts, call.url, self._redacted(call.last.sentence))
        raise call.last

    def _late(self, call: Call) -> RewardFailed:
        """The deadline passed: before another attempt, before the answer was there, or in the middle of an exchange."""
        phase, hint = call.phase, DEADLINE_HINT
        if call.last is not None:
            phase, hint = call.last.phase, call.last.hint
            sentence = f"{call.last.sentence}; no time left to try again"
        elif call.polled:
            phase, sentence = "read", f"the deadline passed: {call.waiting}"
        else:
            where = "connecting" if call.phase == "connect" else "waiting for the answer"
            sentence = f"the deadline passed while {where}"
        return self._failed(call, phase, sentence, hint, ServiceAway)

    def _failed(
        self, call: Call, phase: Phase, sentence: str, hint: str, kind: type[RewardFailed] = RewardFailed
    ) -> RewardFailed:
        elapsed = time.monotonic() - call.started
        attempts = f"{call.attempts} attempt{'s' if call.attempts != 1 else ''}"
        subject = f"{call.subject}: " if call.subject else ""
        text = f"reward service {call.url}: {subject}{sentence} (phase {phase}, {elapsed:.2f} s, {attempts})"
        return kind(self._redacted(text), hint=hint)

    def _redacted(self, text: str) -> str:
        # A service may echo the header it refuses.
        return text.replace(self._token, "***") if self._token else text

    # -- connections ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        if self._kept is not None and self._loop is asyncio.get_running_loop():
            yield self._kept
            return
        async with self._open() as session:
            yield session

    def _open(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(_connected)
        trace.on_connection_reuseconn.append(_connected)
        timeout = aiohttp.ClientTimeout(
            total=None,  # `_request` puts the deadline around all attempts
            connect=self._connect_s,
            sock_connect=self._connect_s,
            sock_read=self._read_s,
            ceil_threshold=float("inf"),
        )
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        # No pool limit: waiting for a free connection would count as connecting. PARTS_AT_ONCE is the limit.
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, trust_env=False, trace_configs=[trace]
        )


async def _connected(session: aiohttp.ClientSession, context: Any, params: object) -> None:
    context.trace_request_ctx.phase = "read"


async def _sent(call: Call, silence: asyncio.Timeout) -> AsyncIterator[memoryview]:
    """The body in chunks, each of which the service has to take within the read time-out."""
    # aiohttp's own read time-out begins after the last byte: a service that stops reading would hold us for ever.
    loop = asyncio.get_running_loop()
    for start in range(0, len(call.body), CHUNK):
        silence.reschedule(loop.time() + call.limits.read_s)
        yield memoryview(call.body)[start : start + CHUNK]
    silence.reschedule(None)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > REPLY_LIMIT:
            raise ExchangeFailed("read", f"the answer is larger than {REPLY_LIMIT // 2**20} MiB")
    return bytes(body)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    # A changed revision outranks everything: no failure policy may absorb it.
    flat = list(failures.exceptions)
    return next((e for e in flat if isinstance(e, RevisionDiffers)), flat[0])


def _base(url: str) -> yarl.URL:
    """The base URL, or RewardFailed. Credentials and queries are refused unseen: they would be printed with the URL."""
    if any(mark in url for mark in "@?#"):
        raise RewardFailed(
            "the reward service's url carries credentials, a query or a fragment",
            hint="give the plain url, and the token in the environment variable that token_env names",
        )
    try:
        base = yarl.URL(url)
    except ValueError:
        base = yarl.URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise RewardFailed(f"the reward service's url {url!r} is not of the form http://HOST:PORT or https://HOST")
    return base


def _checked(token: str) -> str:
    if not all("!" <= c <= "~" for c in token):
        raise RewardFailed("the bearer token holds a character that cannot travel in a header")
    return token


# Retries are logged here, in our words; the library's own hooks would print a bare event name.
stamina.instrumentation.set_on_retry_hooks(())
