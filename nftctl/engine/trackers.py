"""Where a run's numbers and pictures go besides its own files. None of these can stop a run or hold it up.

TensorBoard's files are written at once, on the disk that metrics.jsonl is on. W&B and trackio may talk to a network, so
each has a process of its own, which is fed from a bounded queue and ended when it does not end itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from nftctl import itself
from nftctl.engine.tracker_process import CLOSE_S
from nftctl.run.rows import Row

if TYPE_CHECKING:
    from nftctl.engine.plan import JobPlan
    from nftctl.profile.schema import Profile
    from nftctl.run.directory import RunDirectory

ROOM = 256
"""Rows and pictures that wait for a tracker at the most; further ones are left out there."""

Warn = Callable[[str], None]


class Tracker(Protocol):
    """What one tracker takes."""

    def scalars(self, row: Row) -> None:
        """Every numeric entry, at the row's step."""

    def image(self, tag: str, step: int, path: Path) -> None:
        """A PNG file."""

    def close(self) -> None:
        """No more will follow."""


class Trackers:
    """All trackers of one attempt."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    @classmethod
    def of(cls, plan: JobPlan, run: RunDirectory, warn: Warn) -> Trackers:
        """Those that the plan's profile asks for, told the hyperparameters.

        Every attempt is a run of its own at W&B and trackio, in the group of the run's id: what was taken back by going
        on from an older checkpoint stays where it is, and no step is sent to a tracker that is already beyond it.
        """
        logging, values, step = plan.profile.logging, hyperparameters(plan.profile), plan.kept_through
        board = TensorBoard(run.path / "tensorboard", enabled=logging.tensorboard, warn=warn, keep_through=step)
        board.hyperparameters(values)
        attempt = (run.logs / "latest").resolve()
        about = {
            "project": logging.project,
            "group": plan.run_id,
            "name": run.name if attempt.name == "attempt_1" else f"{run.name}-{attempt.name}",
            "folder": str(run.path),
            "values": values,
        }
        asked = {"wandb": logging.wandb, "trackio": logging.trackio}
        remote = [Remote(name, about, attempt / f"{name}.log", warn) for name, wanted in asked.items() if wanted]
        return cls([board, *remote])

    def scalars(self, row: Row) -> None:
        """A row to every tracker."""
        for tracker in self._trackers:
            tracker.scalars(row)

    def image(self, tag: str, step: int, path: Path) -> None:
        """A picture to every tracker."""
        for tracker in self._trackers:
            tracker.image(tag, step, path)

    def close(self) -> None:
        """End every tracker, each within `CLOSE_S` seconds."""
        for tracker in self._trackers:
            tracker.close()


def hyperparameters(profile: Profile) -> dict[str, bool | float | str]:
    """The values that differ from the schema's defaults, by dotted key; an array is its JSON text."""
    return dict(_leaves("", profile.model_dump(exclude_defaults=True)))


def _leaves(prefix: str, node: Any) -> Iterator[tuple[str, bool | float | str]]:
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        for key, below in node.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), below)
    elif node is not None:
        yield prefix, node if isinstance(node, bool | int | float | str) else orjson.dumps(node).decode()


class TensorBoard:
    """Event files as TensorBoard reads them, written at once and in this thread, without torch or TensorFlow.

    They repeat what metrics.jsonl holds, so a disk that takes no more ends them, with one warning, and not the run.
    """

    def __init__(self, folder: Path, *, enabled: bool, warn: Warn = lambda text: None, keep_through: int = 0) -> None:
        """A run that goes on from step `keep_through` takes back the events of later steps."""
        self._warn = warn
        self._writer: Any = None
        if enabled:
            with self._excused():
                self._open(folder, keep_through)

    def _open(self, folder: Path, keep_through: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Read in the order of their names; `tfevents` is what makes them event files.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if keep_through:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=keep_through + 1, session_log=start))

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """The values as one session of the hparams plugin."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        with self._excused():
            self._write(Event(wall_time=time.time(), summary=hparams_pb(dict(values))))

    def scalars(self, row: Row) -> None:
        """One scalar per numeric entry, at the row's step."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in _numbers(row).items()]
        with self._excused():
            self._write(Event(wall_time=time.time(), step=int(row["step"]), summary=Summary(value=values)))

    def image(self, tag: str, step: int, path: Path) -> None:
        """A PNG file as an image event."""
        if self._writer is None:
            return
        from PIL import Image
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        with self._excused():
            with Image.open(path) as picture:
                width, height = picture.size
            content = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
            summary = Summary(value=[Summary.Value(tag=tag, image=content)])
            self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    @contextlib.contextmanager
    def _excused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            self._writer = None
            self._warn(f"no more events for TensorBoard: {error.strerror or error}; metrics.jsonl goes on")

    def close(self) -> None:
        """Close the event file; every event is in it already."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # closing tries once more to write what was refused
                self._writer.close()


class Remote:
    """A tracker in a process of its own: what it prints, asks, waits for or registers to be done at exit stays there.

    One thread feeds it, so that a process that reads no more blocks that thread and nothing else. All warnings come
    from the calls below, each of which returns at once but for `close`.
    """

    def __init__(self, name: str, about: Mapping[str, Any], log: Path, warn: Warn) -> None:
        """`log` takes what the process prints; its last line is the reason when it fails."""
        self.name = name
        self.lost = 0
        """Rows and pictures that were left out because too many were waiting."""
        self._warn, self._log = warn, log
        self._waiting: queue.Queue[Sequence[Any] | None] = queue.Queue(ROOM)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with log.open("ab") as sink:
                self._process = subprocess.Popen(
                    itself.command("nftctl.engine.tracker_process", name),
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the run
                )
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        threading.Thread(target=self._feed, args=(self._process.stdin,), name=name, daemon=True).start()
        self._put("open", about)

    def scalars(self, row: Row) -> None:
        """A row, without what is not a number."""
        self._put("scalars", int(row["step"]), _numbers(row))

    def image(self, tag: str, step: int, path: Path) -> None:
        """A PNG file, which must stay where it is."""
        self._put("image", tag, step, str(path.resolve()))

    def close(self) -> None:
        """Wait for the rest to be taken, `CLOSE_S` seconds at the most."""
        if self._process is None:
            return
        end, code = time.monotonic() + CLOSE_S, None
        try:
            self._waiting.put(None, timeout=CLOSE_S)
            code = self._process.wait(max(0.0, end - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            code = self._process.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._warn(f"{self.name} did not take its last rows within {CLOSE_S} s; metrics.jsonl has them all")
            self._process = None
        elif code:
            self._end(self._last_words())

    def _put(self, *message: Any) -> None:
        if self._process is None:
            return
        if self._process.poll() is not None:
            self._end(self._last_words())
            return
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            if not self.lost:
                self._warn(f"{self.name} does not keep up and is not sent every row; metrics.jsonl has them all")
            self.lost += 1

    def _feed(self, pipe: Any) -> None:
        with contextlib.suppress(OSError), pipe:  # the process has ended, which the next call finds out
            while (message := self._waiting.get()) is not None:
                pipe.write(orjson.dumps(message) + b"\n")
                pipe.flush()

    def _end(self, reason: str) -> None:
        self._process = None
        self._warn(f"no more rows for {self.name}: {reason}; metrics.jsonl goes on")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="backslashreplace").split("\n") if self._log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "its process ended")


def _numbers(row: Row) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key != "step" and isinstance(value, int | float)}
