"""The alarms of a run by kind: when, how often, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nftctl.report.figures import short
from nftctl.report.markup import Markup, tag


def grouped(alarms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each kind, the latest first: alarm, count, first and last step, words of the last one."""
    kinds: dict[str, dict[str, Any]] = {}
    for row in alarms:
        name, step = str(row["alarm"]), int(row["step"])
        before = kinds.pop(name, {"count": 0, "first_step": step})
        kinds[name] = {
            "alarm": name,
            "count": before["count"] + 1,
            "first_step": before["first_step"],
            "last_step": step,
            **{key: row.get(key) for key in ("message", "advice", "value", "limit")},
        }
    return list(reversed(kinds.values()))


def section(alarms: Sequence[Mapping[str, Any]]) -> Markup:
    """A card for each kind."""
    return tag("ul", *(_card(entry) for entry in grouped(alarms)), class_="alarms")


def _card(entry: Mapping[str, Any]) -> Markup:
    title = tag("h3", tag("code", entry["alarm"]), " ", tag("small", _when(entry)))
    message = tag("p", entry["message"]) if entry["message"] else ""
    advice = tag("p", tag("b", "What to do: "), entry["advice"]) if entry["advice"] else ""
    return tag("li", title, message, _figures(entry), advice)


def _when(entry: Mapping[str, Any]) -> str:
    first, last, count = entry["first_step"], entry["last_step"], entry["count"]
    return f"at step {last}" if count == 1 else f"{count} times, steps {first} to {last}"


def _figures(entry: Mapping[str, Any]) -> Markup | str:
    pairs = [(key, entry[key]) for key in ("value", "limit") if _is_number(entry[key])]
    return tag("p", ", ".join(f"{key} {short(value)}" for key, value in pairs), class_="note") if pairs else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
