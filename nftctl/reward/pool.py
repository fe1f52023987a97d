"""Where scoring happens: in threads of this process, or in worker processes that each hold the scorers.

Owns starting the workers, their end, and what a worker that died means (500, and new workers for the next request).
Worker processes are spawned, get a request's bytes and give back an answer's bytes, so decoding an image never takes
time from the process that talks to clients. They end when this process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Literal, Protocol

from nftctl.errors import RewardFailed
from nftctl.reward.judge import Answer, Judge
from nftctl.reward.mixture import load_mixture
from nftctl.reward.protocol import RequestRefused, ServiceInfo

START_TIMEOUT_S = 600.0
"""Seconds for every worker to load its scorers: a large model may have to be fetched first."""

Kind = Literal["score", "task"]


class Pool(Protocol):
    """Something that judges requests; the event loop stays free meanwhile."""

    info: ServiceInfo
    names: tuple[str, ...]

    @property
    def busy(self) -> int:
        """Requests that are being scored, whether or not anybody still waits for them."""
        ...

    async def judge(self, kind: Kind, body: bytes, key: str = "") -> Answer:
        """The answer to a /v1/score body with its key, or to a cosmos-rl task; RequestRefused."""
        ...

    def close(self) -> None:
        """Start nothing any more."""
        ...


class ThreadPool:
    """Scores in `workers` threads of this process; more than one needs a scorer that allows it."""

    def __init__(self, judge: Judge, workers: int) -> None:
        self.info, self.names = judge.info, judge.names
        self._judge = judge
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="scorer")
        self._lock = threading.Lock()
        self._busy = 0

    @property
    def busy(self) -> int:
        """Scorer threads that have not come back."""
        return self._busy

    async def judge(self, kind: Kind, body: bytes, key: str = "") -> Answer:
        """Decoded in any thread, so that the next request is ready when a scorer thread comes free."""
        run = asyncio.get_running_loop().run_in_executor
        if kind == "task":
            task = await asyncio.to_thread(self._judge.read_task, body)
            return await run(self._threads, self._counted, lambda: self._judge.answer_task(task))
        request = await asyncio.to_thread(self._judge.read, body, key)
        return await run(self._threads, self._counted, lambda: self._judge.answer(request))

    def close(self) -> None:
        """Let no thread start any more scoring."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _counted(self, answer: Callable[[], Answer]) -> Answer:
        with self._lock:
            self._busy += 1
        try:
            return answer()
        finally:
            with self._lock:
                self._busy -= 1


@dataclass(frozen=True, slots=True)
class Served:
    """What the workers load, and under which revision ("": their own)."""

    scorers: tuple[str, ...]
    revision: str
    max_items: int
    token: str


class ProcessPool:
    """Scores in `workers` processes, spawned. Raises RewardFailed when they cannot load the scorers."""

    def __init__(self, served: Served, workers: int) -> None:
        self._served = served
        self._workers = workers
        self._busy = 0
        self._pids: set[int | None] = set()
        self._pool, self.info, self.names = self._start()

    @property
    def busy(self) -> int:
        """Requests that some worker has and has not answered."""
        return self._busy

    async def judge(self, kind: Kind, body: bytes, key: str = "") -> Answer:
        """The whole judgement in one worker. RequestRefused (500) when it died over it."""
        pool = self._pool
        self._busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, _judge, kind, body, key)
        except BrokenProcessPool:
            await self._renew(pool)
            raise RequestRefused(500, "worker-died", "the process that scored this request died") from None
        finally:
            self._busy -= 1

    def close(self) -> None:
        """End the workers; one that is busy is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._busy:
            self._kill()

    async def _renew(self, broken: Executor) -> None:
        """New workers in place of `broken`, once however many requests it took down."""
        if self._pool is broken:
            self._kill()
            self._pool, *_ = await asyncio.to_thread(self._start)

    def _start(self) -> tuple[ProcessPoolExecutor, ServiceInfo, tuple[str, ...]]:
        context = multiprocessing.get_context("spawn")
        before = {child.pid for child in multiprocessing.active_children()}
        pool = ProcessPoolExecutor(self._workers, context, _begin, (self._served, context.Barrier(self._workers)))
        # The barrier keeps a quick worker from taking a second of these, so that each one loads.
        loading = [pool.submit(_load) for _ in range(self._workers)]
        self._pids = {child.pid for child in multiprocessing.active_children()} - before
        try:
            loaded = [future.result(START_TIMEOUT_S) for future in loading]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            self._kill()
            if isinstance(error, BrokenProcessPool | TimeoutError | threading.BrokenBarrierError):
                text = "a worker process ended while it loaded the scorers; what it said is above"
                raise RewardFailed(text) from None
            raise
        return pool, *loaded[0]

    def _kill(self) -> None:
        for child in multiprocessing.active_children():
            if child.pid in self._pids:
                child.kill()


# ---------------------------------------------------------------------------------------------- in a worker

_served: Served | None = None
_barrier: Barrier | None = None
_loaded: Judge | None = None


def _begin(served: Served, barrier: Barrier) -> None:
    """Runs first in every worker."""
    global _served, _barrier
    _served, _barrier = served, barrier
    for number in (signal.SIGINT, signal.SIGTERM):
        # A signal to the whole group is the parent's to answer: it lets requests in flight end first.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _load() -> tuple[ServiceInfo, tuple[str, ...]]:
    """Load the scorers; what this worker serves, and the scorers' names."""
    global _loaded
    assert _served is not None
    assert _barrier is not None
    _barrier.wait(START_TIMEOUT_S)
    mixture = load_mixture(_served.scorers)
    _loaded = Judge(mixture, _served.revision or mixture.revision(), _served.max_items, _served.token)
    return _loaded.info, _loaded.names


def _judge(kind: Kind, body: bytes, key: str) -> Answer:
    assert _loaded is not None
    if kind == "task":
        return _loaded.answer_task(_loaded.read_task(body))
    return _loaded.answer(_loaded.read(body, key))
