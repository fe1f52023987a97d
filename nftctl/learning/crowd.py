"""Runs side by side, each in a process of its own with one thread: so many at once, in the order given.

Owns the processes: they end with the block, whatever happens. What a run says on stderr goes to a file, whose end is
told when the run fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nftctl import itself
from nftctl.errors import TrainingFailed
from nftctl.learning.order import Order

Finished = Callable[[Order, dict[str, Any]], None]
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
MODULE = "nftctl.learning.process"


class Crowd:
    """Makes runs. Use as a context: whatever still runs when the block ends is ended."""

    def __init__(self, jobs: int, logs: Path, command: Sequence[str] = ()) -> None:
        self._jobs, self._logs, self._command = jobs, logs, list(command) or itself.command(MODULE)
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End whatever still runs; nothing more is begun."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def make(self, orders: Sequence[Order], finished: Finished) -> list[dict[str, Any]]:
        """Results in the order of the orders; `finished` hears of each as it comes. Raises TrainingFailed."""

        def one(number: int) -> dict[str, Any]:
            result = self._one(orders[number], self._logs / f"run_{number:03d}.log")
            with self._lock:
                finished(orders[number], result)
            return result

        pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="run")
        futures = [pool.submit(one, number) for number in range(len(orders))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                    raise error
            return [future.result() for future in futures]
        except BaseException:
            self.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, order: Order, log: Path) -> dict[str, Any]:
        env = os.environ | dict.fromkeys(ONE_THREAD, "1") | {"HF_HUB_OFFLINE": "1"}
        with log.open("w") as said:
            with self._lock:
                if self._closed:
                    raise TrainingFailed("stopped before this run began")
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    env=env,
                    text=True,
                )
                self._running.add(process)
            try:
                answer, _ = process.communicate(json.dumps(asdict(order)))
            finally:
                process.kill()
                process.wait()
                with self._lock:
                    self._running.discard(process)
        lines = [json.loads(line) for line in answer.splitlines()]
        if process.returncode or not lines or "result" not in lines[-1]:
            raise TrainingFailed(
                f"the run of {order.method} with seed {order.seed} ended with code {process.returncode}", log=str(log)
            )
        result: dict[str, Any] = lines[-1]["result"]
        return result
