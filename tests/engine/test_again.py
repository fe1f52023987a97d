"""A run that was lost before its first checkpoint begins again: the same run, the same folder, the same result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine import loop
from nftctl.engine.loop import run_job
from nftctl.engine.lost import RanksLost, read_loss
from nftctl.engine.plan import plan_again, plan_launch
from nftctl.errors import ResumeRefused
from nftctl.run.checkpoints import list_steps
from nftctl.run.directory import RunDirectory
from tests.engine.test_world import promised, rows_of, tensors_of

pytestmark = pytest.mark.ray

SETS = ("eval.samples_per_prompt=1", "eval.steps=2", "samples.prompts=0", "checkpoint.every=0", "rl.sample_steps=4")


def test_it_is_to_the_bit_the_run_that_was_not_lost(
    world4: Any, tiny: Any, reporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(name: str, *more: str) -> Any:
        return tiny(3, (f'job.name="{name}"', *SETS, *more), look=True)

    straight = run_job(plan_launch(profile("straight"), run_dir=tmp_path), reporter, world4)
    plan, steps, take = plan_launch(profile("lost"), run_dir=tmp_path), [], loop.take_step

    def lose_the_third(*args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise RanksLost("rank 2 died in step 3", rank=2)
        return take(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", lose_the_third)
        with pytest.raises(RanksLost):
            run_job(plan, reporter, world4)
    run = RunDirectory.open(plan.run_path)
    loss = read_loss(run.logs / "attempt_1")
    assert loss is not None
    assert loss.message == "rank 2 died in step 3"
    assert list_steps(run.checkpoints) == []
    with pytest.raises(ResumeRefused) as caught:
        plan_again(run, profile("lost", "rl.seed=5"))
    assert {difference.key for difference in caught.value.differences} == {"rl.seed"}
    again = plan_again(run, profile("lost"))
    assert (again.run_id, again.run_path) == (plan.run_id, plan.run_path)
    summary = run_job(loop.replace(again, restart=loss.message), reporter, world4)
    assert [promised(row) for row in rows_of(summary)] == [promised(row) for row in rows_of(straight)]
    assert tensors_of(Path(summary["checkpoint"])) == tensors_of(Path(straight["checkpoint"]))
    evaluations = [json.loads(line)["step"] for line in (run.path / "evaluations.jsonl").open()]
    assert evaluations == [0, 3]
    (entry,) = run.read_record()["restarts"]
    assert (entry["attempt"], entry["step"], entry["reason"]) == ("attempt_2", 0, "rank 2 died in step 3")
    assert read_loss(run.logs / "attempt_2") is None
