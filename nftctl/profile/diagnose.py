"""Turns what is wrong into what a person reads: the place, one sentence, and the likely fix.

Owns the wording of findings, the near-miss search and the one-line form `file:line:column: error[code]: sentence`.
Lines and columns are looked up here and nowhere else; rich is never needed.
"""

from __future__ import annotations

import difflib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nftctl.errors import Finding
from nftctl.profile.artifacts import PROFILES
from nftctl.profile.keys import Path, dotted, fields, leaves, locate
from nftctl.profile.origins import Fault, Origin
from nftctl.profile.positions import Position, Positions

_MOST_SHOWN = 60  # characters of a value that a message repeats
_MOST_LISTED = 12  # keys of a table that a help line lists

_KINDS = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def format_finding(finding: Finding) -> str:
    """One finding as editors and grep expect it; the help, if any, on a second line."""
    place = [finding.origin] if finding.origin else []
    place += [str(number) for number in (finding.line, finding.column) if number is not None]
    head = f"{':'.join(place)}: " if place else ""
    text = f"{head}{finding.severity}[{finding.code}]: {finding.message}"
    return f"{text}\n  help: {finding.help}" if finding.help else text


def shown(value: Any) -> str:
    """A value as TOML would have it, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(text, text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def expected(kind: str, context: Mapping[str, Any], value: Any, *, inside: bool) -> tuple[str, str]:
    """pydantic's error type -> ("a whole number", help). `inside` says the value is an item of the key's value."""
    if kind in _KINDS:
        words = _KINDS[kind]
        unquoted = isinstance(value, str) and _would_fit(kind, value)
        help = f"write {value} without quotes" if unquoted else ""
    elif kind in _BOUNDS:
        bound, name = _BOUNDS[kind]
        words, help = f"{bound} {context[name]}", ""
    elif kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        words = " or ".join(filter(None, [", ".join(map(shown, choices[:-1])), shown(choices[-1])]))
        close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        help = f"did you mean {shown(close[0])}?" if close else ""
    elif kind in ("too_short", "too_long"):
        words, help = f"an array of {context.get('min_length', context.get('max_length'))} items", ""
    else:
        words, help = "valid", ""
    return (f"{words} in every place" if inside else words), help


def _would_fit(kind: str, value: str) -> bool:
    if kind == "bool_type":
        return value in ("true", "false")
    try:
        float(value) if kind == "float_type" else int(value)
    except ValueError:
        return False
    return kind in ("float_type", "int_type")


def unknown_key(path: Path) -> tuple[str, str]:
    """Message and help for the first unknown name of a path."""
    above = locate(path[:-1])
    message = f"{dotted(path)} is not a known {'table or key' if len(path) == 1 else 'key'}"
    near = nearest(path)
    if above is not None and above.kind == "tables":
        return message, f"say which entry: {dotted((*path[:-1], 0))}.{path[-1]}"
    if above is not None and above.kind == "value":
        return message, f"{dotted(path[:-1])} is a single value"
    if near:
        return message, f"did you mean {' or '.join(map(dotted, near))}?"
    siblings = _siblings(path)
    if siblings and len(siblings) <= _MOST_LISTED:
        where = f"of {dotted(path[:-1])}" if len(path) > 1 else "at the top"
        return message, f"known {where}: {', '.join(siblings)}"
    return message, ""


def unknown_variable(name: str, path: Path, others: Sequence[str]) -> tuple[str, str]:
    """Message and help for an environment variable that is neither a key nor one of `others`."""
    message = f"{name} is not a known variable"
    near = [variable(found) for found in nearest(path)] if len(path) > 1 else []
    if not near:
        near = difflib.get_close_matches(
            name.upper(), [*others, *map(variable, leaves(entries=lambda _: 1))], n=1, cutoff=0.75
        )
    return message, f"did you mean {' or '.join(near)}?" if near else "variables are named NFTCTL_SECTION__KEY"


def variable(path: Path) -> str:
    """The environment variable that sets a key."""
    return "NFTCTL_" + "__".join(str(step) for step in path).upper()


def nearest(path: Path) -> list[Path]:
    """What was probably meant: a close sibling, else the same name elsewhere, else a close name elsewhere."""
    above, name = path[:-1], str(path[-1])
    close = difflib.get_close_matches(name, _siblings(path), n=1)
    if close:
        return [(*above, close[0])]
    every = list(leaves(entries=lambda _: 1))
    same = [leaf for leaf in every if leaf[-1] == name]
    if same:
        return same[:3]
    close = difflib.get_close_matches(name, sorted({str(leaf[-1]) for leaf in every}), n=1, cutoff=0.75)
    return [leaf for leaf in every if leaf[-1] in close][:3]


def _siblings(path: Path) -> list[str]:
    above = locate(path[:-1])
    return list(fields(above.section)) if above is not None and above.kind == "table" and above.section else []


class Places:
    """Looks up lines and columns in the texts that were loaded; each text is indexed once, when first needed."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._indices: dict[str, Positions] = {}

    def find(self, origin: Origin, path: Path) -> Position | None:
        """Position of `path` in the file of `origin`, or None if it came from elsewhere."""
        if origin.line is not None and origin.column is not None:
            return origin.line, origin.column
        if origin.text not in self._texts:
            return None
        if origin.text not in self._indices:
            self._indices[origin.text] = Positions(self._texts[origin.text])
        return self._indices[origin.text].find(path)

    def finding(self, fault: Fault) -> Finding:
        """The fault with its place."""
        line, column = self.find(fault.origin, fault.path) or (None, None)
        where = f"{fault.origin.text} {fault.origin.argument}".rstrip()
        return Finding(
            code=fault.code,
            key=printable(dotted(fault.path)),
            message=printable(fault.message),
            help=printable(fault.help),
            origin=printable(where),
            line=line,
            column=column,
        )


def arrange(findings: Iterable[Finding], files: Sequence[str]) -> list[Finding]:
    """Findings by file (the profile first, then what it extends), by line inside a file, then all others.

    What was typed beside a packaged profile comes before what is in it, which nobody is to edit.
    """
    rank = {name: index for index, name in enumerate(files)}
    packaged = next((rank[name] for name in files if pathlib.Path(name).parent == PROFILES), None)

    def order(finding: Finding) -> tuple[float, float, int]:
        line = float("inf") if finding.line is None else finding.line
        beside = finding.line is None and finding.origin.startswith(("--", "env "))
        if beside and packaged is not None:
            return packaged - 0.5, line, 0
        return rank.get(finding.origin, len(rank)), line, finding.column or 0

    return sorted(findings, key=order)


def printable(text: str) -> str:
    """Text that fits on one line of any terminal: line ends and undecodable bytes are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
