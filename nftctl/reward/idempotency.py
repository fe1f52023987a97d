"""Memory of answered requests, so that a repeated key is scored once.

Owns the rule: same key and same body, the first answer; same key and another body, refused (422); a repeat that
arrives while the first is being scored waits for it. Keeps only good answers (a failure may be tried again), and is
bounded by count and age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from nftctl.reward.protocol import RequestRefused


@dataclass(slots=True)
class _Entry:
    digest: bytes
    answer: asyncio.Task[bytes]
    answered: float | None = None


class AnswerMemory:
    """Answers by key. At most `count` finished ones, none older than `age_s` seconds of `clock`."""

    def __init__(
        self, *, count: int = 4096, age_s: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count = count
        self._age_s = age_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    async def once(self, key: str, digest: bytes, make: Callable[[], Coroutine[Any, Any, bytes]]) -> tuple[bytes, bool]:
        """The answer for `key` and whether it is a repeat. `make` runs at most once at a time for a key.

        Raises RequestRefused (422) for another digest, or whatever `make` raised.
        """
        self._forget()
        entry = self._entries.get(key)
        repeated = entry is not None
        if entry is None:
            entry = self._entries[key] = _Entry(digest, asyncio.create_task(make()))
            entry.answer.add_done_callback(lambda _: self._settle(key))
        elif entry.digest != digest:
            raise RequestRefused(422, "key-reused", f"the key {key!r} was used before with another body")
        # Shielded: a client that hangs up must not cancel the scoring that a repeat is waiting for.
        return await asyncio.shield(entry.answer), repeated

    def _settle(self, key: str) -> None:
        entry = self._entries[key]
        if entry.answer.cancelled() or entry.answer.exception() is not None:
            del self._entries[key]
        else:
            entry.answered = self._clock()
            self._forget()

    def _forget(self) -> None:
        oldest = self._clock() - self._age_s
        finished = [k for k, e in self._entries.items() if e.answered is not None]
        surplus = len(self._entries) - self._count
        for n, key in enumerate(finished):
            answered = self._entries[key].answered
            if n < surplus or (answered is not None and answered < oldest):
                del self._entries[key]
