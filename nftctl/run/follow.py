"""A run followed through its folder alone: what its files gained since the last look, and whether it still runs.

Owns reading from where the last look stopped, and noticing that a file was replaced, as a resume does. Writes nothing
and holds no lock, so that the run does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import orjson

from nftctl.errors import CheckpointUnusable
from nftctl.run.directory import RunDirectory
from nftctl.run.ending import Ending, attempt_of, ending_of

Kind = Literal["step", "alarm", "evaluation"]
Entry = tuple[dict[str, Any], int]
"""A row, and a hash of its line to know it again by."""

CERTAIN = 3
"""Looks in a row without a holder and without an ending, before a run counts as crashed: one that is being resumed has
neither for a moment."""


class Tail:
    """A JSON-lines file that grows, or is replaced by another of its name. Example: `Tail(run.metrics).read()`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()
        self._stamp: tuple[int, int, int] | None = None

    def _forget(self) -> None:
        self._offset, self._last = 0, b""

    def read(self) -> tuple[bool, list[Entry]]:
        """Whether the file was replaced since the last look, and the rows that are new, or all rows of the new file.

        A last line without its end is left for the next look.
        """
        try:
            facts = self._path.stat()
        except OSError:
            replaced = self._offset > 0
            self._forget()
            return replaced, []
        stamp = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if stamp == self._stamp:
            return False, []
        with self._path.open("rb") as file:
            replaced = not self._goes_on(file.fileno(), stamp)
            if replaced:
                self._forget()
            # Opened after it was looked at: what is read is what this descriptor has, whatever the name now leads to.
            file.seek(self._offset)
            content = file.read()
        self._stamp = stamp
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        if lines:
            self._last = lines[-1]
        self._offset += len(whole)
        return replaced, [(row, hash(line)) for line in lines if (row := _row(line)) is not None]

    def _goes_on(self, descriptor: int, stamp: tuple[int, int, int]) -> bool:
        """Whether what was read before is still there; a number of a file may be given out again."""
        if not self._offset:
            return True
        if self._stamp is not None and stamp[0] != self._stamp[0]:
            return False
        return os.pread(descriptor, len(self._last), self._offset - len(self._last)) == self._last


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    figures = [value for key, value in row.items() if "/" in key]
    words = [row.get(key, "") for key in ("alarm", "message", "advice")]
    sound = all(isinstance(v, int | float) and not isinstance(v, bool) for v in figures)
    return row if sound and all(isinstance(w, str) for w in words) and ("alarm" not in row or all(words)) else None


@dataclass(slots=True)
class Look:
    """What one look found.

    rewound   the step after which the run is told again, where an attempt took later steps back
    kept      with it: the rows of steps up to there
    events    what is new, in the order in which the run said it
    """

    attempt: int
    total: int
    ending: Ending
    rewound: int | None = None
    kept: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[Kind, dict[str, Any]]] = field(default_factory=list)


class Follower:
    """Looks at one run again and again."""

    def __init__(self, run: RunDirectory, *, certain: int = CERTAIN) -> None:
        self._run = run
        self._certain = certain
        self._alone = 0
        self._record: tuple[tuple[int, int], dict[str, Any]] = ((0, 0), {})
        # Metrics first: of any step that they are found to have, the others then have everything.
        self._files: dict[Kind, _File] = {
            "step": _File(Tail(run.metrics)),
            "alarm": _File(Tail(run.path / "alarms.jsonl")),
            "evaluation": _File(Tail(run.path / "evaluations.jsonl")),
        }

    def look(self) -> Look:
        """What is new since the last look. Raises CheckpointUnusable when the folder has gone or cannot be read."""
        try:
            return self._look()
        except OSError as error:
            raise CheckpointUnusable(f"cannot read {self._run.path}: {error.strerror or error}") from error

    def _look(self) -> Look:
        # Asked before the files are read: what a run says before it lets go is then read by the look that sees it gone.
        look = Look(attempt_of(self._run), self._total(), self._ending())
        for kind, file in self._files.items():
            before = file.step
            kept = file.read()
            if kind == "step" and kept is not None and file.step < before:
                look.rewound, look.kept = max(file.step, 0), kept
        look.events = list(self._events())
        return look

    def _total(self) -> int:
        facts = self._run.run_json.stat()
        stamp = (facts.st_ino, facts.st_mtime_ns)
        if stamp != self._record[0]:
            self._record = (stamp, self._run.read_record())
        total = self._record[1].get("total_steps")
        return total if isinstance(total, int) else 0

    def _ending(self) -> Ending:
        if self._run.holder():
            self._alone = 0
            return Ending("running")
        self._alone += 1
        ending = ending_of(self._run, self._total())
        certain = ending.state != "crashed" or self._alone >= self._certain
        return ending if certain else Ending("running")

    def _events(self) -> Iterator[tuple[Kind, dict[str, Any]]]:
        """What may be told: nothing of a step before the step itself."""
        steps = self._files["step"]
        upto = max([steps.step, 0, *(row["step"] for row, _ in steps.waiting)])
        ready = [(kind, entry) for kind, file in self._files.items() for entry in file.waiting]
        for kind, entry in sorted(ready, key=_place):
            if entry[0]["step"] <= upto:
                self._files[kind].tell(entry)
                yield kind, entry[0]


def _place(event: tuple[Kind, Entry]) -> tuple[int, int]:
    """A step, what it raised, its evaluation, and what that raised."""
    kind, (row, _) = event
    judged = kind == "alarm" and row.get("alarm") == "reward-hacking"
    return row["step"], 3 if judged else ("step", "alarm", "evaluation").index(kind)


class _File:
    """The rows of one file: those that were told, and those that wait."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._told: list[tuple[int, int]] = []
        self.waiting: list[Entry] = []

    @property
    def step(self) -> int:
        """The last step that was told; -1 before the first."""
        return self._told[-1][0] if self._told else -1

    def tell(self, entry: Entry) -> None:
        """It is no longer waiting."""
        self.waiting.remove(entry)
        self._told.append((entry[0]["step"], entry[1]))

    def read(self) -> list[dict[str, Any]] | None:
        """Take in what the file gained; of a replaced one, the rows that were told before and still are in it."""
        replaced, entries = self._tail.read()
        if not replaced:
            self.waiting += entries
            return None
        pairs = zip(self._told, entries, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == (pair[1][0]["step"], pair[1][1]), pairs))
        del self._told[same:]
        self.waiting = entries[same:]
        return [row for row, _ in entries[:same]]
