"""Where a value came from, and what was wrong with one: the two small records that layers and diagnostics share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nftctl.profile.keys import Path


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. `text` is a file path, `--set`, `env NFTCTL_RL__BETA` or a flag such as `--steps`.

    `line` and `column` are 1-based and looked up only on the way to a message (`preflight.position`).
    """

    source: Literal["default", "base", "profile", "env", "set", "flag"]
    text: str
    line: int | None = None
    column: int | None = None
    argument: str = ""
    """What stood behind `--set`, verbatim."""


DEFAULT = Origin("default", "default")
BESIDE = ("flag", "set", "env")
"""Sources that stand beside the profile and override it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong at a path, before its line and column are looked up."""

    path: Path
    origin: Origin
    code: str
    message: str
    help: str = ""
