"""Where a run's numbers and pictures go besides its own files. None of these can stop a run or hold it up."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nftctl.run.rows import Row


class TensorBoard:
    """Event files as TensorBoard reads them, written at once and in this thread, without torch or TensorFlow.

    They repeat what metrics.jsonl holds, so a disk that takes no more ends them, with one warning, and not the run.
    """

    def __init__(
        self, folder: Path, *, enabled: bool, warn: Callable[[str], None] = lambda text: None, keep_through: int = 0
    ) -> None:
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

    def scalars(self, row: Row) -> None:
        """One scalar per numeric entry, at the row's step."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=float(value))
            for key, value in row.items()
            if key != "step" and isinstance(value, int | float)
        ]
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
