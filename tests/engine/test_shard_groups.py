"""Four ranks that shard in two groups of two: adapters train to the bit as without groups, all weights nearly so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.errors import ResumeRefused
from nftctl.model import shard
from nftctl.run.directory import find_checkpoint
from tests.engine.test_full_training import FULL
from tests.engine.test_world import MEANS, promised, rows_of, tensors_of

pytestmark = pytest.mark.ray

GROUPS = "grid.shard_group=2"
Launch = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture
def launch(world4: Any, tiny: Any, reporter: Any, tmp_path: Path) -> Launch:
    numbers = itertools.count()

    def go(steps: int, *sets: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        plan = plan_launch(tiny(steps, (f'job.name="run{next(numbers)}"', *sets)), run_dir=tmp_path)
        summary = run_job(plan, reporter, world4)
        return summary, [promised(row) for row in rows_of(summary)]

    return go


def received(rank: Any) -> int:
    return shard.received(rank.roles.family.denoiser)


def test_an_adapter_trains_to_the_bit_as_without_groups(launch: Launch, world4: Any) -> None:
    plain, rows = launch(2)
    whole = world4.call("apply", received)
    grouped, same = launch(2, GROUPS)
    halves = world4.call("apply", received)
    assert same == rows
    assert tensors_of(Path(grouped["checkpoint"])) == tensors_of(Path(plain["checkpoint"]))
    # Three quarters of the base come from other ranks, or one half; rows that fill shards up make a little more of it.
    assert [half / one for half, one in zip(halves, whole, strict=True)] == pytest.approx([2 / 3] * 4, rel=0.05)


def test_all_weights_train_alike_and_resume_exactly(
    launch: Launch, world4: Any, tiny: Any, reporter: Any, tmp_path: Path
) -> None:
    plain, (straight, rows) = launch(3, *FULL)[1], launch(3, *FULL, GROUPS)
    # Four gradients are added up as pairs of pairs: each float32 sum may round otherwise, and steps carry that on.
    for name in (*MEANS, "train/grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in plain], rel=1e-4, abs=1e-8), name
    halted, _ = launch(1, *FULL, GROUPS)
    run, checkpoint = find_checkpoint(halted["run"], tmp_path)
    name = f'job.name="{run.name}"'
    with pytest.raises(ResumeRefused) as caught:
        plan_resume(run, checkpoint, tiny(3, (name, *FULL)), steps=3)
    assert [difference.key for difference in caught.value.differences] == ["grid.shard_group"]
    plan = plan_resume(run, checkpoint, tiny(3, (name, *FULL, GROUPS)), steps=3)
    resumed = run_job(plan, reporter, world4)
    assert [promised(row) for row in rows_of(resumed)] == rows
    assert tensors_of(Path(resumed["checkpoint"])) == tensors_of(Path(straight["checkpoint"]))
