"""Texts with places to fill: `@name@` inside a line, or alone on one, where it takes any number of lines.

Owns the filling, in one pass, so that a value that looks like a place stays what it is. Refuses a place without a value
and a value without a place. Quoting is for whoever makes the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER = Path(__file__).with_name("templates")

_PLACE = re.compile(r"@([a-z_]+)@")
_ALONE = re.compile(r"( *)@([a-z_]+)@")


def fill(name: str, values: Mapping[str, str]) -> str:
    """The template `name` with its places filled; a value of no lines leaves its line out. KeyError for a mistake."""
    text = (FOLDER / name).read_text()
    unused = set(values) - set(_PLACE.findall(text))
    if unused:
        raise KeyError(f"{name} has no place for {', '.join(sorted(unused))}")
    return "\n".join(line for row in text.splitlines() for line in _filled(row, values)) + "\n"


def _filled(row: str, values: Mapping[str, str]) -> Iterator[str]:
    alone = _ALONE.fullmatch(row)
    if alone is None:
        yield _PLACE.sub(lambda place: values[place[1]], row)
        return
    for line in values[alone[2]].split("\n") if values[alone[2]] else ():
        yield alone[1] + line if line else ""
