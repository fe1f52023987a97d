"""One finished run of two ranks, which a whole session of tests looks at: its settings, and how it is made.

Owns what such a run is. Tests read it, copy it, and hold runs that were interrupted or spread over hosts against it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.test_runs import SMALL, left_behind, start

NAME = "first"
STEPS = 8
ARGUMENTS = ("launch", "tiny_t2i_cpu", "--steps", str(STEPS), *SMALL, "--set", "data.shuffle=true")
"""Without a name. Looks at the run (evaluation, grids) and the cadence of its checkpoints change no bit of it."""


@dataclass(frozen=True)
class Finished:
    """The folder that it was started in, the object that it printed, and what it said on standard error."""

    folder: Path
    document: dict[str, Any]
    err: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / NAME


def make(folder: Path) -> Finished:
    """Launch it and wait for its end."""
    process = start(folder, *ARGUMENTS, "--name", NAME, "--json", "--set", "eval.samples_per_prompt=2")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert left_behind() == []
    return Finished(folder, json.loads(out), err)
