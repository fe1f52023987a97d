"""The schema's source, read and not run: which keys there are, and what stands under each.

For a TAB press, which cannot wait for pydantic, and for documentation, which is the only reader of the docstrings.
Knows class bodies of annotated names; judges nothing and knows no types beyond which key holds another table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path

SCHEMA = Path(__file__).with_name("schema.py")
ROOT = "Profile"


@cache
def tables() -> dict[str, dict[str, tuple[ast.expr, str]]]:
    """Class -> key -> its annotation, and the docstring under it (empty where there is none)."""
    found = {}
    for node in ast.parse(SCHEMA.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = dict(_keys(node))
    return found


def _keys(table: ast.ClassDef) -> Iterator[tuple[str, tuple[ast.expr, str]]]:
    for key, below in pairwise([*table.body, ast.Pass()]):
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name):
            said = below.value if isinstance(below, ast.Expr) else None
            text = said.value if isinstance(said, ast.Constant) and isinstance(said.value, str) else ""
            yield key.target.id, (key.annotation, cleandoc(text))


def dotted_keys(table: str = ROOT, above: str = "") -> Iterator[str]:
    """Every key as `--set` takes it, in the order of the schema; entry 0 stands for each of an array of tables."""
    for name, (annotation, _) in tables()[table].items():
        inner, index = annotation, ""
        if isinstance(inner, ast.Subscript) and isinstance(inner.value, ast.Name) and inner.value.id == "list":
            inner, index = inner.slice, ".0"
        if isinstance(inner, ast.Name) and inner.id in tables():
            yield from dotted_keys(inner.id, f"{above}{name}{index}.")
        else:
            yield f"{above}{name}"


def meanings(table: str) -> dict[str, str]:
    """Key -> docstring for the keys of a class that have one."""
    return {name: text for name, (_, text) in tables().get(table, {}).items() if text}
