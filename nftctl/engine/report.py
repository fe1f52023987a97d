"""What a run says while it runs, and the pictures it leaves: the reporter protocol, metric files, image grids.

Owns `metrics.jsonl`, `evaluations.jsonl`, TensorBoard events and the PNG grids. Refuses a number that is not finite.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from nftctl.errors import CheckpointUnusable, TrainingFailed
from nftctl.run.directory import atomic_write
from nftctl.run.disk import cure

if TYPE_CHECKING:
    import numpy as np

Row = Mapping[str, Any]


class Reporter(Protocol):
    """Where a run talks to a person."""

    def note(self, text: str) -> None:
        """One line about what happens now."""

    def warn(self, text: str) -> None:
        """One line that deserves attention."""

    def step(self, row: Mapping[str, float], total: int) -> None:
        """A finished step: its metrics row, and the number of steps of the whole run."""

    def done(self) -> None:
        """No more steps will follow."""


def require_finite(row: Row) -> None:
    """Refuse a row with NaN or infinity: JSON would store null and nobody would notice."""
    bad = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        raise TrainingFailed(f"step {row.get('step', '?')}: not finite: {', '.join(sorted(bad))}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            break
    return rows


class JsonLines:
    """An append-only JSON-lines file whose rows have rising steps, each step once."""

    def __init__(self, path: Path, *, keep_through: int) -> None:
        """Keep rows up to step `keep_through`; a resumed run writes the later ones again."""
        rows = read_rows(path)
        kept = [row for row in rows if row["step"] <= keep_through]
        if path.exists():
            atomic_write(path, b"".join(orjson.dumps(row) + b"\n" for row in kept))
        self._file = path.open("ab")
        self.rows: list[dict[str, Any]] = kept
        self.dropped = [int(row["step"]) for row in rows if row["step"] > keep_through]
        """Steps whose rows were taken out because they are beyond `keep_through`."""

    def append(self, row: Row) -> None:
        """Write one row and flush it to the operating system."""
        require_finite(row)
        self._file.write(orjson.dumps(dict(row)) + b"\n")
        self._file.flush()
        self.rows.append(dict(row))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def done_again(metrics: JsonLines, step: int) -> str:
    """What a run that goes on from the checkpoint of `step` says of later steps; empty when there were none."""
    if not metrics.dropped:
        return ""
    first, last, count = step + 1, max(metrics.dropped), len(metrics.dropped)
    steps, them = (f"step {last}", "is") if first == last else (f"steps {first} to {last}", "are")
    rows = "1 row of metrics.jsonl is" if count == 1 else f"{count} rows of metrics.jsonl are"
    return f"{steps} had been taken after that checkpoint and {them} done again; {rows} replaced"


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


def write_grid(
    path: Path, images: np.ndarray, prompts: Sequence[str], title: str, *, captions: Sequence[str] = ()
) -> None:
    """Write a PNG grid: one row per prompt, one column per sample, prompts on the left, `captions` over the columns.

    images: uint8 [prompts, columns, H, W, 3]. Small images are enlarged without smoothing, so that pixels stay pixels.
    Raises CheckpointUnusable when the disk does not take it.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows, columns, height, width, _ = images.shape
    zoom = max(1, 64 // max(height, width))
    cell_h, cell_w, gap, head = height * zoom, width * zoom, 4, 40 if captions else 22
    font = ImageFont.load_default(size=13)
    label = int(max(font.getlength(text) for text in [*(p[:60] for p in prompts), ""])) + 16
    width_px = max(label + columns * (cell_w + gap) + gap, int(font.getlength(title)) + 16)
    sheet = Image.new("RGB", (width_px, head + rows * (cell_h + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((8, 4), title, fill="black", font=font)
    for j, caption in enumerate(captions):
        draw.text((label + gap + j * (cell_w + gap), 22), caption, fill="black", font=font)
    for i in range(rows):
        top = head + gap + i * (cell_h + gap)
        draw.text((8, top + cell_h // 2 - 8), prompts[i][:60], fill="black", font=font)
        for j in range(columns):
            tile = Image.fromarray(images[i, j]).resize((cell_w, cell_h), Image.Resampling.NEAREST)
            sheet.paste(tile, (label + gap + j * (cell_w + gap), top))
    try:
        sheet.save(path)
    except OSError as error:
        raise CheckpointUnusable(f"cannot write {path}: {error.strerror or error}", hint=cure(error)) from error


def join_grids(before: Path, after: Path, target: Path) -> None:
    """Put two grids of the same prompts and seeds side by side."""
    from PIL import Image

    with Image.open(before) as left, Image.open(after) as right:
        sheet = Image.new("RGB", (left.width + right.width + 12, max(left.height, right.height)), "white")
        sheet.paste(left, (0, 0))
        sheet.paste(right, (left.width + 12, 0))
        sheet.save(target)


def write_curve(path: Path, rows: Sequence[Row], evaluations: Sequence[Row]) -> None:
    """Write an SVG of the reward over steps: each step's mean, their running mean over ten, and held-out marks."""
    if len(rows) < 2:
        return
    raw = [(row["step"], row["train/reward_mean"]) for row in rows]
    smooth = [(step, _mean([value for _, value in raw[max(0, i - 9) : i + 1]])) for i, (step, _) in enumerate(raw)]
    held_out = [(row["step"], row["eval/reward"]) for row in evaluations]
    values = [value for _, value in (*raw, *held_out)]
    low, high, last = min(values), max(values), max(1, raw[-1][0])
    span = (high - low) or 1.0

    def at(point: tuple[int, float]) -> str:
        return f"{50 + 530 * point[0] / last:.1f},{200 - 170 * (point[1] - low) / span:.1f}"

    marks = "".join(
        f'<circle cx="{at(p).split(",")[0]}" cy="{at(p).split(",")[1]}" r="4" fill="#d95f02"/>' for p in held_out
    )
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 240" font-family="sans-serif" font-size="12">'
        '<rect width="600" height="240" fill="white"/>'
        f'<polyline fill="none" stroke="#9ecae1" points="{" ".join(map(at, raw))}"/>'
        f'<polyline fill="none" stroke="#08519c" stroke-width="2" points="{" ".join(map(at, smooth))}"/>{marks}'
        f'<text x="6" y="34">{high:.2f}</text><text x="6" y="204">{low:.2f}</text>'
        f'<text x="50" y="222">step 0</text><text x="580" y="222" text-anchor="end">step {last}</text>'
        '<text x="50" y="16" fill="#08519c">reward of the samples, and its mean over ten steps</text>'
        '<text x="580" y="16" text-anchor="end" fill="#d95f02">held-out reward</text></svg>\n'
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
