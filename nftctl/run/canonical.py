"""One byte form per JSON value, so that equal values have equal hashes.

Sorted keys, no spaces, shortest float form. Refuses NaN and infinities, which would silently become null.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_HARMLESS = frozenset({str, int, bool, type(None)})


def refuse_non_finite(value: object, where: str = "value") -> None:
    """Raise ValueError, with the dotted place, if a number anywhere inside `value` is NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: only finite numbers can be written")
    if isinstance(value, dict | Mapping):
        for key, item in value.items():
            if not _is_harmless(item):
                refuse_non_finite(item, f"{where}.{key}")
    elif isinstance(value, list | Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            if not _is_harmless(item):
                refuse_non_finite(item, f"{where}[{index}]")


def _is_harmless(item: object) -> bool:
    """Most are, and this is asked of thousands at every save."""
    kind = type(item)
    return kind in _HARMLESS or (kind is float and math.isfinite(item))  # type: ignore[arg-type]


def canonical_bytes(value: object) -> bytes:
    """The one JSON form of `value` that hashes are taken over."""
    refuse_non_finite(value)
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def digest(value: object) -> str:
    """sha256 of the canonical form, 64 hex digits."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def pretty_bytes(value: Mapping[str, Any]) -> bytes:
    """Indented JSON for people, key order kept, closed by a newline. Refuses numbers that are not finite."""
    refuse_non_finite(value)
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
