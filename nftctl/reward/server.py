"""A reward server as a process: `make_app` for an application around a scorer, `serve` until it is told to stop.

Owns the address, the signals, and the end: requests in flight are answered within a grace, nothing is started any more,
and no worker outlives the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from nftctl.errors import RewardFailed
from nftctl.reward.cosmos_server import CosmosTasks
from nftctl.reward.idempotency import AnswerMemory
from nftctl.reward.judge import Judge
from nftctl.reward.mixture import Mixture, Part, load_mixture
from nftctl.reward.pool import Pool, ProcessPool, Served, ThreadPool
from nftctl.reward.scorers import Scorer
from nftctl.reward.service import BYTES_PER_ITEM, Service, make_service

MAX_ITEMS = 64
STOP_GRACE_S = 10.0
PARENT_POLL_S = 0.5

_log = logging.getLogger(__name__)


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
    """An application that serves `scorer` under `revision`, scoring in this process.

    `max_body` in bytes, by default room for `max_items` 1024x1024 images; `workers` threads score at the same time, so
    more than one needs a scorer that allows it. Without `token` everybody who can connect may ask.
    """
    mixture = scorer if isinstance(scorer, Mixture) else Mixture([Part(scorer)])
    pool = ThreadPool(Judge(mixture, revision, max_items, token), workers)
    return app_around(pool, token, max_body=max_body, memory=memory)


def app_around(
    pool: Pool, token: str = "", *, max_body: int | None = None, memory: AnswerMemory | None = None
) -> web.Application:
    """An application that serves what `pool` scores, over both protocols."""
    limit = pool.info.max_items * BYTES_PER_ITEM if max_body is None else max_body
    tasks = CosmosTasks(pool.names, pool.info.max_items, pending_bytes=2 * limit)
    return make_service(Service(pool, token, AnswerMemory() if memory is None else memory, tasks, limit))


def serve(
    scorers: Sequence[str],
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
    """Serve `scorers` (see `mixture`) until SIGTERM or SIGINT, or until `parent_pid` is no longer this one's parent.

    With a parent SIGTERM is not heard: what ends a whole tree of processes would take the scores from a run that still
    has a step to finish. The parent sends SIGINT.
    Meant for a process of its own. One worker scores in a thread of this process, more are processes. `ready` is called
    once with the real URL (port 0 takes a free one). `revision` is the scorers' own when empty. Raises RewardFailed for
    scorers that cannot be loaded or an address that cannot be bound.
    """
    pool: Pool
    if workers == 1:
        mixture = load_mixture(scorers)
        pool = ThreadPool(Judge(mixture, revision or mixture.revision(), max_items, token), 1)
    else:
        pool = ProcessPool(Served(tuple(scorers), revision, max_items, token), workers)
    try:
        asyncio.run(_serve(app_around(pool, token), host, port, parent_pid, ready))
    finally:
        pool.close()
    if pool.busy:
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
            heard = parent_pid is None or number == signal.SIGINT
            loop.add_signal_handler(number, stop.set if heard else _wait_for_parent)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_GRACE_S)
    await runner.setup()
    try:
        await _listen(runner, host, port)
        if ready is not None:
            ready(_url(runner.addresses[0]))
        await _until(stop, parent_pid)
    finally:
        await runner.cleanup()


def _wait_for_parent() -> None:
    _log.info("SIGTERM: serving on until the parent says so, or is gone")


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
