"""The tasks of `cosmos-rl` clients between enqueue and pull: scored in the background, kept a while, then forgotten.

Owns the bounds. Unlike the original, a task that was accepted is never thrown away: when too many wait, or they hold
too many bytes, the next enqueue is answered 429, which those clients try again. Results may be pulled more than once.
A scorer's failure is answered to the pull as such and is never a score.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from nftctl.reward.cosmos_wire import Ticket
from nftctl.reward.judge import read_task
from nftctl.reward.protocol import RequestRefused

MAX_PENDING = 60
"""Tasks that may wait; what the original calls pending tasks."""

Score = Callable[[bytes], Coroutine[Any, Any, dict[str, bytes]]]


@dataclass(slots=True)
class _Task:
    size: int
    work: asyncio.Task[dict[str, bytes]]
    done: float | None = None


class CosmosTasks:
    """Tasks by uuid. At most `pending` unscored ones with `pending_bytes` in all; `kept` results of `age_s` seconds."""

    def __init__(
        self,
        names: Sequence[str],
        max_items: int,
        *,
        pending_bytes: int,
        pending: int = MAX_PENDING,
        kept: int = 1024,
        age_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._max_items = max_items
        self._pending = pending
        self._pending_bytes = pending_bytes
        self._kept = kept
        self._age_s = age_s
        self._clock = clock
        self._tasks: dict[str, _Task] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def enqueue(self, body: bytes, score: Score) -> Ticket:
        """Begin to score `body`. RequestRefused: 400 and 413 for what cannot be scored, 429 when too much waits."""
        self._forget()
        self._refuse_too_much(len(body))
        # What is wrong with a task must be said now: a pull has no other word for it than "not found".
        await asyncio.to_thread(read_task, body, self._names, self._max_items)
        self._refuse_too_much(len(body))
        name = str(uuid.uuid4())
        task = self._tasks[name] = _Task(len(body), asyncio.create_task(score(body)))
        task.work.add_done_callback(lambda _: self._settle(task))
        return Ticket(name)

    def pull(self, name: str, reward_fn: str) -> bytes | None:
        """The result of a task for one of its rewards; None: not yet, not any more, or never asked for.

        RequestRefused when its scorer failed.
        """
        self._forget()
        task = self._tasks.get(name)
        return task.work.result().get(reward_fn) if task is not None and task.done is not None else None

    def close(self) -> None:
        """Wait for nothing any more."""
        for task in self._tasks.values():
            task.work.cancel()

    def _refuse_too_much(self, size: int) -> None:
        waiting = [task.size for task in self._tasks.values() if task.done is None]
        # One task is always taken, however large: the body limit has passed it.
        if waiting and (len(waiting) >= self._pending or sum(waiting) + size > self._pending_bytes):
            raise RequestRefused(
                429, "too-many-tasks", f"{len(waiting)} tasks are waiting to be scored; try again later"
            )

    def _settle(self, task: _Task) -> None:
        if not task.work.cancelled():
            # Looked at, so that a failure nobody pulls is no warning of asyncio's.
            task.work.exception()
            task.done = self._clock()

    def _forget(self) -> None:
        oldest = self._clock() - self._age_s
        done = [name for name, task in self._tasks.items() if task.done is not None]
        surplus = len(done) - self._kept
        for n, name in enumerate(done):
            finished = self._tasks[name].done
            if n < surplus or (finished is not None and finished < oldest):
                del self._tasks[name]
