"""A job server on loopback that answers as that of Ray 2.60 does, with jobs that tests make; it starts nothing.

Paths, fields, statuses and refusals are those of Ray's REST interface for jobs. `asked` remembers each request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSCloseCode, web

PUBLIC = ("/api/authentication_mode",)


@dataclass
class FakeJobs:
    """The server's state. `ends` is status and exit code of a job that is followed to its end."""

    token: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    printed: list[str] = field(default_factory=lambda: ["one\n", "two\n"])
    ends: tuple[str, int | None] = ("SUCCEEDED", 0)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""
    knows_modes: bool = True

    def add(self, id: str, status: str = "RUNNING", code: int | None = None) -> None:
        """A job that is there already."""
        self.jobs[id] = {
            "type": "SUBMISSION", "job_id": None, "submission_id": id, "status": status, "message": f"Job is {status}.",
            "metadata": {"job_name": "first"}, "driver_exit_code": code,
        }  # fmt: skip

    def app(self) -> web.Application:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            said = request.headers.get("Authorization")
            self.asked.append((request.method, request.path, said))
            if self.token and request.path not in PUBLIC:
                if said is None:
                    return web.Response(status=401, text="Unauthorized: Missing authentication token")
                if said != f"Bearer {self.token}":
                    return web.Response(status=403, text="Forbidden: Invalid authentication token")
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(middlewares=[guard])
        app.add_routes(
            [
                web.get("/api/authentication_mode", self._mode),
                web.get("/api/version", self._version),
                web.post("/api/jobs/", self._submit),
                web.get("/api/jobs/{id}", self._status),
                web.post("/api/jobs/{id}/stop", self._stop),
                web.get("/api/jobs/{id}/logs", self._logs),
                web.get("/api/jobs/{id}/logs/tail", self._tail),
            ]
        )
        return app

    async def _mode(self, request: web.Request) -> web.Response:
        if not self.knows_modes:
            raise web.HTTPNotFound
        return web.json_response({"authentication_mode": "token" if self.token else "disabled"})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": "2.60.0", "ray_commit": "c", "session_name": "s"})

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if not isinstance(body.get("entrypoint"), str):
            return web.Response(status=400, text="Traceback\nTypeError: entrypoint must be a string")
        id = f"raysubmit_{len(self.jobs)}"
        self.add(id, "PENDING")
        return web.json_response({"job_id": id, "submission_id": id})

    def _job(self, request: web.Request) -> dict[str, Any]:
        id = request.match_info["id"]
        if id not in self.jobs:
            raise web.HTTPNotFound(text=f"Job {id} does not exist")
        return self.jobs[id]

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request))

    async def _stop(self, request: web.Request) -> web.Response:
        job = self._job(request)
        going = job["status"] in ("PENDING", "RUNNING")
        if going:
            job["status"] = "STOPPED"
        return web.json_response({"stopped": going})

    async def _logs(self, request: web.Request) -> web.Response:
        self._job(request)
        return web.json_response({"logs": "".join(self.printed)})

    async def _tail(self, request: web.Request) -> web.WebSocketResponse:
        job = self._job(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for text in self.printed:
            await socket.send_str(text)
        if self.ends[0] == "CUT":
            await socket.close(code=WSCloseCode.INTERNAL_ERROR)
            return socket
        # As with Ray, the log is at its end a moment before the status is.
        asyncio.get_running_loop().call_later(
            0.1, job.update, {"status": self.ends[0], "driver_exit_code": self.ends[1]}
        )
        return socket


@contextmanager
def serving(fake: FakeJobs) -> Iterator[FakeJobs]:
    """Serve it from a thread, on a free port; `fake.address` says which."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(fake.app(), access_log=None)

    async def begin() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.address = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
