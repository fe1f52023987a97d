"""All weights trained in a real world: the first step is an adapter's, resume is exact, both memory policies agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.run.directory import find_checkpoint
from nftctl.run.manifest import read_manifest
from tests.engine.test_world import MEANS, promised, rows_of, tensors_of

pytestmark = pytest.mark.ray

FULL = ('model.train="full"', "optimizer.lr=1e-3", "rl.ema_decay=0.9", 'rl.old.decay="linear"')
Launch = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture
def launch(world4: Any, tiny: Any, reporter: Any, tmp_path: Path) -> Launch:
    numbers = itertools.count()

    def go(steps: int, *sets: str, look: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        plan = plan_launch(tiny(steps, (f'job.name="run{next(numbers)}"', *sets), look), run_dir=tmp_path)
        summary = run_job(plan, reporter, world4)
        return summary, rows_of(summary)

    return go


def test_the_first_step_is_that_of_an_adapter_that_does_nothing_yet(launch: Launch) -> None:
    adapter, full = launch(1)[1][0], launch(1, *FULL)[1][0]
    for name in MEANS:
        assert full[name] == pytest.approx(adapter[name], rel=1e-6, abs=1e-9), name
    assert full["forwards/executed"] == full["forwards/planned"] == adapter["forwards/executed"]
    assert full["train/grad_norm"] > 0


@pytest.mark.parametrize("policy", ["gather-once", "reshard"])
def test_a_step_changes_the_next_rollout(launch: Launch, world4: Any, policy: str) -> None:
    settings = (*FULL, f'model.shard="{policy}"', "data.shuffle=false", 'rl.old.decay="copy"')
    rows = launch(2, *settings)[1]
    still = launch(2, *settings, "optimizer.lr=1e-12")[1]
    assert rows[0]["train/reward_mean"] == still[0]["train/reward_mean"]
    assert rows[1]["train/policy_loss"] != pytest.approx(still[1]["train/policy_loss"], rel=1e-6)


def test_both_memory_policies_train_alike(launch: Launch) -> None:
    once, again = (launch(2, *FULL, f'model.shard="{policy}"')[1] for policy in ("gather-once", "reshard"))
    for name in (*MEANS, "train/grad_norm"):
        assert [row[name] for row in once] == pytest.approx([row[name] for row in again], rel=1e-5, abs=1e-9), name


def test_straight_equals_resumed_to_the_bit(
    launch: Launch, world4: Any, tiny: Any, reporter: Any, tmp_path: Path
) -> None:
    penalty = ("rl.kl_beta=0.01", "rl.updates_per_rollout=2", "rl.old.update_every=2")
    straight, rows = launch(4, *FULL, *penalty)
    halted, _ = launch(2, *FULL, *penalty)
    run, checkpoint = find_checkpoint(halted["run"], tmp_path)
    name = f'job.name="{run.name}"'
    plan = plan_resume(run, checkpoint, tiny(4, (name, *FULL, *penalty)), steps=4)
    resumed = run_job(plan, reporter, world4)
    assert [promised(row) for row in rows_of(resumed)] == [promised(row) for row in rows]
    first, second = tensors_of(Path(straight["checkpoint"])), tensors_of(Path(resumed["checkpoint"]))
    assert first == second
    tensors = read_manifest(Path(straight["checkpoint"])).tensors
    parts = {name.partition(".")[0] for name in tensors}
    assert parts == {"policy", "old", "ema", "optim"}
    assert len(list((Path(straight["checkpoint"]) / "state").glob("*.safetensors"))) == 4
    assert rows[2]["train/kl_loss"] > 0
    assert rows[2]["train/old_gap"] > 0
