"""A run that lost a rank, a node or the head of its cluster: what happened, and that going on may well succeed.

Owns the difference between a loss, which another attempt may outlive, and a failure of the program, which it would only
repeat; and the note of it in an attempt's folder, `logs/attempt_1/lost.json`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from nftctl.errors import TrainingFailed
from nftctl.run.canonical import pretty_bytes
from nftctl.run.disk import atomic_write

NAME = "lost.json"


class RanksLost(TrainingFailed):
    """Ranks went away; nothing that they computed was wrong."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an attempt ended, in words."""

    message: str


@contextlib.contextmanager
def noted(attempt: Path) -> Iterator[None]:
    """Leave word of what the block loses, for whoever goes on."""
    try:
        yield
    except RanksLost as error:
        with contextlib.suppress(OSError):  # the storage may be what was lost
            atomic_write(attempt / NAME, pretty_bytes(asdict(Loss(error.message))))
        raise


def read_loss(attempt: Path) -> Loss | None:
    """What an attempt lost; None when it ended otherwise."""
    try:
        return Loss(str(orjson.loads((attempt / NAME).read_bytes())["message"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
