"""DiffusionNFT here is DiffusionNFT in the product: the same numbers as its roles, and as its formulas in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nftctl.algorithm import objective, schedule
from nftctl.learning.methods import make
from nftctl.learning.methods.control import Control
from nftctl.learning.methods.nft import Nft
from nftctl.learning.splits import Splits
from nftctl.learning.task import Group, Task
from nftctl.model import adapters
from nftctl.model.registry import load_family
from nftctl.profile.prompts import read_prompts, resolve_prompt_file
from nftctl.profile.schema import Profile
from nftctl.roles.policy import PolicyRole
from nftctl.roles.rollout import RolloutRole
from nftctl.run.state import RunState
from tests.engine.one_process import OneProcess
from tests.roles.samples import CPU, copies, set_adapter

SETTINGS = {"lr": 1e-3, "timesteps": 2}


def all_prompts() -> Splits:
    """The training prompts as a run has them: nothing taken out for tuning."""
    train, test = (read_prompts(resolve_prompt_file("embedded", split)) for split in ("train", "test"))  # type: ignore[arg-type]
    return Splits(train, train[:1], test)


def whole_task(profile: Profile) -> Task:
    return Task(profile, profile.rl.seed, all_prompts())


def test_the_first_step_is_the_runs_formulas_written_out_in_numpy(profile: Any) -> None:
    settings = profile("rl.seed=4", "rl.advantage_high=2.0")
    task = whole_task(settings)
    method = Nft(task, SETTINGS)
    taken = method.step(task.rows(0))
    expected = OneProcess(settings).first_step()
    pairs = 2 * 2 * 2
    assert taken.backwards == pairs
    assert taken.reward == pytest.approx(expected["train/reward_mean"], abs=1e-6)
    means = dict(zip(objective.METRICS, (method.sums / pairs).tolist(), strict=True))
    for name, value in means.items():
        assert value == pytest.approx(expected[f"train/{name}"], rel=1e-4, abs=1e-7), name
    assert taken.loss == pytest.approx(expected["train/policy_loss"], rel=1e-4)


def roles_gradient(settings: Profile, rank: int, r: torch.Tensor, control: dist.ProcessGroup) -> dict[str, Any]:
    """First moments, a tenth of the gradient, after the step of one rank's roles whose samples have optimality r."""
    family = load_family(settings.model, "embedded", "cosmos3", CPU, seed=settings.rl.seed)
    adapters.add_adapters(family.denoiser, settings.model.lora, seed=settings.rl.seed)
    part(family)
    rollout = RolloutRole(family, settings, rank=rank, device=CPU)
    policy = PolicyRole(family, settings, rank=rank, device=CPU, control=control)
    task_rows = whole_task(settings).rows(1)
    samples = rollout.sample(task_rows, 0, lambda _: None)
    for sample, value in zip(samples, r.tolist(), strict=True):
        sample.optimality = value
    state = RunState(old_blended=1)
    policy.prepare(samples, state)
    policy.train(samples, state)
    return {
        "x0": [sample.x0 for sample in samples],
        "moments": {n: policy.optimizer.state[p]["exp_avg"] for n, p in policy.parameters.items()},
    }


def part(family: Any) -> None:
    """Policy and old as they may be after many steps: neither the base nor one another."""
    set_adapter(family, "policy", 1)
    set_adapter(family, "old", 2)


def test_a_step_has_the_samples_and_the_gradient_of_all_ranks_roles(profile: Any, control: dist.ProcessGroup) -> None:
    """Old a blend and a penalty to the base, so that all three forwards count; no clipping, to see the gradient."""
    settings = profile("optimizer.grad_clip=1e9", "rl.kl_beta=0.5", "rl.beta=0.5", "rl.seed=2")
    task = whole_task(settings)
    part(task.family)
    method = Nft(task, SETTINGS)
    method._old_version = -1
    rows = task.rows(1)
    group = task.roll(rows, 0, "old")
    r = method.optimality(group).view(2, 2)
    method.step(rows)
    ranks = [roles_gradient(settings, rank, r[:, rank], control) for rank in range(2)]
    for rank in range(2):
        torch.testing.assert_close(group.x0[rank::2], torch.stack(ranks[rank]["x0"]), rtol=1e-4, atol=1e-5)
    optimizer, found = method._learner.optimizer, task.copies.parameters
    for name, parameter in found.items():
        mean = (ranks[0]["moments"][name] + ranks[1]["moments"][name]) / 2
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], mean, rtol=1e-3, atol=1e-7)
    assert any(bool(p.any()) for n, p in found.items() if n.endswith("lora_B"))


def test_old_follows_by_the_profiles_law_and_samples(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learning = task('rl.old.decay="constant"', "rl.old.constant=0.75")
    method = Nft(learning, SETTINGS)
    before = copies(adapters.old_parameters(learning.family.denoiser))
    used = []
    roll = learning.roll
    monkeypatch.setattr(
        learning, "roll", lambda rows, steps, weights: used.append((steps, weights)) or roll(rows, steps, weights)
    )
    method.step(learning.rows(0))
    policy = copies(adapters.policy_parameters(learning.family.denoiser))
    for name, old in adapters.old_parameters(learning.family.denoiser).items():
        torch.testing.assert_close(old.detach(), 0.75 * before[name] + 0.25 * policy[name])
    method.step(learning.rows(1))
    assert used == [(0, "old"), (1, "old")]


def test_forwards_are_those_of_the_plan(task: Any) -> None:
    """Old runs only while it is no copy of the policy: not at the first step."""
    learning = task()
    method, denoiser = Nft(learning, SETTINGS), learning.family.denoiser
    counts = []
    for number in range(2):
        before = denoiser.forwards
        method.step(learning.rows(number))
        counts.append(denoiser.forwards - before)
    samples, steps, times = 4, 3, 2
    assert counts == [samples * steps + samples * times, samples * steps + 2 * samples * times]


def test_several_updates_of_a_rollout_are_several_optimizer_steps(task: Any) -> None:
    learning = task("rl.updates_per_rollout=2", "rl.old.update_every=2", "rl.timesteps_per_sample=1")
    method = Nft(learning, {"lr": 1e-3, "timesteps": 1})
    taken = method.step(learning.rows(0))
    assert (method._learner.steps, taken.backwards) == (2, 2 * 4)


def test_training_forwards_may_be_cut(task: Any) -> None:
    """Micro-batches change rounding alone."""
    sums = []
    for sets in ((), ("model.train_micro_batch=3",)):
        learning = task(*sets)
        method = Nft(learning, SETTINGS)
        method.step(learning.rows(0))
        sums.append(method.sums)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-6)


def test_the_control_deals_the_same_advantages_to_other_samples(task: Any) -> None:
    learning = task()
    rows = learning.rows(0)
    rewards = torch.tensor([[0.1, 0.9], [0.2, 0.4]], dtype=torch.float64)
    group = Group(rows, torch.zeros(4, 1), [], rewards)
    honest, dealt = Nft(learning, SETTINGS), make("control", learning, SETTINGS)
    assert isinstance(dealt, Control)
    found = [dealt.advantages(replace(group, rows=learning.rows(step))) for step in range(8)]
    expected = honest.advantages(group)
    for advantages in found:
        assert sorted(advantages.flatten().tolist()) == sorted(expected.flatten().tolist())
    assert any(not torch.equal(advantages, expected) for advantages in found)
    assert len({tuple(advantages.flatten().tolist()) for advantages in found}) > 1


def test_times_come_from_the_samplers_grid(task: Any) -> None:
    learning = task()
    method = Nft(learning, SETTINGS)
    group = learning.roll(learning.rows(0), 0, "policy")
    times = method._times(group, 0)
    assert times.shape == (8,)
    assert {round(float(t), 6) for t in times} <= {round(s, 6) for s in schedule.sigmas(3, 3.0)[:-1]}
