"""Ctrl-C and SIGTERM: the first asks the run to finish its step and save, the second ends it at once.

Speaks within the handler, by a plain write, since the person at the keyboard must see at once that they were heard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The run was ended at once by a signal; nothing was saved after the last checkpoint."""

    def __init__(self, signum: int) -> None:
        name = signal.Signals(signum).name
        super().__init__(f"stopped at once by {name}; the last complete checkpoint stays valid")
        self.exit_code = 128 + signum


class StopSignals:
    """Handlers for the time of a job. Before `arm` there is nothing to save, so the first signal already ends it."""

    def __init__(self) -> None:
        self._request: Callable[[int], None] | None = None
        self._step: Callable[[], int] = int
        self._seen = 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._former = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
        if isinstance(error, KeyboardInterrupt):
            raise Stopped(self._seen or signal.SIGINT) from None

    def arm(self, request: Callable[[int], None], step: Callable[[], int]) -> None:
        """From now on the first signal calls `request(signum)`; `step` tells the number of the last finished step."""
        self._request, self._step = request, step

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first, self._seen = not self._seen, signum
        if self._request is None or not first:
            raise KeyboardInterrupt
        self._request(signum)
        write_now(f"\nfinishing step {self._step() + 1}, then saving; press again to stop now\n")


def write_now(text: str) -> None:
    """Write to stderr without its buffer, which a signal handler may have interrupted half way."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())
