"""All weights trained in a real world: the first step is an adapter's, resume is exact, both memory policies agree."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.run.directory import find_checkpoint
from nftctl.run.disk import point_link
from nftctl.run.manifest import read_manifest
from tests.conftest import Quiet, tiny_profile
from tests.engine.test_world import MEANS, promised, rows_of, tensors_of

pytestmark = pytest.mark.ray

FULL = ('model.train="full"', "optimizer.lr=1e-3", "rl.ema_decay=0.9", 'rl.old.decay="linear"')
NEXT = (*FULL, "data.shuffle=false", 'rl.old.decay="copy"')
"""Two steps of these show what the first one did to the second one's rollout."""
POLICIES = ("gather-once", "reshard")
Rows = list[dict[str, Any]]
Launch = Callable[..., tuple[dict[str, Any], Rows]]


@pytest.fixture(scope="module")
def launch(world4: Any, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    numbers, folder = itertools.count(), tmp_path_factory.mktemp("full")

    def go(steps: int, *sets: str) -> tuple[dict[str, Any], Rows]:
        plan = plan_launch(tiny_profile(steps, (f'job.name="run{next(numbers)}"', *sets)), run_dir=folder)
        summary = run_job(plan, Quiet(), world4)
        return summary, rows_of(summary)

    return go


@pytest.fixture(scope="module")
def two_steps(launch: Launch) -> dict[str, Rows]:
    """The same two steps under each memory policy."""
    return {policy: launch(2, *NEXT, f'model.shard="{policy}"')[1] for policy in POLICIES}


def test_the_first_step_is_that_of_an_adapter_that_does_nothing_yet(launch: Launch, two_steps: dict[str, Rows]) -> None:
    adapter, full = launch(1)[1][0], two_steps["gather-once"][0]
    for name in MEANS:
        assert full[name] == pytest.approx(adapter[name], rel=1e-6, abs=1e-9), name
    assert full["forwards/executed"] == full["forwards/planned"] == adapter["forwards/executed"]
    assert full["train/grad_norm"] > 0


def test_a_step_changes_the_next_rollout(launch: Launch, two_steps: dict[str, Rows]) -> None:
    still = launch(2, *NEXT, "optimizer.lr=1e-12")[1]
    for rows in two_steps.values():
        assert rows[0]["train/reward_mean"] == pytest.approx(still[0]["train/reward_mean"], rel=1e-6)
        assert rows[1]["train/policy_loss"] != pytest.approx(still[1]["train/policy_loss"], rel=1e-6)


def test_both_memory_policies_train_alike(two_steps: dict[str, Rows]) -> None:
    once, again = (two_steps[policy] for policy in POLICIES)
    for name in (*MEANS, "train/grad_norm"):
        assert [row[name] for row in once] == pytest.approx([row[name] for row in again], rel=1e-5, abs=1e-9), name


def test_straight_equals_resumed_to_the_bit(launch: Launch, world4: Any, tmp_path: Path) -> None:
    """From the checkpoint that a run wrote on its way, in a copy of its folder."""
    sets = (*FULL, "rl.kl_beta=0.01", "rl.updates_per_rollout=2", "rl.old.update_every=2", "checkpoint.every=2")
    straight, rows = launch(4, *sets)
    copy = Path(shutil.copytree(straight["run"], tmp_path / Path(straight["run"]).name, symlinks=True))
    shutil.rmtree(copy / "checkpoints" / "step_000004")
    point_link(copy / "checkpoints" / "latest", "step_000002")
    run, checkpoint = find_checkpoint(str(copy / "checkpoints" / "step_000002"), tmp_path)
    plan = plan_resume(run, checkpoint, tiny_profile(4, (f'job.name="{run.name}"', *sets)), steps=4)
    resumed = run_job(plan, Quiet(), world4)
    assert resumed["steps"] == {"from": 2, "to": 4, "total": 4}
    assert [promised(row) for row in rows_of(resumed)] == [promised(row) for row in rows]
    first, second = tensors_of(Path(straight["checkpoint"])), tensors_of(Path(resumed["checkpoint"]))
    assert first == second
    tensors = read_manifest(Path(straight["checkpoint"])).tensors
    parts = {name.partition(".")[0] for name in tensors}
    assert parts == {"policy", "old", "ema", "optim"}
    assert len(list((Path(straight["checkpoint"]) / "state").glob("*.safetensors"))) == 4
    assert rows[2]["train/kl_loss"] > 0
    assert rows[2]["train/old_gap"] > 0
