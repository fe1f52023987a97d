"""HTML as text that is escaped unless it says of itself that it is markup.

Owns every way from a value into the page: text, attributes, and data for the page's script. Nothing that a run's
files hold (prompts, names, paths, messages) can end an element, an attribute or a script.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import orjson

VOID = frozenset({"br", "hr", "img", "input", "meta", "line", "rect", "path"})
"""Elements without content; those of SVG are closed in themselves, which HTML allows for them all."""

# What neither HTML nor XML can hold as a character, lone surrogates of undecodable file names included.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

# `<` ends no script and begins no comment; the two separators were line ends in older JavaScript.
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Markup(str):
    """Text that goes into the page as it is."""

    __slots__ = ()

    @classmethod
    def join_all(cls, parts: Iterable[str], between: str = "") -> Self:
        """Parts one after another, each escaped unless it is markup."""
        return cls(between.join(escape(part) for part in parts))


def escape(value: object) -> str:
    """A value as HTML text or within a quoted attribute."""
    if isinstance(value, Markup):
        return str(value)
    return html.escape(printable(str(value)), quote=True)


def printable(text: str) -> str:
    """The text with what no document can hold replaced."""
    return _UNPRINTABLE.sub("\ufffd", text)


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element. Example: `tag("td", "a < b", class_="text")`.

    Attributes that are None or False are left out, True stands alone; a final underscore is dropped and the others
    become hyphens. Contents are escaped unless they are markup.
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{''.join(escape(part) for part in content)}</{name}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.removesuffix("_").replace("_", "-")
    # Spelled out, so that what is SVG in the page is XML too.
    return f' {name}="{name if value is True else escape(value)}"'


def script_data(name: str, value: object) -> Markup:
    """A block of JSON that the page's script reads by its id."""
    text = orjson.dumps(_clean(value)).decode()
    for character, written in _IN_SCRIPT.items():
        text = text.replace(character, written)
    return Markup(f'<script type="application/json" id="{escape(name)}">{text}</script>')


def _clean(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_clean(item) for item in value]
    return value


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str, numbers: bool = False) -> Markup:
    """A table whose first column names its rows; with `numbers`, all the others are aligned as figures."""
    cells = "num" if numbers else None
    top = tag("tr", *(tag("th", cell, scope="col", class_=cells if i else None) for i, cell in enumerate(head)))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell, class_=cells) for cell in row[1:])) for row in rows
    ]
    # Focusable, since a wide one is scrolled sideways on a small screen.
    whole = tag("table", tag("caption", caption, class_="unseen"), tag("thead", top), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def with_code(text: str) -> Markup:
    """Text whose stretches between backticks are code."""
    return Markup.join_all(tag("code", part) if i % 2 else part for i, part in enumerate(text.split("`")))


def folded(summary: str, *content: object) -> Markup:
    """Content that opens on a click."""
    return tag("details", tag("summary", summary), *content)
