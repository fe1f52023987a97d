"""Ctrl-C and SIGTERM: the first asks the run to finish its step and save, the second ends it at once.

An attempt under `--max-restarts` is ended at once by the process above it alone. What stops a whole tree of processes,
as Ray's job server does, tells both, and that process hands the same word on: told twice, the attempt is asked once.
Speaks by a plain write, past every buffer, since the person at the keyboard must see at once that they were heard.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE = signal.SIGUSR2
"""How the process above an attempt hands on that it was told a second time."""
WAKE = signal.SIGURG
"""Sent to the main thread alone, so that it looks up. Means nothing, and one that comes late is ignored by default."""
RESTARTS_LEFT = "_NFTCTL_RESTARTS_LEFT"
"""Set for an attempt under `--max-restarts`: how many more may follow it. No key of a profile, so it has no section."""
TYPED = "_NFTCTL_TYPED"
"""Likewise: the command line as it was typed, as JSON, since an attempt is started with other words."""
NOTHING = "nothing was saved"
STARTING = "ending the start, a matter of seconds; press again to stop now"
ENDING = "the last step is done: ending; press again to stop now"


class Interrupted(Exception):
    """A command without a job was ended by Ctrl-C."""


class Stopped(Exception):
    """The command was ended at once by a signal; nothing more was saved. `left` says what there is then."""

    def __init__(self, signum: int, left: str = NOTHING) -> None:
        name = signal.Signals(signum).name
        super().__init__(f"stopped at once by {name}; {left}")
        self.exit_code = 128 + signum


class StopSignals:
    """Handlers for the time of a job. Before `arm` there is nothing to save, so the first signal already ends it.

    `left` says what there is of a job that was ended at once; it is asked at the end. A thread hears and counts the
    signals, through the pipe that the interpreter's own handler writes to: the main thread may be busy for a second,
    and would then find two presses of Ctrl-C as one.
    """

    def __init__(self, left: Callable[[], str] | str = NOTHING) -> None:
        self._left = left
        self._is_attempt = RESTARTS_LEFT in os.environ
        self._request: Callable[[int], None] | None = None
        self._step: Callable[[], int] = int
        self._stage: Callable[[], str] = str
        self._seen: list[int] = []
        self._end_now = False
        self._leaving = False
        self._looked = threading.Event()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        heard = (*SIGNALS, AT_ONCE) if self._is_attempt else SIGNALS
        self._former = {signum: signal.signal(signum, self._handle) for signum in heard}
        self._former_wake = signal.signal(WAKE, lambda signum, frame: None)
        self._former_mouth = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, args=(ear,), name="signals", daemon=True)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        self._looked.set()
        signal.set_wakeup_fd(self._former_mouth)
        os.close(self._mouth)
        self._listener.join()
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
        signal.signal(WAKE, self._former_wake)
        if isinstance(error, KeyboardInterrupt) or (error is None and self._end_now):
            asked = [signum for signum in self._seen if signum != AT_ONCE]
            left = self._left if isinstance(self._left, str) else self._left()
            raise Stopped(asked[-1] if asked else signal.SIGINT, left) from None

    def arm(self, request: Callable[[int], None], step: Callable[[], int], stage: Callable[[], str] = str) -> None:
        """From now on the first signal calls `request(signum)`; `step` tells the number of the last finished step.

        While `stage` says "starting" there is nothing to finish, and the first signal ends the job; once it says
        "ending" there is no step to finish.
        """
        self._request, self._step, self._stage = request, step, stage

    def _listen(self, ear: int) -> None:
        """Until the other end is closed: ask at the first signal, end at every further one that counts."""
        echoes = 0
        while heard := os.read(ear, 1):
            if heard[0] not in self._former:
                continue
            if echoes:
                echoes -= 1
                continue
            self._seen.append(heard[0])
            if self._request is not None and self._is_attempt and heard[0] != AT_ONCE and len(self._seen) > 1:
                continue
            first = self._request is not None and heard[0] != AT_ONCE and len(self._seen) == 1
            stage = self._stage()
            if self._request is not None and first and stage != "starting":
                self._request(heard[0])
                write_now(f"\n{self._asked(stage)}\n")
            else:
                if first:
                    write_now(f"\n{STARTING}\n")
                self._end_now = True
                # The main thread may have looked before this was known. This makes it look again, and writes into
                # the pipe as a signal does.
                echoes += 1
                _thread.interrupt_main(signal.Signals(heard[0]))
                self._wake()
        os.close(ear)

    def _asked(self, stage: str) -> str:
        step = self._step()
        what = f"finishing step {step + 1}, then saving" if step else "ending before or after the first step"
        return ENDING if stage == "ending" else f"{what}; press again to stop now"

    def _wake(self) -> None:
        """Until the main thread has looked: it may be waiting in a lock, from which a signal of its own wakes it.

        One that comes just before it begins to wait is lost, so it is sent again.
        """
        self._looked.clear()
        while not self._leaving:
            signal.pthread_kill(threading.main_thread().ident or 0, WAKE)
            if self._looked.wait(0.1):
                return

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._end_now and not self._leaving:
            self._end_now = False
            self._looked.set()
            raise KeyboardInterrupt


def write_now(text: str) -> None:
    """Write to stderr without its buffer, which another thread may be filling."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())
