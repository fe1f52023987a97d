"""The process of one tracker: takes messages from its standard input and gives them to the tracker's own library.

`python -m nftctl.engine.tracker_process NAME`. Ends with the input; a tracker that does not end then, or whose run has
gone, is given `CLOSE_S` seconds. The first failure ends it, and is the last line that it prints.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

CLOSE_S = 5
"""Seconds that a tracker has for what is left when the run has ended."""


class Service(Protocol):
    """A tracker's library, opened for one run."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one step."""

    def image(self, tag: str, step: int, path: str) -> None:
        """A PNG file."""

    def close(self) -> None:
        """Send what is left."""


class Wandb:
    """W&B. Its key, its host and whether it is offline are what its own environment variables say."""

    def __init__(self, *, project: str, group: str, name: str, folder: str, values: Mapping[str, Any]) -> None:
        import wandb

        self._image = wandb.Image
        # Silent: it then never asks for a key, and what it has to say is in its own logs.
        settings = wandb.Settings(console="off", silent=True, finish_timeout=CLOSE_S - 1, finish_timeout_raises=True)
        self._run = wandb.init(
            project=project, group=group, name=name, dir=folder, config=dict(values), settings=settings
        )
        print(getattr(self._run, "url", None) or "offline", flush=True)  # for the log, since it is silent itself
        # Its own count of calls is no step: a row and an evaluation of one step are two calls.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One call with the step beside the values."""
        self._run.log({"step": step, **values})

    def image(self, tag: str, step: int, path: str) -> None:
        """A copy in W&B's folder."""
        self._run.log({"step": step, tag: self._image(path)})

    def close(self) -> None:
        """Wait for the upload; offline there is none."""
        self._run.finish()


class Trackio:
    """trackio: its database lies where its own environment variables say, or in the person's cache."""

    def __init__(self, *, project: str, group: str, name: str, folder: str, values: Mapping[str, Any]) -> None:
        import trackio

        self._image = trackio.Image
        self._run = trackio.init(
            project, name, group=group, config=dict(values), embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """At the run's step, not at a count of calls."""
        self._run.log(dict(values), step=step)

    def image(self, tag: str, step: int, path: str) -> None:
        """A copy in trackio's folder."""
        self._run.log({tag: self._image(path)}, step=step)

    def close(self) -> None:
        """Write or send what is left."""
        self._run.finish()


SERVICES: Mapping[str, Callable[..., Service]] = {"wandb": Wandb, "trackio": Trackio}


def main(name: str) -> int:
    """Until the input ends; the exit code."""
    threading.Thread(target=_outlive_nobody, args=(os.getppid(),), daemon=True).start()
    messages = map(json.loads, sys.stdin)
    try:
        (_, about) = next(messages)
        service = SERVICES[name](**about)
        for method, *arguments in messages:
            getattr(service, method)(*arguments)
        service.close()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        print(f"{type(error).__name__}: {first}".removesuffix(": "), flush=True)
        return 1
    return 0


def _outlive_nobody(parent: int) -> None:
    """A tracker may hang anywhere, so this looks on from outside."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(CLOSE_S)
    os._exit(1)


if __name__ == "__main__":
    ended = main(sys.argv[1])
    sys.stdout.flush()
    # What the library registered to be done at exit has no time limit.
    os._exit(ended)
