"""Where each key of a TOML text stands: line and column, both 1-based, columns in characters.

Only for texts that tomllib has accepted, and only on the way to a message: the import of tree-sitter is paid by those
who made a mistake. Without the grammar there are no positions, and messages name the key alone.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

from nftctl.profile.keys import Path

if TYPE_CHECKING:
    from tree_sitter import Node

Position = tuple[int, int]

_DEEPEST = 8  # no key of the schema lies deeper, and the walk must not recurse with the text


class Positions:
    """Path -> position for one text."""

    def __init__(self, text: str) -> None:
        self._found: dict[Path, Position] = {}
        self._implied: dict[Path, Position] = {}
        self._entries: dict[Path, int] = {}
        self._lines = text.encode().split(b"\n")
        root = _tree(text)
        if root is not None:
            self._document(root)

    def find(self, path: Path) -> Position | None:
        """The key itself, else the nearest table above it that has a header, else None."""
        if path not in self._found and path in self._implied:
            return self._implied[path]
        return next((self._found[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._found), None)

    def _document(self, root: Node) -> None:
        for node in root.named_children:
            if node.type == "pair":
                self._pair(node, ())
            elif node.type in ("table", "table_array_element"):
                self._table(node)

    def _table(self, node: Node) -> None:
        key, *pairs = node.named_children
        names = _names(key)
        if node.type == "table_array_element":
            array = self._inside(names[:-1]) + names[-1:]
            index = self._entries.get(array, 0)
            here: Path = (*array, index)
            self._entries[array] = index + 1
        else:
            here = self._inside(names)
        self._note(here, node)
        self._imply(here, 0)
        for pair in pairs:
            if pair.type == "pair":
                self._pair(pair, here)

    def _inside(self, names: tuple[str, ...]) -> Path:
        """A header's names as a path: below an array of tables they mean its newest entry."""
        path: Path = ()
        for name in names:
            path = (*path, name)
            if path in self._entries:
                path = (*path, self._entries[path] - 1)
        return path

    def _pair(self, node: Node, above: Path) -> None:
        key, value = (child for child in node.named_children if child.type != "comment")
        path = (*above, *_names(key))
        self._note(path, key)
        self._imply(path, len(above))
        self._value(value, path)

    def _value(self, node: Node, path: Path) -> None:
        if len(path) > _DEEPEST:
            return
        children = [child for child in node.named_children if child.type != "comment"]
        if node.type == "inline_table":
            for pair in children:
                self._pair(pair, path)
        elif node.type == "array":
            for index, item in enumerate(children):
                self._note((*path, index), item)
                self._value(item, (*path, index))

    def _imply(self, path: Path, known: int) -> None:
        """`[rl.old]` and `old.decay = ...` bring tables about that have no header; they are found by name only."""
        for n in range(known + 1, len(path)):
            self._implied.setdefault(path[:n], self._found[path])

    def _note(self, path: Path, node: Node) -> None:
        row, byte = node.start_point
        column = len(self._lines[row][:byte].decode("utf-8", "replace"))
        self._found.setdefault(path, (row + 1, column + 1))


def _tree(text: str) -> Node | None:
    try:
        import tree_sitter
        import tree_sitter_toml
    except ImportError:
        return None
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_toml.language()))
    return parser.parse(text.encode()).root_node


def _names(key: Node) -> tuple[str, ...]:
    """The names in `a."b c".d`; tomllib reads them, so quotes and escapes mean what they mean to it."""
    table: object = tomllib.loads(f"{(key.text or b'').decode()} = 0")
    names: list[str] = []
    while isinstance(table, dict):
        ((name, table),) = table.items()
        names.append(name)
    return tuple(names)
