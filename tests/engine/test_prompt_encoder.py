"""Where the prompt encoder lives changes no number of a run, and a resumed run may have it elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.run.directory import find_checkpoint
from tests.engine.test_world import promised, rows_of, tensors_of

pytestmark = pytest.mark.ray

SETS = (
    'model.shard="gather-once"', "rl.guidance=3", "model.rollout_micro_batch=2", "eval.samples_per_prompt=1",
    "eval.steps=2",
)  # fmt: skip


def visits(worker: Any) -> tuple[int, int, bool]:
    encoder = worker.roles.family.encoder
    return encoder.visits, encoder.encoded, not any(p.is_meta for p in encoder.tower.parameters())


@pytest.fixture
def launch(world4: Any, tiny: Any, reporter: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def go(name: str, steps: int, home: str) -> dict[str, Any]:
        sets = (*SETS, f'job.name="{name}"', f'model.prompt_encoder="{home}"')
        summary: dict[str, Any] = run_job(plan_launch(tiny(steps, sets, look=True), run_dir=tmp_path), reporter, world4)
        return summary

    return go


def test_three_homes_are_one_run(
    launch: Callable[..., dict[str, Any]], world4: Any, tiny: Any, reporter: Any, tmp_path: Path
) -> None:
    summaries, seen = {}, {}
    for home in ("resident", "offload", "per-step"):
        summaries[home] = launch(home, 2, home)
        seen[home] = world4.call("apply", visits)
    # The evaluation before, the grid's and two steps' prompts; the rest is remembered. The same in every way.
    assert seen["resident"] == seen["offload"]
    assert [found[:2] for found in seen["per-step"]] == [found[:2] for found in seen["resident"]]
    assert all(found[0] <= 4 for found in seen["per-step"])
    assert {found[2] for found in seen["per-step"]} == {False}
    rows = {home: [promised(row) for row in rows_of(summary)] for home, summary in summaries.items()}
    assert rows["offload"] == rows["per-step"] == rows["resident"]
    evaluations = [summary["eval"] for summary in summaries.values()]
    assert evaluations[0] == evaluations[1] == evaluations[2]

    halted = launch("halted", 1, "per-step")
    run, checkpoint = find_checkpoint(halted["run"], tmp_path)
    elsewhere = tiny(2, (*SETS, 'job.name="halted"', 'model.prompt_encoder="offload"'), look=True)
    resumed = run_job(plan_resume(run, checkpoint, elsewhere, steps=2), reporter, world4)
    assert [promised(row) for row in rows_of(resumed)] == rows["resident"]
    first, second = (tensors_of(Path(summary["checkpoint"])) for summary in (summaries["resident"], resumed))
    assert first == second
