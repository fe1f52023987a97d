"""Whether a value survives the trip to JSON and back, which every resolved value and every prompt's metadata makes."""

from __future__ import annotations

import math
from collections.abc import Mapping

_BIGGEST = 2**63 - 1


def unfit(value: object) -> str:
    """What a value that does not survive would have to do ("must fit in 64 bits"); empty for one that does."""
    if isinstance(value, int) and abs(value) > _BIGGEST:
        return "must fit in 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        return "must be valid Unicode text"
    if isinstance(value, Mapping):
        return next(filter(None, (unfit(part) for pair in value.items() for part in pair)), "")
    if isinstance(value, list):
        return next(filter(None, map(unfit, value)), "")
    return ""
