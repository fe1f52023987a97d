"""`nftctl bench learning`: compare ways to learn on a small base, and print the tables.

Writes figures, tables and curves into the folder that `--output` names, else into a new temporary one, which is said.
Refuses profiles that cannot be learned in one process before any run is started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nftctl.cli.console import Console, table, wants_colour
from nftctl.cli.signals import StopSignals
from nftctl.cli.validate import load_checked
from nftctl.errors import TrainingFailed, UsageRefused

if TYPE_CHECKING:
    from nftctl.learning.compare import Plan
    from nftctl.learning.table import Table
    from nftctl.profile.load import Resolved
    from nftctl.profile.schema import Profile

DOCUMENT, TABLES = "learning.json", "learning.md"
STEPS = 200
"""Steps whose samples are the budget where the profile says no number of its own."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says; None is the default."""

    seeds: int
    trials: int
    budget: float
    samples: int | None
    jobs: int | None
    methods: str | None
    output: Path | None


def learning(console: Console, argument: str | None, sets: Sequence[str], wishes: Wishes) -> None:
    """Compare, print, write."""
    from nftctl.profile.load import EMBEDDED_DEFAULT
    from nftctl.run.outfolder import refuse_taken

    if wishes.output is not None:
        refuse_taken(wishes.output)
    resolved, warnings = load_checked(console, EMBEDDED_DEFAULT if argument is None else argument, sets, {})
    with StopSignals("figures, tables and curves come at the end of a comparison, so nothing was saved"):
        document = _compare(console, resolved, wishes)
    output = Path(tempfile.mkdtemp(prefix="nftctl-learning-")) if wishes.output is None else wishes.output
    _write(document, output)
    _print(console, document)
    console.say(f"figures, tables and curves: {output}")
    console.result("bench", warnings, learning=document, output=str(output))


def _compare(console: Console, resolved: Resolved, wishes: Wishes) -> dict[str, Any]:
    from nftctl.learning import compare, fitness
    from nftctl.learning.crowd import Crowd

    plan = _plan(resolved.profile, wishes)
    fitness.refuse_unfit(resolved.profile)
    console.say(_announcement(plan))
    if plan.jobs > compare.cpus():
        console.warn(f"{plan.jobs} runs at once share {compare.cpus()} CPUs: a second then holds less work for each")
    began = time.perf_counter()
    with _logs() as logs, Crowd(plan.jobs, logs) as crowd:
        document = compare.compare(resolved.profile, resolved.name, plan, crowd, console.say)
    return document | {"whole_seconds": time.perf_counter() - began}


@contextlib.contextmanager
def _logs() -> Iterator[Path]:
    """A folder for what runs say on stderr; it stays where an error names one of them."""
    folder = Path(tempfile.mkdtemp(prefix="nftctl-learning-logs-"))
    keep = False
    try:
        yield folder
    except TrainingFailed as error:
        keep = bool(error.log)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _plan(profile: Profile, wishes: Wishes) -> Plan:
    from nftctl.learning.compare import Plan, cpus
    from nftctl.learning.trials import NAMES

    step = profile.data.rows_per_step * profile.rl.group_size
    named = None if wishes.methods is None else [name.strip() for name in wishes.methods.split(",")]
    if named is not None and not all(named):
        message = f'--methods "{wishes.methods}" has no name in a place where one belongs'
        raise UsageRefused(
            message, hint=f"a list, as nft,flow-grpo, of {', '.join(NAMES)}; all of them without --methods"
        )
    return Plan(
        methods=tuple(NAMES if named is None else named),
        seeds=wishes.seeds,
        trials=wishes.trials,
        seconds=wishes.budget,
        samples=(profile.rl.max_steps or STEPS) * step if wishes.samples is None else wishes.samples,
        jobs=wishes.jobs or cpus(),
    )


def _announcement(plan: Plan) -> str:
    tuned = f"{len(plan.tuned)} methods with {plan.trials} trials each, then {plan.seeds} seeds"
    spent = f"{plan.seconds:g} s of training and {plan.samples:,} samples, whichever takes longer"
    return f"{tuned}; every run spends {spent}; {plan.jobs} at once"


def _write(document: Mapping[str, Any], output: Path) -> None:
    from nftctl.learning.curves import draw
    from nftctl.learning.summary import AXES
    from nftctl.learning.table import markdown
    from nftctl.run.canonical import pretty_bytes
    from nftctl.run.outfolder import new_folder

    with new_folder(output) as folder:
        (folder / DOCUMENT).write_bytes(pretty_bytes(document))
        (folder / TABLES).write_text(markdown(document))
        for axis in AXES if document["summary"]["methods"] else ():
            drawing = draw(document, axis)
            (folder / f"{axis}.svg").write_text(drawing.svg())
            drawing.png(folder / f"{axis}.png")


def _print(console: Console, document: Mapping[str, Any]) -> None:
    if console.json:
        return
    from nftctl.learning.table import tables

    draws = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    for shown in tables(document):
        console.data(shown.title)
        if draws:
            _draw(shown)
        else:
            for line in table([shown.head, *shown.rows]):
                console.data(line)
        console.data("")
    console.data(document["measured"])


def _draw(shown: Table) -> None:
    """The table on a terminal."""
    from rich.console import Console as Terminal
    from rich.table import Table as Drawn

    colour: dict[str, Any] = {} if wants_colour(sys.stdout, os.environ) else {"no_color": True, "color_system": None}
    drawn = Drawn(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(shown.head):
        drawn.add_column(name, justify="right" if i else "left")
    for row in shown.rows:
        drawn.add_row(*row)
    Terminal(file=sys.stdout, **colour).print(drawn)
