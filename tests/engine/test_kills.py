"""A run of two ranks, interrupted nine times: three kills, three SIGTERM, three Ctrl-C. `make soak` deals out more."""

from __future__ import annotations

from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from tests.engine import kill_runs
from tests.engine.kill_runs import Strike
from tests.engine.test_runs import QUIET

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

STEPS = 20
SETS = (
    "checkpoint.every=2", "checkpoint.keep_last=20", 'rl.old.decay="linear"', "data.shuffle=true", "rl.ema_decay=0.9",
)  # fmt: skip
LAUNCH = (
    "launch", "--steps", str(STEPS), "--name", kill_runs.NAME, *QUIET, *(part for s in SETS for part in ("--set", s))
)  # fmt: skip
STRIKES = [
    Strike("driver", SIGKILL, "rollout", 3),
    Strike("group", SIGTERM, "backward", 4),
    Strike("group", SIGINT, "rollout", 6),
    Strike("rank 0", SIGKILL, "save", 8),  # the one that writes an adapter
    Strike("driver", SIGTERM, "save", 8),
    Strike("driver", SIGINT, "optimizer", 10),
    Strike("rank 1", SIGKILL, "backward", 12),
    Strike("driver", SIGTERM, "reward", 13),
    Strike("group", SIGINT, "prepare", 15),
]


def test_interrupted_nine_times_a_run_is_the_one_that_nobody_touched(tmp_path: Path) -> None:
    clean = kill_runs.straight(tmp_path / "clean", LAUNCH)
    blows = kill_runs.play(tmp_path / "struck", LAUNCH, STRIKES, world=2, label="two ranks")
    print(kill_runs.table(blows))
    kill_runs.check_same(tmp_path / "struck" / "runs" / kill_runs.NAME, clean, STEPS, kill_runs.PARTS | {"ema"})
    kill_runs.check_prompts(tmp_path / "struck", STEPS, 2)
