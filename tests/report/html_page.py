"""A strict reader of the page: every element closed in order, every id once, every reference led somewhere."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "img", "input", "br", "hr", "path", "rect"}


class Page(HTMLParser):
    """Elements with their attributes, text by element, SVG sources, and the data block; asserts form while it reads."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []
        ids = [a["id"] for _, a in self.elements if "id" in a]
        assert len(ids) == len(set(ids))
        self.ids = set(ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, tag
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data))

    @property
    def visible(self) -> str:
        """Everything that can be read."""
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))

    @property
    def data(self) -> dict[str, Any]:
        """The block that the page's script reads."""
        scripts = [text for tag, text in self.texts if tag == "script"]
        found: dict[str, Any] = json.loads(scripts[0])
        return found

    @property
    def headings(self) -> list[int]:
        return [int(tag[1]) for tag, _ in self.elements if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit()]

    def all(self, name: str) -> list[dict[str, str | None]]:
        """Attributes of every element of that name."""
        return [attributes for tag, attributes in self.elements if tag == name]

    def svgs(self) -> list[str]:
        """The source of each drawing."""
        found, at = [], 0
        while (begin := self.source.find("<svg", at)) >= 0:
            at = self.source.index("</svg>", begin) + len("</svg>")
            found.append(self.source[begin:at])
        return found
