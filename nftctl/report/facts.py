"""What lies in a run folder, read once: rows, evaluations, scores, alarms, profile, record, attempts, checkpoints.

Takes a run as it is: unfinished, running, without a step, with a last line cut off. Refuses a folder that is no run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nftctl.errors import CheckpointUnusable
from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.directory import RunDirectory
from nftctl.run.ending import Ending, describe, ending_of
from nftctl.run.manifest import MANIFEST_NAME
from nftctl.run.rows import Row, read_rows

_ATTEMPT = re.compile(r"attempt_(\d+)")


@dataclass(frozen=True)
class RunFacts:
    """One run, as its files have it."""

    path: Path
    record: Mapping[str, Any]
    """run.json."""
    profile: Mapping[str, Any]
    """profile.resolved.json."""
    rows: list[dict[str, Any]]
    """Of metrics.jsonl, by rising step."""
    evaluations: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    ending: Ending
    """How the run stands, or how its last attempt ended."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def total(self) -> int | None:
        """Steps that were asked for."""
        asked = self.record.get("total_steps") or self.value("rl.max_steps")
        return asked if type(asked) is int else None

    @property
    def standing(self) -> str:
        """How it stands, in words."""
        return describe(self.ending, self.step, self.total or self.step)

    def value(self, key: str) -> Any:
        """A value of the profile by its dotted key; None where it has none."""
        found: Any = self.profile
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def images_per_step(self) -> int | None:
        """Samples of one step."""
        counts = (self.value("data.rows_per_step"), self.value("rl.group_size"))
        return math.prod(counts) if all(type(count) is int for count in counts) else None

    @cached_property
    def attempts(self) -> list[str]:
        """Names of the launches and resumes, oldest first."""
        logs = self.path / "logs"
        found = [path.name for path in logs.iterdir()] if logs.is_dir() else []
        numbers = sorted(int(match.group(1)) for name in found if (match := _ATTEMPT.fullmatch(name)))
        return [f"attempt_{number}" for number in numbers]

    @cached_property
    def checkpoints(self) -> list[tuple[str, int, str]]:
        """Name, bytes and state of each checkpoint, oldest first. Looks at no content."""
        folder = self.path / "checkpoints"
        whole = [(step, path, _kept(path)) for step, path in list_steps(folder)]
        cut_off = [(step, path, "cut off") for step, path in list_partials(folder)]
        return [(path.name, _bytes_of(path), state) for _, path, state in sorted(whole + cut_off)]


def read_run(run: RunDirectory) -> RunFacts:
    """Everything of a run that the page shows, but its pictures. Raises CheckpointUnusable for damaged JSON."""
    record = run.read_record()
    total = record.get("total_steps")
    return RunFacts(
        path=run.path,
        record=record,
        profile=run.read_resolved(),
        rows=_by_step(run.metrics),
        evaluations=_by_step(run.path / "evaluations.jsonl"),
        scores=_by_step(run.path / "scores.jsonl"),
        alarms=[row for row in _rows(run.path / "alarms.jsonl") if isinstance(row.get("alarm"), str)],
        ending=Ending("running") if run.holder() else ending_of(run, total if type(total) is int else 0),
    )


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A row's number; None where it has none under that key."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def numbers(rows: Iterable[Row], key: str) -> list[float]:
    """The numbers of the rows that have one under that key."""
    return [value for row in rows if (value := number(row, key)) is not None]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        found = read_rows(path)
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error
    return found


def _by_step(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in sorted({row["step"]: row for row in _rows(path)}.items())]


def _kept(path: Path) -> str:
    return "complete" if (path / MANIFEST_NAME).is_file() else "no manifest"


def _bytes_of(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # pruned meanwhile
        return 0
