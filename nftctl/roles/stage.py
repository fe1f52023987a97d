"""Where a rank is: one line in its log as each stage of a step begins, and the reading of the last such line.

What a rank wrote last is what it was doing when it died, so whoever blames it reads it from there.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

log = logging.getLogger("nftctl.stage")

_LINE = re.compile(rf"{re.escape(log.name)}: (step \d+): (.+)")


def begin(step: int, stage: str, turn: int = 0, turns: int = 1) -> None:
    """Say in this rank's log that `stage` of `step` begins; a stage that a step repeats says its turn, from 0."""
    log.info("step %d: %s%s", step, stage, f" {turn + 1} of {turns}" if turns > 1 else "")


def last_begun(path: Path) -> str:
    """The last stage that a rank's log tells of, "" when there is none. Example: `step 7, backward 2 of 3`."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    found = _LINE.findall(text)
    return ", ".join(found[-1]) if found else ""
