"""A reward service that misbehaves on purpose, written from the protocol text alone: it imports nothing of nftctl.

In a test:      async with FaultServer("reset", after=2) as service: ...  service.url, service.keys, service.requests
As a process:   python tests/reward/fault_server.py --fault hang --after 3     (prints its URL as the first line)

`after` is the first score request (1-based) that misbehaves, `times` how many do (0: all that follow); `info` lets
`/v1/info` misbehave too. A right answer is the mean pixel in [0, 1]. `GET /healthz` tells what arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import signal
import socket
import struct
from collections.abc import Callable

from aiohttp import web
from PIL import Image, ImageStat

Scores = list[dict[str, object]]


def _text_scores(literal: str) -> Callable[[Scores], Scores]:
    """Replace the second score by a JSON literal that a strict writer would not produce."""
    return lambda scores: [s | {"score": Literal(literal)} if n == 1 else s for n, s in enumerate(scores)]


class Literal(str):
    """Text that goes into the reply unquoted."""


SCORE_FAULTS: dict[str, Callable[[Scores], Scores]] = {
    "short": lambda s: s[:-1],
    "long": lambda s: [*s, {"id": "stranger", "score": 0.5}],
    "missing-id": lambda s: [{k: v for k, v in e.items() if k != "id"} if n == 1 else e for n, e in enumerate(s)],
    "missing-score": lambda s: [{"id": e["id"]} if n == 1 else e for n, e in enumerate(s)],
    "repeated-id": lambda s: [s[0], *s[:-1]],
    "unknown-id": lambda s: [s[0] | {"id": "stranger"}, *s[1:]],
    "reordered": lambda s: s[::-1],
    "item-error": lambda s: [s[0], s[1] | {"error": "out of memory"}, *s[2:]],
    "nan": _text_scores("NaN"),
    "infinity": _text_scores("-Infinity"),
    "huge": _text_scores("1e999"),
    "null": _text_scores("null"),
    "true": _text_scores("true"),
    "text": _text_scores('"1.0"'),
    "component-nan": lambda s: [s[0], s[1] | {"components": {"ocr": Literal("NaN")}}, *s[2:]],
    "component-text": lambda s: [s[0], s[1] | {"components": {"ocr": "0.5"}}, *s[2:]],
}
STATUS_FAULTS = (302, 400, 401, 403, 404, 408, 413, 422, 425, 429, 500, 503)
WIRE_FAULTS = ("slow", "hang", "reset", "close-after-reply", "html", "truncated-json", "truncated-body",
               "not-an-object", "error-field", "wrong-revision")  # fmt: skip
FAULTS = ("none", *WIRE_FAULTS, *SCORE_FAULTS, *(f"status-{s}" for s in STATUS_FAULTS))


class FaultServer:
    """The service. `requests` counts score requests, `keys` lists their idempotency keys in order of arrival."""

    def __init__(
        self,
        fault: str = "none",
        *,
        after: int = 1,
        times: int = 0,
        info: bool = False,
        revision: str = "fault/1",
        token: str = "",
        max_items: int = 64,
        seconds: float = 0.2,
        retry_after: str = "0",
        port: int = 0,
    ) -> None:
        if fault not in FAULTS:
            raise ValueError(f"{fault!r} is not one of {', '.join(FAULTS)}")
        self.fault, self.after, self.times, self.info = fault, after, times, info
        self.revision, self.token, self.max_items = revision, token, max_items
        self.seconds, self.retry_after, self.port = seconds, retry_after, port
        self.requests = 0
        self.infos = 0
        self.keys: list[str] = []
        self.bodies: list[bytes] = []
        self.scored: dict[str, int] = {}
        self.url = ""

    async def __aenter__(self) -> FaultServer:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/v1/info", self._get_info)
        app.router.add_post("/v1/score", self._post_score)
        app.router.add_get("/healthz", self._get_health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _get_health(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"status": "ok", "revision": self.revision, "requests": self.requests, "images": sum(self.scored.values()),
             "infos": self.infos, "keys": self.keys, "scored": self.scored}
        )  # fmt: skip

    async def _get_info(self, request: web.Request) -> web.StreamResponse:
        self.infos += 1
        revision = "swapped/2" if self.fault == "wrong-revision" and self.info else self.revision
        right = {"protocol": "nftctl-reward/1", "name": "fault", "revision": revision, "modalities": ["image"],
                 "components": ["mean"], "max_items": self.max_items}  # fmt: skip
        if self.info and self.fault not in (*SCORE_FAULTS, "wrong-revision"):
            return await self._misbehave(request, right)
        return web.json_response(right)

    async def _post_score(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "no")
        wrong = self.requests >= self.after and (not self.times or self.requests < self.after + self.times)
        if wrong and self.fault == "hang":
            await asyncio.sleep(3600)
        body = await request.read()
        self.keys.append(request.headers["Idempotency-Key"])
        self.bodies.append(body)
        scores: Scores = [_right(item) for item in json.loads(body)["items"]]
        right = {"revision": self.revision, "scores": scores}
        if not wrong or self.fault == "none":
            return self._answer(right)
        if self.fault in SCORE_FAULTS:
            return self._answer(right | {"scores": SCORE_FAULTS[self.fault](scores)})
        return await self._misbehave(request, right)

    def _answer(self, document: dict[str, object]) -> web.Response:
        self._count(document)
        return web.Response(text=_dump(document), content_type="application/json")

    def _count(self, document: dict[str, object]) -> None:
        scores = document.get("scores", [])
        assert isinstance(scores, list)
        for entry in scores:
            name = str(entry.get("id"))
            self.scored[name] = self.scored.get(name, 0) + 1

    async def _misbehave(self, request: web.Request, right: dict[str, object]) -> web.StreamResponse:
        fault = self.fault
        text = json.dumps(right)
        if fault.startswith("status-"):
            status = int(fault.removeprefix("status-"))
            # The header comes back in the message: a client must not repeat it.
            response = _error(status, f"refused {request.headers.get('Authorization', '')}")
            if status in (302, 429, 503):
                response.headers.update({"Retry-After": self.retry_after, "Location": "/elsewhere"})
            return response
        if fault in ("slow", "hang"):
            await asyncio.sleep(3600 if fault == "hang" else self.seconds)
            self._count(right)
        elif fault == "reset":
            _reset(request)
        elif fault == "close-after-reply":
            self._count(right)
            return await _close_after(request, text)
        elif fault == "truncated-body":
            return await _close_after(request, text, announce=len(text) + 100)
        elif fault == "html":
            return web.Response(text="<html>Bad gateway</html>", content_type="text/html")
        elif fault == "truncated-json":
            text = text[:-3]
        elif fault == "not-an-object":
            text = "[0.1, 0.2]"
        elif fault == "error-field":
            text = json.dumps(right | {"error": {"code": "oom", "message": "no memory"}})
        elif fault == "wrong-revision":
            text = json.dumps(right | {"revision": "swapped/2"})
        return web.Response(text=text, content_type="application/json")


def _right(item: dict[str, object]) -> dict[str, object]:
    image = item["image"]
    assert isinstance(image, dict)
    blob = base64.b64decode(image["data"])
    size = (image["width"], image["height"])
    picture = Image.frombytes("RGB", size, blob) if image["encoding"] == "raw" else Image.open(io.BytesIO(blob))
    mean = sum(ImageStat.Stat(picture).mean) / 3 / 255
    return {"id": item["id"], "score": mean, "components": {"mean": mean}}


def _dump(document: dict[str, object]) -> str:
    """JSON with `Literal` values unquoted."""
    text = json.dumps(document)
    for entry in document["scores"]:  # type: ignore[attr-defined]
        for value in (entry.get("score"), *entry.get("components", {}).values()):
            if isinstance(value, Literal):
                text = text.replace(json.dumps(str(value)), value, 1)
    return text


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": f"fault-{status}", "message": message}}, status=status)


def _reset(request: web.Request) -> None:
    """Close with RST instead of FIN."""
    assert request.transport is not None
    raw = request.transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()


async def _close_after(request: web.Request, text: str, announce: int | None = None) -> web.StreamResponse:
    """Answer as if the connection would stay open, then close it."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = announce or len(text)
    await response.prepare(request)
    await response.write(text.encode())
    assert request.transport is not None
    request.transport.close()
    return response


async def _main(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FaultServer(**vars(arguments)) as service:
        print(service.url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--after", type=int, default=1, help="first score request that misbehaves (1-based)")
    parser.add_argument("--times", type=int, default=0, help="how many misbehave; 0: all that follow")
    parser.add_argument("--info", action="store_true", help="/v1/info misbehaves too")
    parser.add_argument("--revision", default="fault/1")
    parser.add_argument("--token", default="")
    parser.add_argument("--max-items", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.2, help="delay of the fault `slow`")
    parser.add_argument("--retry-after", default="0")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_main(parser.parse_args()))
