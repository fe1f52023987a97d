"""The run's pictures for the page: grids over the steps and the extremes, embedded, within a bound that is said.

Reads PNG files as bytes and their sizes from their headers; decodes nothing. A sidecar that does not fit its grid is
left out, as is a file that is no PNG.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from nftctl.report.plot import evenly

T = TypeVar("T")

GRIDS = 24
"""Grids that are embedded at most."""
BUDGET = 12_000_000
"""Bytes that embedded pictures take in the page."""

_GRID = re.compile(r"step_(\d{6,})\.png")
_EXTREMES = re.compile(r"extremes_(\d{6,})\.png")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What a grid shows, and where in it."""

    prompts: list[str]
    columns: list[str]
    rewards: list[list[float | None]]
    cell: tuple[int, int]
    origin: tuple[int, int]
    pitch: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Extreme:
    """One sample of a picture of extremes."""

    kind: str
    """`best` or `worst`."""
    prompt: str
    reward: float


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG file of the run."""

    step: int
    path: Path
    bytes: int
    width: int
    height: int
    sidecar: Sidecar | None = None
    extremes: tuple[Extreme, ...] = ()

    @property
    def embedded(self) -> int:
        """Bytes that it takes in the page."""
        return 4 * -(-self.bytes // 3)

    def uri(self) -> str:
        """The picture itself, as an address."""
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode()}"


@dataclass(frozen=True, slots=True)
class Album:
    """What is embedded, and what was left out of it."""

    grids: list[Picture] = field(default_factory=list)
    extremes: Picture | None = None
    left_out: list[str] = field(default_factory=list)
    """Sentences."""


def album_of(folder: Path, *, grids: int = GRIDS, budget: int = BUDGET) -> Album:
    """The pictures of a run's samples folder that fit, evenly spread over its steps."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    drawn, broken = _pictures(files, _GRID)
    others, more_broken = _pictures(files, _EXTREMES)
    left_out = [f"{path.name} is no whole PNG file" for path in broken + more_broken]
    extremes = others[-1] if others else None
    if extremes and extremes.embedded > budget // 4:
        left_out.append(f"{extremes.path.name} is too large to embed ({extremes.bytes:,} bytes)")
        extremes = None
    room = budget - (extremes.embedded if extremes else 0)
    chosen = _fitting(drawn, min(grids, len(drawn)), room)
    if len(chosen) < len(drawn):
        limit = f"at most {grids} grids and {budget // 1_000_000} MB of pictures are embedded"
        left_out.append(f"{len(drawn) - len(chosen)} of {len(drawn)} grids are not shown: {limit}")
    return Album(chosen, extremes, left_out)


def _fitting(drawn: Sequence[Picture], count: int, room: int) -> list[Picture]:
    """As many as fit, the first and the last before all others; a single one has to be the last."""
    for number in range(count, 0, -1):
        chosen = evenly(drawn, number)
        if sum(picture.embedded for picture in chosen) <= room:
            return chosen
    return []


def _pictures(files: Sequence[Path], name: re.Pattern[str]) -> tuple[list[Picture], list[Path]]:
    found, broken = [], []
    for path in files:
        if match := name.fullmatch(path.name):
            picture = _picture(path, int(match.group(1)))
            if picture is None:
                broken.append(path)
            else:
                found.append(picture)
    return sorted(found, key=lambda picture: picture.step), broken


def _picture(path: Path, step: int) -> Picture | None:
    try:
        with path.open("rb") as stream:
            head = stream.read(24)
            stream.seek(-12, 2)
            tail = stream.read()
        size = path.stat().st_size
    except OSError:
        return None
    if not head.startswith(_SIGNATURE) or head[12:16] != b"IHDR" or tail[4:8] != b"IEND":
        return None  # one that is being written has no end yet
    width, height = struct.unpack(">II", head[16:24])
    beside = path.with_suffix(".json")
    sidecar = _read(beside, lambda found: _checked(found, width, height))
    return Picture(step, path, size, width, height, sidecar, _read(beside, _extremes) or ())


def _read(path: Path, check: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        return check(orjson.loads(path.read_bytes()))
    except (OSError, LookupError, TypeError, ValueError):
        return None


def _extremes(found: dict[str, Any]) -> tuple[Extreme, ...]:
    return tuple(
        Extreme(kind, str(one["prompt"]), float(one["reward"])) for kind in ("best", "worst") for one in found[kind]
    )


def _checked(found: dict[str, Any], width: int, height: int) -> Sidecar:
    """Raises one of the errors above unless every cell lies within the picture and has a place for its reward."""
    prompts, columns = [str(text) for text in found["prompts"]], [str(text) for text in found["columns"]]
    rewards = [[None if value is None else float(value) for value in row] for row in found["rewards"]]
    cell, origin, pitch = (_pair(found[key]) for key in ("cell", "origin", "pitch"))
    if not prompts or not columns:
        raise ValueError("no cells")
    if len(rewards) != len(prompts) or any(len(row) != len(columns) for row in rewards):
        raise ValueError("rewards are not one for each cell")
    for start, step, count, length, whole in (
        (origin[0], pitch[0], len(columns), cell[0], width),
        (origin[1], pitch[1], len(prompts), cell[1], height),
    ):
        if min(start, step, length - 1) < 0 or start + step * (count - 1) + length > whole:
            raise ValueError("cells lie outside the picture")
    return Sidecar(prompts, columns, rewards, cell, origin, pitch)


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return int(first), int(second)
