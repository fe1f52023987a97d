"""Server of `nftctl-reward/1` around one scorer: `make_app` for an application, `serve` for a process of its own.

Owns access (loopback by default, bearer token compared in constant time), body limits, one answer per idempotency key,
and the counts in `/healthz`. Scoring runs in threads, never on the event loop. A scorer that raises or returns a number
that is not finite is answered with 500; such a number is never sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from nftctl.errors import RewardFailed
from nftctl.reward.idempotency import AnswerMemory
from nftctl.reward.protocol import (
    Item,
    Request,
    RequestRefused,
    Score,
    ServiceInfo,
    encode_error,
    encode_info,
    encode_reply,
    parse_request,
)
from nftctl.reward.scorers import Scorer, load_scorer, scorer_revision

MAX_ITEMS = 64
BYTES_PER_ITEM = 5 * 2**20
"""Room for a 1024x1024 image of noise, which PNG cannot compress, in base64, with its prompt and metadata."""

STOP_GRACE_S = 10.0
PARENT_POLL_S = 0.5

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """State and handlers of one served scorer."""

    def __init__(
        self, scorer: Scorer, info: ServiceInfo, token: str, memory: AnswerMemory, max_body: int, workers: int
    ) -> None:
        self.info = info
        self.requests = 0
        self.repeats = 0
        self.images = 0
        self._scorer = scorer
        self._token = token
        self._memory = memory
        self._max_body = max_body
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="scorer")
        self._lock = threading.Lock()
        self._scoring = 0

    @property
    def scoring(self) -> int:
        """Scorer threads that have not come back, whether or not anybody still waits for them."""
        return self._scoring

    async def get_health(self, request: web.Request) -> web.Response:
        """Counts of scored requests and images, repeats answered from memory, and the revision. Needs no token."""
        return web.json_response(
            {"status": "ok", "revision": self.info.revision, "requests": self.requests, "images": self.images,
             "repeats": self.repeats}
        )  # fmt: skip

    async def get_info(self, request: web.Request) -> web.Response:
        """`GET /v1/info`."""
        self._authorise(request)
        return _json(200, encode_info(self.info))

    async def post_score(self, request: web.Request) -> web.Response:
        """`POST /v1/score`."""
        self._authorise(request)
        body = await self._body(request)
        asked, digest = await asyncio.to_thread(self._parse, body)
        key = request.headers.get("Idempotency-Key", asked.request_id)
        if key != asked.request_id:
            raise RequestRefused(400, "bad-request", "the Idempotency-Key header and request_id are not the same")
        if asked.revision != self.info.revision:
            text = f"this service has revision {self.info.revision!r}, the request wants {asked.revision!r}"
            raise RequestRefused(409, "revision-differs", text)
        answer, repeated = await self._memory.once(key, digest, lambda: self._answer(asked.items))
        self.repeats += repeated
        return _json(200, answer)

    async def close(self, app: web.Application) -> None:
        """Let no thread start any more scoring."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _authorise(self, request: web.Request) -> None:
        if not self._token:
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise RequestRefused(401, "unauthorised", "a bearer token is needed, and this is not the one")

    async def _body(self, request: web.Request) -> bytes:
        limit = self._max_body
        try:
            # Refused by its declared size, before memory is spent on it.
            if (request.content_length or 0) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than this service takes ({limit} bytes); send fewer images per request"
            raise RequestRefused(413, "body-too-large", text) from None

    def _parse(self, body: bytes) -> tuple[Request, bytes]:
        return parse_request(body, max_items=self.info.max_items), hashlib.sha256(body).digest()

    async def _answer(self, items: list[Item]) -> bytes:
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, items)
        self.requests += 1
        self.images += len(items)
        return answer

    def _score(self, items: list[Item]) -> bytes:
        """In a scorer thread: the reply's bytes, or RequestRefused (500)."""
        with self._counted():
            results = self._results(items)
        try:
            return encode_reply(self.info.revision, self._scores(items, results))
        except (RewardFailed, TypeError, ValueError) as error:
            raise RequestRefused(500, "scorer-wrong", f"the scorer's answer cannot be sent: {error}") from None

    def _results(self, items: list[Item]) -> list[tuple[float, dict[str, float]]]:
        images, prompts = [item.image for item in items], [item.prompt for item in items]
        try:
            return self._scorer.score(images, prompts, [dict(item.metadata) for item in items])
        except Exception as error:
            _log.error("the scorer raised\n%s", _without_secrets(traceback.format_exc(), self._token))
            said = " ".join(_without_secrets(f"{type(error).__name__}: {error}", self._token).split())
            raise RequestRefused(500, "scorer-failed", said[:300]) from None

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._scoring += 1
        try:
            yield
        finally:
            with self._lock:
                self._scoring -= 1

    def _scores(self, items: list[Item], results: list[tuple[float, dict[str, float]]]) -> list[Score]:
        if len(results) != len(items):
            raise ValueError(f"{len(results)} results for {len(items)} images")
        scores = [Score(item.id, value, parts) for item, (value, parts) in zip(items, results, strict=True)]
        for score in scores:
            if set(score.components) != set(self.info.components):
                raise ValueError(f"components {sorted(score.components)}, declared {sorted(self.info.components)}")
        return scores


SERVICE = web.AppKey("service", Service)


def make_app(
    scorer: Scorer,
    revision: str,
    token: str = "",
    *,
    max_items: int = MAX_ITEMS,
    max_body: int | None = None,
    workers: int = 1,
    memory: AnswerMemory | None = None,
) -> web.Application:
    """An application that serves `scorer` under `revision`.

    `max_body` in bytes, by default room for `max_items` 1024x1024 images; `workers` threads score at the same time, so
    more than one needs a scorer that allows it. Without `token` everybody who can connect may ask.
    """
    info = ServiceInfo(scorer.name, revision, ("image",), tuple(scorer.components), max_items)
    limit = max_items * BYTES_PER_ITEM if max_body is None else max_body
    service = Service(scorer, info, token, AnswerMemory() if memory is None else memory, limit, workers)
    app = web.Application(client_max_size=limit, middlewares=[_errors_as_json])
    app[SERVICE] = service
    app.router.add_get("/healthz", service.get_health)
    app.router.add_get("/v1/info", service.get_info)
    app.router.add_post("/v1/score", service.post_score)
    app.on_cleanup.append(service.close)
    return app


def serve(
    scorer_name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str = "",
    revision: str = "",
    max_items: int = MAX_ITEMS,
    workers: int = 1,
    parent_pid: int | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a packaged scorer until SIGTERM or SIGINT, or until `parent_pid` is no longer this process's parent.

    Meant for a process of its own. `ready` is called once with the real URL (port 0 takes a free one). `revision` is
    the scorer's own when empty. Raises RewardFailed for an unknown scorer or an address that cannot be bound.
    """
    scorer = load_scorer(scorer_name)
    app = make_app(scorer, revision or scorer_revision(scorer_name), token, max_items=max_items, workers=workers)
    asyncio.run(_serve(app, host, port, parent_pid, ready))
    if app[SERVICE].scoring:
        # A scorer that hangs holds a thread that the interpreter would wait for; the grace is over.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _serve(
    app: web.Application, host: str, port: int, parent_pid: int | None, ready: Callable[[str], None] | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Outside the main thread there are no signals to handle.
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_GRACE_S)
    await runner.setup()
    try:
        await _listen(runner, host, port)
        if ready is not None:
            ready(_url(runner.addresses[0]))
        await _until(stop, parent_pid)
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        cause = error.strerror or str(error)
        raise RewardFailed(f"cannot listen on {host}:{port}: {cause}", hint="choose another --port") from None


async def _until(stop: asyncio.Event, parent_pid: int | None) -> None:
    while not stop.is_set():
        if parent_pid is not None and os.getppid() != parent_pid:
            _log.info("the parent %d is gone, stopping", parent_pid)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PARENT_POLL_S if parent_pid is not None else None)


def _url(address: Any) -> str:
    host, port = address[0], address[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as refused:
        response = _json(refused.status, encode_error(refused.code, refused.message))
        if refused.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response
    except web.HTTPException as error:
        return _json(
            error.status, encode_error(error.reason.lower().replace(" ", "-"), f"{request.method} {request.path}")
        )
    except Exception:
        # The text of an unexpected error could hold anything; it stays in this process's log.
        _log.exception("a request failed")
        return _json(500, encode_error("internal", "the service failed; its log says why"))


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _without_secrets(text: str, token: str) -> str:
    """`text` without the token and without the value of any environment variable that is named like a secret."""
    names = ("TOKEN", "KEY", "SECRET", "PASSWORD")
    secrets = [v for k, v in os.environ.items() if len(v) >= 8 and any(n in k.upper() for n in names)]
    for secret in filter(None, [token, *secrets]):
        text = text.replace(secret, "***")
    return text
