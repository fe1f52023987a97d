"""A cosmos-rl reward service, written from the description of its wire format alone: it imports nothing of nftctl.

In a test:      async with CosmosServer(fault="dropped") as service: ...  service.url, service.tasks, service.pulls
As a process:   python tests/interop/cosmos_server.py --after 3 --fault nan     (prints its URL as the first line)

Runs the reward functions `brightness` (key `brightness`) and `channels` (keys `red`, `green`, `blue`), each in [0, 1].
Scores are ready after `polls` pulls. `after` is the first task (1-based) that misbehaves, `times` how many do (0: all
that follow). `GET /healthz` is for the tests and no part of the format.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import signal
import uuid
from typing import Any

import numpy as np
from aiohttp import web

FAULTS = ("none", "dropped", "enqueue-500", "pull-500", "no-uuid", "html", "hang", "missing-key", "short", "long",
          "nan", "null", "text", "true")  # fmt: skip
BAD_VALUES = {"nan": float("nan"), "null": None, "text": "1.0", "true": True}


class CosmosServer:
    """The service. `tasks` lists the JSON of what was enqueued, `pulls` the (uuid, type, replica) asked for."""

    def __init__(
        self,
        fault: str = "none",
        *,
        after: int = 1,
        times: int = 0,
        polls: int = 2,
        token: str = "",
        replica: str = "",
        port: int = 0,
    ) -> None:
        if fault not in FAULTS:
            raise ValueError(f"{fault!r} is not one of {', '.join(FAULTS)}")
        self.fault, self.after, self.times, self.polls = fault, after, times, polls
        self.token, self.replica, self.port = token, replica, port
        self.tasks: list[dict[str, Any]] = []
        self.shapes: list[list[int]] = []
        self.pulls: list[tuple[str, str, str]] = []
        self.pings = 0
        self.enqueued = 0
        self.url = ""
        self._ready: dict[str, tuple[dict[str, Any], int, bool]] = {}

    async def __aenter__(self) -> CosmosServer:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/api/reward/ping", self._ping)
        app.router.add_post("/api/reward/enqueue", self._enqueue)
        app.router.add_post("/api/reward/pull", self._pull)
        app.router.add_get("/healthz", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        images = sum(shape[0] for shape in self.shapes)
        return web.json_response({"requests": self.enqueued, "images": images, "pulls": len(self.pulls)})

    def _unauthorised(self, request: web.Request) -> bool:
        # The service itself checks nothing; this is the proxy before it.
        return bool(self.token) and request.headers.get("Authorization") != f"Bearer {self.token}"

    async def _ping(self, request: web.Request) -> web.Response:
        if self._unauthorised(request):
            return web.json_response({"message": "no"}, status=401)
        form = await request.post()
        json.loads(str(form["info_data"]))
        self.pings += 1
        return web.json_response({"message": "Ping request received"})

    async def _enqueue(self, request: web.Request) -> web.Response:
        if self._unauthorised(request):
            return web.json_response({"message": "no"}, status=401)
        self.enqueued += 1
        wrong = self.enqueued >= self.after and (not self.times or self.enqueued < self.after + self.times)
        assert request.headers["Content-Type"] == "application/octet-stream"
        head, _, blob = (await request.read()).partition(b"\n")
        if wrong and self.fault == "enqueue-500":
            return web.json_response({"message": "queue is broken"}, status=500)
        if wrong and self.fault == "no-uuid":
            return web.json_response({"message": "queued"})
        task = json.loads(head)
        images = np.load(io.BytesIO(blob), allow_pickle=False)
        assert task["media_type"] == "image"
        assert images.dtype == np.uint8
        assert images.ndim == 4
        assert images.shape[3] == 3
        assert len(task["prompts"]) == len(images)
        self.tasks.append(task)
        self.shapes.append(list(images.shape))
        name = str(uuid.uuid4())
        self._ready[name] = (_results(task, images), self.polls, wrong)
        return web.json_response({"uuid": name, **({"replica_id": self.replica} if self.replica else {})})

    async def _pull(self, request: web.Request) -> web.Response:
        if self._unauthorised(request):
            return web.json_response({"message": "no"}, status=401)
        form = await request.post()
        name, kind = str(form["uuid"]), str(form.get("type", "dance_grpo"))
        target = request.headers.get("X-Lepton-Replica-Target", "")
        self.pulls.append((name, kind, target))
        results, left, wrong = self._ready.get(name, ({}, 0, False))
        if left:
            self._ready[name] = (results, left - 1, wrong)
        lost = wrong and self.fault == "dropped"
        if left or lost or kind not in results or target != self.replica:
            return web.json_response({"message": "Not found scores for the request"}, status=400)
        return await self._spoilt(results[kind]) if wrong else web.json_response(results[kind])

    async def _spoilt(self, result: dict[str, Any]) -> web.Response:
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "pull-500":
            return web.json_response({"message": "store is broken"}, status=500)
        if self.fault == "html":
            return web.Response(text="<html>Bad gateway</html>", content_type="text/html")
        scores = {key: list(values) for key, values in result["scores"].items()}
        key = next(iter(scores))
        if self.fault == "missing-key":
            scores["other"] = scores.pop(key)
        elif self.fault == "short":
            scores[key].pop()
        elif self.fault == "long":
            scores[key].append(0.5)
        elif self.fault in BAD_VALUES:
            scores[key][-1] = BAD_VALUES[self.fault]
        return web.json_response(result | {"scores": scores})


def _results(task: dict[str, Any], images: np.ndarray) -> dict[str, Any]:
    """One result for every known reward function of a weight above zero."""
    means = images.reshape(len(images), -1, 3).mean(axis=1) / 255
    scores = {
        "brightness": {"brightness": means.mean(axis=1).tolist(), "word": ["light"] * len(images)},
        "channels": dict(zip(("red", "green", "blue"), means.T.tolist(), strict=True)),
    }
    info = {"shape": list(images.shape), "dtype": "torch.uint8", "min": f"{images.min():.3f}",
            "max": f"{images.max():.3f}"}  # fmt: skip
    return {
        name: {"scores": scores[name], "input_info": info, "duration": "0.01", "decoded_duration": "0.00", "type": name}
        for name, weight in task["reward_fn"].items()
        if weight > 0 and name in scores
    }


async def _main(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with CosmosServer(**vars(arguments)) as service:
        print(service.url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--after", type=int, default=1, help="first task that misbehaves (1-based)")
    parser.add_argument("--times", type=int, default=0, help="how many misbehave; 0: all that follow")
    parser.add_argument("--polls", type=int, default=2, help="pulls that come too early for each task")
    parser.add_argument("--token", default="")
    parser.add_argument("--replica", default="")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_main(parser.parse_args()))
