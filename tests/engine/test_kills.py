"""A run of two ranks that is interrupted twice is, to the bit, the finished run that nobody touched.

Here: Ctrl-C in mid-step, and the rank that writes killed in the middle of a save. Stops in
every stage without a kill are in test_resume. `make soak` (tests/soak/test_kills.py) has every victim, signal and stage
of runs of two and of four ranks, second signals, ranks that stand still, and the disk.
"""

from __future__ import annotations

from pathlib import Path
from signal import SIGINT, SIGKILL
from typing import Any

import pytest

from tests.engine import finished_run, kill_runs
from tests.engine.kill_runs import Strike

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SETS = ('eval.prompt_file=""', "samples.prompts=0", "checkpoint.every=2")
LAUNCH = (*finished_run.ARGUMENTS, "--name", kill_runs.NAME, *(part for s in SETS for part in ("--set", s)))
STRIKES = [
    Strike("group", SIGINT, "rollout", 1),
    Strike("rank 0", SIGKILL, "save", 4),  # the one that writes an adapter
]


def test_interrupted_twice_a_run_is_the_one_that_nobody_touched(tmp_path: Path, finished: Any) -> None:
    blows = kill_runs.play(tmp_path / "struck", LAUNCH, STRIKES, world=2, label="two ranks")
    print(kill_runs.table(blows))
    kill_runs.check_same(tmp_path / "struck" / "runs" / kill_runs.NAME, finished.run, finished_run.STEPS)
    kill_runs.check_prompts(tmp_path / "struck", finished_run.STEPS, 2)
