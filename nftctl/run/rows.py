"""Files of one JSON object a line, each of a step: metrics, evaluations, scores, alarms.

Owns that a step is in a file once however often the run was resumed. Refuses a number that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from nftctl.errors import TrainingFailed
from nftctl.run.directory import atomic_write

Row = Mapping[str, Any]


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
