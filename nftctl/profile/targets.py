"""What a LoRA target selects: modules by the end of their names, or by a regular expression between slashes.

`add_q_proj` and `self_attn.add_q_proj` are ends of names, cut at a dot; `/layers\\.[0-7]\\..*_proj/` has to match a
name in full. No module has a slash in its name, so neither form can be taken for the other. Selects nothing by a
regular expression that is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def is_pattern(target: str) -> bool:
    """Whether the target is meant as a regular expression."""
    return target.startswith("/")


def malformed(target: str) -> str:
    """Why a target that begins with a slash is no regular expression; empty where nothing is wrong with it."""
    if not is_pattern(target):
        return ""
    if len(target) < 3 or not target.endswith("/"):
        return "it begins with a slash and has to end with another, with something between them"
    try:
        re.compile(target[1:-1])
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def selects(target: str, name: str) -> bool:
    """Whether the target selects the module of this name."""
    if is_pattern(target):
        return not malformed(target) and re.fullmatch(target[1:-1], name) is not None
    return name == target or name.endswith(f".{target}")


def matched(targets: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """How many of these modules each target selects."""
    known = list(names)
    return {target: sum(selects(target, name) for name in known) for target in targets}
