"""One started world of four ranks: placement, roles, sharding, gathers, seeds, and what a step really does."""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from nftctl.engine.group import Group
from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_fork, plan_launch, plan_resume
from nftctl.errors import ResumeRefused
from nftctl.run.directory import find_checkpoint
from tests.conftest import Quiet, tiny_profile
from tests.engine.one_process import OneProcess

pytestmark = pytest.mark.ray

MEANS = (
    "train/reward_mean", "train/policy_loss", "train/kl_loss", "train/advantage_mean", "train/optimality_mean",
    "train/optimality_second_moment", "train/positive_error", "train/negative_error",
)  # fmt: skip

Launch = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture
def launch(world4: Any, tiny: Any, reporter: Any, tmp_path: Path) -> Launch:
    numbers = itertools.count()

    def go(steps: int, *sets: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        plan = plan_launch(tiny(steps, (f'job.name="run{next(numbers)}"', *sets)), run_dir=tmp_path)
        summary = run_job(plan, reporter, world4)
        return summary, rows_of(summary)

    return go


@pytest.fixture(scope="module")
def two_steps(world4: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Summary of a run of two steps as the profile has them. Copy it before changing it."""
    plan = plan_launch(tiny_profile(2, ('job.name="two"',)), run_dir=tmp_path_factory.mktemp("two"))
    return run_job(plan, Quiet(), world4)


@pytest.fixture
def copy(two_steps: dict[str, Any], tmp_path: Path) -> Path:
    """Its folder, copied."""
    return Path(shutil.copytree(two_steps["run"], tmp_path / "two", symlinks=True))


def rows_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (Path(summary["run"]) / "metrics.jsonl").read_bytes().splitlines()]


def promised(row: dict[str, Any]) -> dict[str, Any]:
    """What the bitwise promise covers: everything but timings and machine figures."""
    return {k: v for k, v in row.items() if not k.startswith(("timer/", "system/"))}


def tensors_of(folder: Path) -> dict[str, bytes]:
    from safetensors import safe_open

    found: dict[str, bytes] = {}
    for path in sorted((folder / "state").glob("*.safetensors")):
        with safe_open(path, "pt") as part:
            found |= {name: part.get_tensor(name).numpy().tobytes() for name in part.keys()}  # noqa: SIM118
    return found


def test_ranks_are_processes_of_their_own_with_five_roles_each(world4: Any, launch: Launch) -> None:
    launch(1)
    assert len({m["pid"] for m in world4.members}) == 4
    roles = world4.call(
        "apply",
        lambda w: [type(getattr(w.roles, r)).__name__ for r in ("data", "rollout", "reward", "replay", "policy")],
    )
    assert roles == [["DataRole", "RolloutRole", "RewardRole", "ReplayRole", "PolicyRole"]] * 4


def test_every_base_parameter_is_sharded_and_the_shards_add_up(world4: Any, launch: Launch) -> None:
    launch(1)

    def local_sizes(worker: Any) -> dict[str, tuple[str, int, int]]:
        from nftctl.model import shard

        shard.release(worker.roles.family.denoiser)  # what a step gathered stays gathered
        named = worker.roles.family.denoiser.named_parameters()
        return {
            name: (type(p).__name__, p.to_local().numel() if hasattr(p, "to_local") else p.numel(), p.numel())
            for name, p in named
        }

    ranks = world4.call("apply", local_sizes)
    for name in ranks[0]:
        kinds, local, whole = zip(*(rank[name] for rank in ranks), strict=True)
        if "lora_" in name:
            assert set(kinds) == {"Parameter"}, name
            assert set(local) == set(whole), name
        else:
            assert set(kinds) == {"DTensor"}, name
            assert sum(local) == whole[0], name


def test_frozen_weights_are_gathered_once_and_forwards_are_as_planned(world4: Any, launch: Launch) -> None:
    from nftctl.model import shard

    _, rows = launch(3)
    gathers = world4.call("apply", lambda w: shard.gathers(w.roles.family.denoiser))
    units = world4.call("apply", lambda w: len(w.roles.family.denoiser.sharding.units))
    assert gathers == units
    assert all(row["forwards/planned"] == row["forwards/executed"] for row in rows)
    # 4 rows x 4 sampler steps + 4 rows x 4 timesteps; the old policy needs its own forwards from the second step on.
    assert [row["forwards/executed"] for row in rows] == [32, 48, 48]


def test_a_row_of_metrics_equals_a_one_process_float64_mean(two_steps: dict[str, Any], tiny: Any) -> None:
    rows = rows_of(two_steps)
    expected = OneProcess(tiny(1).profile).first_step()
    for name, value in expected.items():
        assert rows[0][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_every_row_holds_the_eight_means_and_the_loss_is_their_sum(two_steps: dict[str, Any]) -> None:
    rows = rows_of(two_steps)
    assert len(rows) == 2
    for row in rows:
        assert set(MEANS) <= set(row)
        assert row["train/loss"] == row["train/policy_loss"] + row["train/kl_loss"]
    assert rows[0]["train/old_gap"] == 0.0
    assert rows[1]["train/old_gap"] > 0.0


def test_micro_batches_agree(launch: Launch) -> None:
    rows = [launch(1, *([f"model.train_micro_batch={n}", f"model.rollout_micro_batch={n}"]))[1][0] for n in (1, 4)]
    for name in (*MEANS, "train/grad_norm"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-5), name


def rollout(worker: Any, step: int, *, old_shift: float = 0.0) -> list[tuple[int, int, bytes]]:
    """(row, tick, latent) of each sample of this rank's rollout, without scoring."""
    from nftctl.model import adapters

    roles = worker.roles
    for parameter in adapters.old_parameters(roles.family.denoiser).values():
        parameter.data.add_(old_shift)
    done = roles.rollout.sample(roles.data.next(4 * step), step, lambda part: None)
    roles.release()
    return [(t.row.number, t.tick, t.x0.numpy().tobytes()) for t in done]


@pytest.mark.parametrize(
    ("clock", "ticks"), [("source_row", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("optimizer_step", [[0] * 4, [1] * 4])]
)
def test_seed_clock_table(launch: Launch, world4: Any, clock: str, ticks: list[list[int]]) -> None:
    from nftctl.algorithm import draws

    def watch(worker: Any) -> None:
        worker.noises, original = [], draws.normal

        def normal(shape: tuple[int, ...], *key: Any) -> torch.Tensor:
            value = original(shape, *key)
            worker.noises.append((key, value.numpy().tobytes()))
            return value

        draws.normal = normal
        worker.unwatch = lambda: setattr(draws, "normal", original)

    launch(1, f'rl.rollout_seed_clock="{clock}"')
    world4.call("apply", watch)
    seen = [world4.call("apply", lambda w, s=step: [t[1] for t in rollout(w, s)]) for step in (0, 1)]
    noises = world4.call("apply", lambda w: w.unwatch() or w.noises)
    assert [ranks[0] for ranks in seen] == ticks
    assert {key for rank in noises for key, _ in rank} == {
        (0, "rollout", tick, rank) for step in ticks for tick in step for rank in range(4)
    }
    assert len({value for rank in noises for _, value in rank}) == (32 if clock == "source_row" else 8)
    expected = draws.normal((3, 1, 8, 8), 0, "rollout", ticks[0][0], 2)
    assert noises[2][0][1] == expected.numpy().tobytes()


def test_samples_come_from_old_alone(launch: Launch, world4: Any, tiny: Any) -> None:
    from nftctl.model import adapters

    launch(1)  # old is still the base but for a share of 0.1 %
    alone = OneProcess(tiny(1).profile)
    parts = world4.call("apply", lambda w: rollout(w, 0, old_shift=0.05))
    shifted = world4.call_one(
        0,
        "apply",
        lambda w: {n: p.detach().numpy() for n, p in adapters.old_parameters(w.roles.family.denoiser).items()},
    )
    for name, parameter in adapters.old_parameters(alone.family.denoiser).items():
        parameter.data.copy_(torch.from_numpy(shifted[name].copy()))
    for rank, samples in enumerate(parts):
        for row, _, data in samples:
            mine = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(1, 3, 1, 8, 8)
            torch.testing.assert_close(mine, alone.x0(row, rank, "old"), rtol=1e-4, atol=1e-4)
            assert not torch.allclose(mine, alone.x0(row, rank, "policy"), atol=1e-3)


def test_a_step_changes_the_next_rollout(launch: Launch, world4: Any) -> None:
    launch(1, 'rl.old.decay="copy"')
    trained = world4.call("apply", lambda w: rollout(w, 0))
    untrained = OneProcess_latents(world4)
    for rank, samples in enumerate(trained):
        for (_, _, now), before in zip(samples, untrained[rank], strict=True):
            assert now != before


def OneProcess_latents(world: Any) -> list[list[bytes]]:
    """The same rollout with the adapters off: what step 1 sampled."""

    def base(worker: Any) -> list[bytes]:
        kept, worker.roles.rollout.__class__.weights = worker.roles.rollout.__class__.weights, "reference"
        try:
            return [data for _, _, data in rollout(worker, 0)]
        finally:
            worker.roles.rollout.__class__.weights = kept

    return world.call("apply", base)


def test_moving_old_follows_its_cadence(launch: Launch) -> None:
    """update_every 2, copy: checkpoint 1 is (theta_1, theta_0), checkpoint 2 is (theta_2, theta_2)."""
    summary, _ = launch(2, "rl.old.update_every=2", 'rl.old.decay="copy"', "checkpoint.every=1")
    steps = [tensors_of(Path(summary["run"]) / "checkpoints" / f"step_00000{n}") for n in (1, 2)]
    names = [n.removeprefix("policy.") for n in steps[0] if n.startswith("policy.")]
    assert len(names) == 32
    assert any(steps[0][f"policy.{n}"] != steps[0][f"old.{n}"] for n in names)
    assert all(steps[1][f"policy.{n}"] == steps[1][f"old.{n}"] for n in names)
    assert all(steps[0][f"old.{n}"] != steps[1][f"old.{n}"] for n in names if n.endswith("lora_B"))


def test_four_steps_straight_are_two_and_a_resume_and_two(
    launch: Launch, world4: Any, tiny: Any, reporter: Any, copy: Path
) -> None:
    straight, rows = launch(4)
    run, checkpoint = find_checkpoint(str(copy), copy.parent)
    plan = plan_resume(run, checkpoint, tiny(2, ('job.name="two"',)), steps=4)
    resumed = run_job(plan, reporter, world4)
    assert [promised(row) for row in rows_of(resumed)] == [promised(row) for row in rows]
    first, second = (tensors_of(Path(s["checkpoint"])) for s in (straight, resumed))
    assert len(first) == 32 * 5
    assert first == second


def test_three_updates_per_rollout_and_a_penalty_run_the_planned_forwards(launch: Launch) -> None:
    sets = ("rl.updates_per_rollout=3", "rl.old.update_every=3", "rl.kl_beta=0.5", 'rl.old.decay="copy"')
    _, rows = launch(1, *sets)
    # 16 rollout rows; 16 pairs: policy and reference in all three updates, old in the second and third.
    assert rows[0]["forwards/executed"] == rows[0]["forwards/planned"] == 16 + 16 * (3 + 3 + 2)
    assert rows[0]["train/kl_loss"] > 0
    assert rows[0]["train/old_gap"] > 0


@pytest.mark.parametrize(
    ("key", "shown"), [("rl.seed=1", "rl.seed"), ("rl.guidance=2.0", "rl.guidance"), ("rl.beta=2.0", "rl.beta")]
)
def test_resume_refuses_another_run(copy: Path, tiny: Any, key: str, shown: str) -> None:
    before = sorted((p, p.stat().st_mtime_ns) for p in copy.rglob("*"))
    run, checkpoint = find_checkpoint(str(copy), copy.parent)
    with pytest.raises(ResumeRefused) as refused:
        plan_resume(run, checkpoint, tiny(2, (key,)), steps=2)
    assert [d.key for d in refused.value.differences] == [shown]
    assert sorted((p, p.stat().st_mtime_ns) for p in copy.rglob("*")) == before


def test_no_global_generator_is_consulted_in_a_step(world4: Any, launch: Launch, two_steps: dict[str, Any]) -> None:
    """Two runs of two steps, the second with every global generator reseeded before each stage: the same bits."""
    stages = (
        ("rollout", "sample"),
        ("policy", "prepare"),
        ("reward", "collect"),
        ("replay", "commit"),
        ("policy", "train"),
    )

    def disturb(worker: Any) -> None:
        import random

        import numpy as np

        def states() -> tuple[Any, ...]:
            return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

        def around(owner: type, name: str) -> None:
            stage = getattr(owner, name)

            def disturbed(self: Any, *args: Any) -> Any:
                worker.stirs += 1
                torch.manual_seed(worker.stirs)
                np.random.seed(worker.stirs)
                random.seed(worker.stirs)
                before = states()
                answer = stage(self, *args)
                assert states() == before, name
                return answer

            disturbed.undisturbed = stage  # type: ignore[attr-defined]
            setattr(owner, name, disturbed)

        worker.stirs = 0
        for role, name in stages:
            around(type(getattr(worker.roles, role)), name)

    def undisturb(worker: Any) -> int:
        for role, name in stages:
            owner = type(getattr(worker.roles, role))
            setattr(owner, name, getattr(owner, name).undisturbed)
        return worker.stirs

    world4.call("apply", disturb)
    try:
        _, disturbed = launch(2)
    finally:
        stirs = world4.call("apply", undisturb)
    assert stirs == [2 * 5] * 4
    assert [promised(row) for row in disturbed] == [promised(row) for row in rows_of(two_steps)]


def test_a_fork_goes_on_from_its_parent_with_another_profile(
    world4: Any, tiny: Any, reporter: Any, copy: Path, tmp_path: Path
) -> None:
    run, checkpoint = find_checkpoint(str(copy), tmp_path)
    plan = plan_fork(run, checkpoint, tiny(2, ("optimizer.lr=1e-4", "rl.seed=9")), "child", steps=3)
    child = run_job(plan, reporter, world4)
    record = orjson.loads((tmp_path / "child" / "run.json").read_bytes())
    assert child["steps"] == {"from": 2, "to": 3, "total": 3}
    assert [row["step"] for row in rows_of(child)] == [3]
    assert record["parent"]["run_id"] == orjson.loads((copy / "run.json").read_bytes())["run_id"]
    assert {d["key"] for d in record["parent"]["changed"]} == {"optimizer.lr", "rl.seed"}
    before, after = tensors_of(checkpoint), tensors_of(Path(child["checkpoint"]))
    assert set(before) == set(after)
    assert before != after


def test_a_step_sends_some_numbers_through_ray_and_no_tensor(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, passed = Group.call, []

    def call(self: Group, method: str, *args: Any) -> list[Any]:
        answers = plain(self, method, *args)
        if method in ("sample", "prepare", "score", "train"):
            passed.extend(pickle.dumps(what) for what in (*[(method, args)] * len(self.actors), *answers))
        return answers

    monkeypatch.setattr(Group, "call", call)
    launch(2, "samples.prompts=0", 'eval.prompt_file=""')
    assert len(passed) == 2 * 4 * 2 * 4  # there and back, of four ranks, in four stages, of two steps
    assert not [what for what in passed if b"torch" in what or b"numpy" in what]
    # One image of this base has 768 bytes in float32, and a rank makes several in a step.
    assert sum(map(len, passed)) / (2 * 4) < 3_000
