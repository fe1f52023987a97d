"""The web application: `nftctl-reward/1` and `cosmos-rl` around one pool of scorers, with its counts and its health.

Owns access (bearer token, compared in constant time), body limits, one answer per idempotency key, the shape of errors,
and `/metrics`. Scoring never runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from nftctl.errors import RewardFailed
from nftctl.reward import cosmos_wire
from nftctl.reward.cosmos_server import CosmosTasks
from nftctl.reward.exposition import CONTENT_TYPE, Counter, Gauge, Histogram, exposition
from nftctl.reward.idempotency import AnswerMemory
from nftctl.reward.pool import Pool
from nftctl.reward.protocol import RequestRefused, check_key, encode_error, encode_info, load_object

BYTES_PER_ITEM = 5 * 2**20
"""Room for a 1024x1024 image of noise, which PNG cannot compress, in base64, with its prompt and metadata."""

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Counts:
    """What happened so far. `answered` and `scored` are durations in seconds."""

    def __init__(self, pool: Pool) -> None:
        info = pool.info
        self.requests = Counter("nftctl_reward_requests_total", "Requests by route and status.")
        self.scored = Counter("nftctl_reward_scored_requests_total", "Requests that were scored.")
        self.repeats = Counter("nftctl_reward_repeats_total", "Repeated keys that were answered from memory.")
        self.images = Counter("nftctl_reward_images_total", "Images that were scored.")
        self.bytes = Counter("nftctl_reward_received_bytes_total", "Bytes of bodies that were taken.")
        self.answering = Histogram("nftctl_reward_request_seconds", "From a request's headers to its answer, by route.")
        self.scoring = Histogram("nftctl_reward_scoring_seconds", "Seconds that the scorers took for one request.")
        self._gauges = (
            Gauge("nftctl_reward_busy", "Requests that are being scored.", lambda: pool.busy),
            Gauge("nftctl_reward_info", "What is served.", lambda: 1, {"scorer": info.name, "revision": info.revision}),
        )

    def page(self) -> str:
        """In the text format of Prometheus."""
        families = (self.requests, self.scored, self.repeats, self.images, self.bytes, self.answering, self.scoring)
        return exposition(*families, *self._gauges)


class Service:
    """State and handlers of one served pool."""

    def __init__(self, pool: Pool, token: str, memory: AnswerMemory, tasks: CosmosTasks, max_body: int) -> None:
        self.pool = pool
        self.counts = Counts(pool)
        self._token = token
        self._memory = memory
        self._tasks = tasks
        self._max_body = max_body

    # ---- nftctl-reward/1

    async def get_health(self, request: web.Request) -> web.Response:
        """Counts of scored requests and images, repeats answered from memory, and the revision. Needs no token."""
        counts = self.counts
        return web.json_response(
            {"status": "ok", "revision": self.pool.info.revision, "requests": int(counts.scored.value()),
             "images": int(counts.images.value()), "repeats": int(counts.repeats.value())}
        )  # fmt: skip

    async def get_metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`. Needs no token: it holds counts, and a scraper should hold no secret."""
        return web.Response(body=self.counts.page().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def get_info(self, request: web.Request) -> web.Response:
        """`GET /v1/info`."""
        self._authorise(request)
        return _json(200, encode_info(self.pool.info))

    async def post_score(self, request: web.Request) -> web.Response:
        """`POST /v1/score`."""
        self._authorise(request)
        body = await self._body(request)
        key, digest = await asyncio.to_thread(_key_and_digest, request.headers.get("Idempotency-Key"), body)
        answer, repeated = await self._memory.once(key, digest, lambda: self._score(body, key))
        if repeated:
            self.counts.repeats.add()
        return _json(200, answer)

    async def _score(self, body: bytes, key: str) -> bytes:
        answer = await self.pool.judge("score", body, key)
        self._count(answer.images, answer.seconds)
        return answer.bodies[""]

    # ---- cosmos-rl

    async def cosmos_ping(self, request: web.Request) -> web.Response:
        """`POST /api/reward/ping`. Its clients send no token with it."""
        await self._body(request)
        return _json(200, cosmos_wire.PING_REPLY)

    async def cosmos_enqueue(self, request: web.Request) -> web.Response:
        """`POST /api/reward/enqueue`: checked at once, scored later."""
        self._authorise(request)
        body = await self._body(request)
        ticket = await self._tasks.enqueue(body, self._score_task)
        return _json(200, cosmos_wire.encode_ticket(ticket))

    async def cosmos_pull(self, request: web.Request) -> web.Response:
        """`POST /api/reward/pull`."""
        self._authorise(request)
        uuid, reward_fn = cosmos_wire.parse_pull(await self._body(request))
        found = self._tasks.pull(uuid, reward_fn)
        return _json(200, found) if found is not None else _json(cosmos_wire.NOT_READY, cosmos_wire.NOT_READY_REPLY)

    async def _score_task(self, body: bytes) -> dict[str, bytes]:
        answer = await self.pool.judge("task", body)
        self._count(answer.images, answer.seconds)
        return answer.bodies

    # ---- both

    async def close(self, app: web.Application) -> None:
        """Score nothing any more."""
        self._tasks.close()
        self.pool.close()

    def _count(self, images: int, seconds: float) -> None:
        self.counts.scored.add()
        self.counts.images.add(images)
        self.counts.scoring.observe(seconds)

    def _authorise(self, request: web.Request) -> None:
        if not self._token:
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise RequestRefused(401, "unauthorised", "a bearer token is needed, and this is not the one")

    async def _body(self, request: web.Request) -> bytes:
        # Refused by its declared size, before memory is spent on it.
        if (request.content_length or 0) > self._max_body:
            raise self._too_large()
        size, parts = 0, []
        # Joined once at the end: `request.read` would copy it twice more.
        async for part in request.content.iter_any():
            size += len(part)
            if size > self._max_body:
                raise self._too_large()
            parts.append(part)
        self.counts.bytes.add(size)
        return b"".join(parts)

    def _too_large(self) -> RequestRefused:
        text = f"the body is larger than this service takes ({self._max_body} bytes); send fewer images per request"
        return RequestRefused(413, "body-too-large", text)


def make_service(service: Service) -> web.Application:
    """The application with the routes of `service`."""
    app = web.Application(middlewares=[_counted(service.counts), _errors_as_json])
    app.router.add_get("/healthz", service.get_health)
    app.router.add_get("/metrics", service.get_metrics)
    app.router.add_get("/v1/info", service.get_info)
    app.router.add_post("/v1/score", service.post_score)
    app.router.add_post(cosmos_wire.PING_PATH, service.cosmos_ping)
    app.router.add_post(cosmos_wire.ENQUEUE_PATH, service.cosmos_enqueue)
    app.router.add_post(cosmos_wire.PULL_PATH, service.cosmos_pull)
    app.on_cleanup.append(service.close)
    return app


def _key_and_digest(header: str | None, body: bytes) -> tuple[str, bytes]:
    """The idempotency key, from the body where no header has it, and what tells this body from another."""
    try:
        key = header if header is not None else load_object(body, "the request").get("request_id")
        return check_key(key if isinstance(key, str) else ""), hashlib.sha256(body).digest()
    except RewardFailed as error:
        raise RequestRefused(400, "bad-request", error.message) from None


def _counted(counts: Counts) -> Middleware:
    @web.middleware
    async def count(request: web.Request, handler: _Handler) -> web.StreamResponse:
        started = time.perf_counter()
        response = await handler(request)
        # By route, never by path: a stranger must not be able to make new series.
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        counts.requests.add(route=route, status=str(response.status))
        counts.answering.observe(time.perf_counter() - started, route=route)
        return response

    return count


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as refused:
        response = _refusal(request, refused.status, refused.code, refused.message)
        if refused.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refused.status == 429:
            response.headers["Retry-After"] = "1"
        return response
    except web.HTTPException as error:
        return _refusal(
            request, error.status, error.reason.lower().replace(" ", "-"), f"{request.method} {request.path}"
        )
    except Exception:
        # The text of an unexpected error could hold anything; it stays in this process's log.
        _log.exception("a request failed")
        return _refusal(request, 500, "internal", "the service failed; its log says why")


def _refusal(request: web.Request, status: int, code: str, message: str) -> web.Response:
    """Each protocol's clients look for the reason in another place."""
    if request.path.startswith("/api/reward/"):
        return web.json_response({"message": message}, status=status)
    return _json(status, encode_error(code, message))


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")
