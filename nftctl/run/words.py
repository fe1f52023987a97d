"""Lines that a run says of its rows, the same whether it says them itself or they are read from its folder later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def held_out(row: Mapping[str, Any]) -> str:
    """An evaluation. Example: `held-out reward 0.553 at step 10`."""
    return f"held-out reward {row['eval/reward']:.3f} at step {row['step']}"


def alarm(row: Mapping[str, Any]) -> str:
    """A row of alarms.jsonl: its code, what was found, what to do."""
    return f"step {row['step']}: {row['alarm']}: {row['message']}; {row['advice']}"


def dropped(row: Mapping[str, Any]) -> str:
    """What a metrics row has to say of groups without scores; empty when there were none."""
    count = row.get("reward/dropped_groups")
    return f"step {row['step']}: {count:.0f} groups dropped, their scores failed" if count else ""
