"""From a run folder to its page: reads, judges, renders, and puts the file into place in one step.

Refuses to write over a file that is no report, and a folder that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.report import alarms, page, stages
from nftctl.report.facts import RunFacts, read_run
from nftctl.report.plot import SLOTS
from nftctl.report.samples import Album, album_of
from nftctl.report.verdict import judge
from nftctl.run.directory import RunDirectory, atomic_write
from nftctl.run.disk import cure

NAME = "report.html"
HEAD = 2048
"""Bytes in which a report says that it is one."""


@dataclass(frozen=True, slots=True)
class Report:
    """A written page and what it says."""

    path: Path
    bytes: int
    subjects: list[page.Subject]
    album: Album

    def document(self) -> dict[str, Any]:
        """The facts and the verdicts for JSON."""
        return {
            "report": {"path": str(self.path), "bytes": self.bytes},
            "run": _facts(self.subjects[0]),
            "compared": [_facts(subject) for subject in self.subjects[1:]],
            "samples": {"embedded": [grid.step for grid in self.album.grids], "left_out": self.album.left_out},
        }


def write_report(run: RunDirectory, others: Sequence[RunDirectory] = (), output: Path | None = None) -> Report:
    """Write the page of `run`, with `others` drawn beside it; into its folder unless `output` names another file.

    Raises CheckpointUnusable for a damaged run or a disk that refuses, UsageRefused for an output that cannot be meant.
    """
    target = run.path / NAME if output is None else output
    if len(others) >= SLOTS:
        raise UsageRefused(f"{len(others) + 1} runs in one chart cannot be told apart", hint=f"compare at most {SLOTS}")
    try:
        _refuse_foreign(target)
        facts = [read_run(one) for one in (run, *others)]
        subjects = [_subject(name, one) for name, one in zip(_names(facts), facts, strict=True)]
        album = album_of(run.samples)
        content = page.render(subjects, album).encode()
        atomic_write(target, content)
    except OSError as error:
        place = error.filename or target
        raise CheckpointUnusable(f"no report: {place}: {error.strerror or error}", hint=cure(error)) from error
    return Report(target, len(content), subjects, album)


def _subject(name: str, facts: RunFacts) -> page.Subject:
    verdict = judge(facts.rows, facts.evaluations, facts.alarms)
    return page.Subject(name, facts, verdict, stages.times_of(facts))


def _names(facts: Sequence[RunFacts]) -> list[str]:
    """Names of the folders; whole paths where two are the same."""
    names = [one.name for one in facts]
    return names if len(set(names)) == len(names) else [str(one.path) for one in facts]


def _refuse_foreign(target: Path) -> None:
    if str(target) == "-" or (target.exists() and not target.is_file() and not target.is_dir()):
        raise UsageRefused(f"{target} is no file that could be replaced", hint="name a file, such as report.html")
    if target.is_dir():
        raise UsageRefused(f"{target} is a folder", hint=f"name a file, such as {target / NAME}")
    if not target.parent.is_dir():
        raise UsageRefused(f"there is no folder {target.parent} to write to", hint="make it, or name another file")
    if target.exists():
        with target.open("rb") as stream:
            known = page.GENERATOR.encode() in stream.read(HEAD)
        if not known:
            raise UsageRefused(f"{target} is there already and is no report", hint="name another file")


def _facts(subject: page.Subject) -> dict[str, Any]:
    facts = subject.facts
    return {
        "name": subject.name,
        "path": str(facts.path),
        "run_id": facts.record.get("run_id"),
        "profile": facts.record.get("profile"),
        "state": facts.ending.state,
        "steps": {"done": facts.step, "total": facts.total},
        "attempts": len(facts.attempts),
        "checkpoints": [name for name, _, state in facts.checkpoints if state == "complete"],
        "verdict": subject.verdict.document(),
        "times": subject.times.document() if subject.times else None,
        "alarms": alarms.grouped(facts.alarms),
    }
