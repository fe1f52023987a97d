"""Files of one JSON object a line, each of a step: metrics, evaluations, scores, alarms.

Owns that a step is in a file once however often the run was resumed. Refuses a number that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from nftctl.errors import CheckpointUnusable, TrainingFailed
from nftctl.run.directory import atomic_write

Row = Mapping[str, Any]


def require_finite(row: Row) -> None:
    """Refuse a row with NaN or infinity: JSON would store null and nobody would notice."""
    bad = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        raise TrainingFailed(f"step {row.get('step', '?')}: not finite: {', '.join(sorted(bad))}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut off by a crash is left out.

    Raises CheckpointUnusable for any other line that is no row: what lies behind it would be lost in silence.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    whole = [_row(path, number, line) for number, line in enumerate(lines[:-1], 1)]
    try:
        return [*whole, _row(path, len(lines), lines[-1])] if lines[-1] else whole
    except CheckpointUnusable:
        return whole


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise CheckpointUnusable(
            f"{path}:{number}: this line is no row of a step",
            hint="put the file back as it was; without that line, or without the file, that record is lost for good",
        )
    return row


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
