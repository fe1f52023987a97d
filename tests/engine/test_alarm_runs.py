"""Alarms of real runs: a planted failure is told of in time, may end the run, and loses nothing.

The clip of a provider lies beyond its scores, so that every image has the same reward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.errors import ExitCode, TrainingFailed
from nftctl.run.checkpoints import list_steps
from nftctl.run.directory import find_checkpoint
from nftctl.run.rows import read_rows

pytestmark = pytest.mark.ray

CONSTANT = "reward.providers.0.clip=[2,3]"
NARROW = ("rl.advantage_low=-0.1", "rl.advantage_high=0.1")


def noted(run: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["alarm"]) for row in read_rows(run / "alarms.jsonl")]


def test_a_healthy_run_has_its_rewards_on_record_and_no_alarm(
    world4: Any, tiny: Any, reporter: Any, tmp_path: Path
) -> None:
    run = Path(run_job(plan_launch(tiny(3, ('job.name="sound"',)), run_dir=tmp_path), reporter, world4)["run"])
    rows, scores = read_rows(run / "metrics.jsonl"), read_rows(run / "scores.jsonl")
    assert (noted(run), reporter.warnings) == ([], [])
    for row, score in zip(rows, scores, strict=True):
        assert row["step"] == score["step"]
        assert [len(group) for group in score["rewards"]] == [4] * 4
        assert sum(map(sum, score["rewards"])) / 16 == pytest.approx(row["train/reward_mean"], rel=1e-12)
        assert 0 < row["images/saturation"] < 1
        assert 0 < row["images/high_frequency"] < 0.5
        assert 0 < row["images/diversity"] < 1
        assert row["timer/samples_per_second_per_rank"] == pytest.approx(4 / row["timer/step"], rel=1e-3)
        assert 0.1 < row["system/rss_peak_gb"] < 20
    distances = [row["policy/distance"] for row in rows]
    assert 0 < distances[0] < distances[1] < distances[2] < 0.1
    assert [(row["old/version"], row["old/age"]) for row in rows] == [(1, 0), (2, 0), (3, 0)]
    assert [row["forwards/skipped"] for row in rows] == [2 * 16, 16, 16]


def test_a_constant_reward_may_end_the_run_which_then_goes_on(
    world4: Any, tiny: Any, reporter: Any, tmp_path: Path
) -> None:
    made = tiny(4, ('job.name="flat"', CONSTANT, 'alarms.stop=["zero-spread"]'))
    run = tmp_path / "flat"
    with pytest.raises(TrainingFailed, match=r"ended by alarms\.stop at step 1: zero-spread: every") as caught:
        run_job(plan_launch(made, run_dir=tmp_path), reporter, world4)
    assert caught.value.exit_code == ExitCode.TRAINING
    assert caught.value.hint.endswith(f"this one all the same: nftctl resume {run} --set 'alarms.stop=[]'")
    assert [step for step, _ in list_steps(run / "checkpoints")] == [1]
    assert noted(run) == [(1, "zero-spread")]
    assert len(reporter.warnings) == 1
    # Whoever only starts it again is told again; whoever takes the stop back goes on, and is told nothing twice.
    with pytest.raises(TrainingFailed, match=r"alarms\.stop names zero-spread, which still stands"):
        run_job(plan_resume(*find_checkpoint(str(run), tmp_path), made), reporter, world4)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1]
    freed = tiny(4, ('job.name="flat"', CONSTANT, "alarms.stop=[]"))
    summary = run_job(plan_resume(*find_checkpoint(str(run), tmp_path), freed), reporter, world4)
    assert summary["steps"] == {"from": 1, "to": 4, "total": 4}
    assert noted(run) == [(1, "zero-spread")]
    assert len(reporter.warnings) == 1


@pytest.mark.parametrize("halt", [2, 4])
def test_narrow_bounds_raise_one_alarm_however_the_run_is_cut(
    world4: Any, tiny: Any, reporter: Any, tmp_path: Path, halt: int
) -> None:
    made = tiny(halt, ('job.name="cut"', *NARROW))
    run_job(plan_launch(made, run_dir=tmp_path), reporter, world4)
    before = noted(tmp_path / "cut")
    more = plan_resume(*find_checkpoint(str(tmp_path / "cut"), tmp_path), made, steps=5)
    run_job(more, reporter, world4)
    assert before == ([(3, "clamp")] if halt > 2 else [])
    assert noted(tmp_path / "cut") == [(3, "clamp")]
    (row,) = read_rows(tmp_path / "cut" / "alarms.jsonl")
    assert row["value"] > row["limit"] == 0.5
