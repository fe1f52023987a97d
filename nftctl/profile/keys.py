"""The profile schema seen as paths: which dotted keys exist and what stands at each.

A path is a tuple of names, with an integer below an array of tables: ("reward", "providers", 0, "url"). Owns the walk
over the schema; judges nothing: a path that leads nowhere comes back as None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from nftctl.profile.schema import Profile, Section

Path = tuple[str | int, ...]

_INDEX = re.compile(r"[0-9]{1,4}")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Place:
    """What stands at a path: a table, an array of tables, a free-form map, or a plain value."""

    kind: Literal["table", "tables", "map", "value"]
    section: type[Section] | None = None
    text: bool = False
    """Only text fits here, so an override needs no quotes."""
    choices: tuple[str, ...] = ()
    """The words allowed, when they are enumerated."""


@cache
def fields(section: type[Section]) -> dict[str, Place]:
    """Name -> place for every key of a table, in the order of the schema."""
    return {name: _place(info.annotation) for name, info in section.model_fields.items()}


def _place(annotation: object) -> Place:
    parts = tuple(_parts(annotation))
    for part in parts:
        if isinstance(part, type) and issubclass(part, Section):
            return Place("table", part)
        if get_origin(part) is list:
            (item,) = get_args(part)
            if isinstance(item, type) and issubclass(item, Section):
                return Place("tables", item)
    if any(get_origin(part) is dict for part in parts):
        return Place("map")
    words = tuple(w for part in parts if get_origin(part) is Literal for w in get_args(part))
    return Place("value", text=bool(words) or parts == (str,), choices=words)


def _parts(annotation: object) -> Iterator[object]:
    """The members of a union, with None and Annotated taken away."""
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _parts(member)
    elif annotation is not type(None):
        yield annotation


def locate(path: Path) -> Place | None:
    """The place at `path`, or None. One key deeper than a map is a value; `("reward", "providers", 0)` is a table."""
    here = Place("table", Profile)
    for step in path:
        below = _step(here, step)
        if below is None:
            return None
        here = below
    return here


def _step(here: Place, step: str | int) -> Place | None:
    if here.kind == "table" and here.section is not None and isinstance(step, str):
        return fields(here.section).get(step)
    if here.kind == "tables" and isinstance(step, int):
        return Place("table", here.section)
    if here.kind == "map" and isinstance(step, str):
        return Place("value")
    return None


def parse(names: Sequence[str]) -> Path:
    """Names as written in `a.b.0.c` -> path: digits are an index exactly where an array of tables is indexed."""
    path: Path = ()
    for name in names:
        above = locate(path)
        index = above is not None and above.kind == "tables" and _INDEX.fullmatch(name)
        path = (*path, int(name) if index else name)
    return path


def first_unknown(path: Path) -> Path:
    """The shortest beginning of `path` that leads nowhere."""
    return next((path[:n] for n in range(1, len(path) + 1) if locate(path[:n]) is None), path)


def dotted(path: Path) -> str:
    """`rl.old.decay`, `reward.providers.0.url`; a name that TOML would quote is quoted."""
    names = (str(step) for step in path)
    return ".".join(name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False) for name in names)


def leaves(
    section: type[Section] = Profile, above: Path = (), *, entries: Callable[[Path], int] = lambda _: 1
) -> Iterator[Path]:
    """Every path with a value of its own, in the order of the schema.

    `entries` says how many tables an array of tables has; an empty array is itself the leaf.
    """
    for name, place in fields(section).items():
        here = (*above, name)
        if place.kind == "table" and place.section is not None:
            yield from leaves(place.section, here, entries=entries)
        elif place.kind == "tables" and place.section is not None and entries(here):
            for index in range(entries(here)):
                yield from leaves(place.section, (*here, index), entries=entries)
        else:
            yield here
