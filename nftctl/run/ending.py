"""How the last attempt of a run ended, as far as its folder tells: an attempt says so itself, unless it was killed.

Owns `logs/attempt_1/ending.json`. Refuses nothing: a folder without it is of a run that still runs, or of one whose
process has gone without a word.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from nftctl.errors import ExitCode, NftctlError
from nftctl.run.canonical import pretty_bytes
from nftctl.run.checkpoints import list_steps
from nftctl.run.directory import RunDirectory
from nftctl.run.disk import atomic_write

NAME = "ending.json"

State = Literal["running", "finished", "stopped", "failed", "crashed"]


@dataclass(slots=True)
class Ending:
    """What an attempt came to. `reason` is a signal's name, or the message of the failure."""

    state: State
    reason: str = ""
    exit_code: int = 0


@contextlib.contextmanager
def recorded(attempt: Path) -> Iterator[Ending]:
    """Write into the folder of an attempt what the block came to; the block may say that it was stopped."""
    ending = Ending("finished")
    try:
        yield ending
    except NftctlError as error:
        _write(attempt, Ending("failed", error.message, int(error.exit_code)))
        raise
    except OSError as error:
        _write(attempt, Ending("failed", error.strerror or str(error), int(ExitCode.CHECKPOINT)))
        raise
    except KeyboardInterrupt:
        _write(attempt, Ending("stopped", "at once", int(ExitCode.SIGINT)))
        raise
    except BaseException as error:
        _write(attempt, Ending("failed", f"{type(error).__name__}: {error}".removesuffix(": "), int(ExitCode.BUG)))
        raise
    if ending.state == "stopped":
        ending.exit_code = 128 + signal.Signals[ending.reason]
    _write(attempt, ending)


def _write(attempt: Path, ending: Ending) -> None:
    # The disk may be what failed; then the reason is on the terminal alone.
    with contextlib.suppress(OSError):
        atomic_write(attempt / NAME, pretty_bytes(asdict(ending)))


def ending_of(run: RunDirectory, total: int) -> Ending:
    """How the run stands when no process holds it; `total` steps are asked for."""
    try:
        said = orjson.loads((run.logs / "latest" / NAME).read_bytes())
        return Ending(said["state"], str(said["reason"]), int(said["exit_code"]))
    except (OSError, ValueError, LookupError, TypeError):
        steps = list_steps(run.checkpoints)
        # The last checkpoint is the last thing that a run makes.
        return Ending("finished") if steps and steps[-1][0] >= total > 0 else Ending("crashed")


def attempt_of(run: RunDirectory) -> int:
    """Number of the newest attempt; 0 before the first."""
    try:
        name = (run.logs / "latest").readlink().name
    except OSError:
        return 0
    number = name.removeprefix("attempt_")
    return int(number) if number.isdecimal() else 0


def describe(ending: Ending, step: int, total: int) -> str:
    """The state in words. Example: `stopped by SIGINT after step 12 of 150`."""
    where = f"after step {step} of {total}"
    if ending.state == "running":
        return f"running, {where}"
    if ending.state == "finished":
        return f"finished {where}"
    if ending.state == "stopped":
        return f"stopped {'' if ending.reason == 'at once' else 'by '}{ending.reason} {where}"
    if ending.state == "failed":
        return f"failed {where}: {ending.reason}"
    return f"crashed {where}: the process that held the run is gone and left no word"
