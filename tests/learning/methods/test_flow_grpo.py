"""Flow-GRPO's rollout and update: ratios, directions, and the penalty to the base."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributions import Normal

from nftctl.algorithm import draws
from nftctl.learning.methods.flow_grpo import FlowGrpo
from nftctl.learning.task import Task
from nftctl.model import adapters
from tests.roles.samples import copies, set_adapter

SETTINGS = {"lr": 1e-3, "noise": 0.7, "clip": 0.2, "updates": 1, "kl": 0.0}


def test_the_path_starts_from_the_common_noise_and_its_log_probabilities_are_normal(task: Any) -> None:
    learning = task(seed=3)
    set_adapter(learning.family, "policy", 1)
    method = FlowGrpo(learning, SETTINGS)
    rows = learning.rows(0)
    group, path = method.roll(rows)
    assert path.states.shape == (4, 4, *learning.family.latent_shape)
    assert torch.equal(path.states[0], learning.noise(rows, 0))
    assert path.log_probabilities.shape == (2, 4)
    for i, step in enumerate(method._steps[:-1]):
        x = path.states[i]
        with torch.no_grad(), learning.copies.use("policy"):
            v = learning.velocity(x, torch.full((4,), step.t), group.conditions)
        mean = step.mean(x, v)
        eps = torch.stack(
            [draws.normal(x.shape[1:], 3, "learning/sde", row, rank, i) for row in (0, 1) for rank in (0, 1)]
        )
        torch.testing.assert_close(path.states[i + 1], mean + step.std * eps, rtol=1e-4, atol=1e-5)
        expected = Normal(mean, step.std).log_prob(path.states[i + 1]).flatten(1).sum(dim=1)
        torch.testing.assert_close(path.log_probabilities[i], expected, rtol=1e-4, atol=1e-2)
    images = learning.family.decoder.decode(path.states[-1].clamp(-1, 1))
    assert torch.equal(group.rewards, learning.rewards(images, rows))


def test_ratios_are_one_at_the_first_update_and_not_at_the_second(task: Any) -> None:
    learning = task()
    method = FlowGrpo(learning, SETTINGS)
    method.step(learning.rows(0))
    # Log-probabilities are sums of 192 float32 terms.
    assert method.largest_ratio == pytest.approx(1.0, abs=1e-3)
    rows = learning.rows(1)
    group, path = method.roll(rows)
    method._update(group, path, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0)
    before = method.largest_ratio
    method._update(group, path, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0)
    assert before == pytest.approx(1.0, abs=1e-3)
    assert method.largest_ratio > 1.01


def path_probability(method: FlowGrpo, task: Task, rows: Any, group: Any, path: Any) -> torch.Tensor:
    """Log-probability of each sample's path under the policy as it now is: [N]."""
    total = torch.zeros(len(group.x0))
    with torch.no_grad(), task.copies.use("policy"):
        for i, step in enumerate(method._steps[:-1]):
            v = task.velocity(path.states[i], torch.full((len(total),), step.t), group.conditions)
            total += Normal(step.mean(path.states[i], v), step.std).log_prob(path.states[i + 1]).flatten(1).sum(dim=1)
    return total


def test_an_update_makes_liked_paths_likelier_than_disliked_ones(task: Any) -> None:
    learning = task()
    method = FlowGrpo(learning, SETTINGS)
    rows = learning.rows(0)
    group, path = method.roll(rows)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    before = path_probability(method, learning, rows, group, path)
    # B starts at zero, so the first step moves nothing but B, and the second moves what is sampled.
    for _ in range(3):
        method._update(group, path, advantages, 0)
    gained = path_probability(method, learning, rows, group, path) - before
    assert float((gained * advantages).sum()) > 0.1


def test_without_advantages_nothing_moves_but_a_penalty_pulls_to_the_base(task: Any) -> None:
    for kl in (0.0, 0.1):
        learning = task()
        set_adapter(learning.family, "policy", 1)
        method = FlowGrpo(learning, SETTINGS | {"kl": kl})
        rows = learning.rows(0)
        group, path = method.roll(rows)
        before = copies(adapters.policy_parameters(learning.family.denoiser))
        losses = [method._update(group, path, torch.zeros(4), 0) for _ in range(4)]
        after = adapters.policy_parameters(learning.family.denoiser)
        moved = any(not torch.equal(before[name], p.detach()) for name, p in after.items())
        assert moved == (kl > 0)
        if kl > 0:
            assert losses[-1] < 0.95 * losses[0]


def test_the_penalty_is_the_squared_gap_of_velocities_by_the_noise(task: Any) -> None:
    """KL of a step = move^2 |v - v_base|^2 / (2 std^2), here summed up by hand in float64."""
    learning = task()
    set_adapter(learning.family, "policy", 1)
    method = FlowGrpo(learning, SETTINGS | {"kl": 1.0, "lr": 1e-12})
    group, path = method.roll(learning.rows(0))
    total = 0.0
    for i, step in enumerate(method._steps[:-1]):
        x, t = path.states[i], torch.full((4,), step.t)
        with torch.no_grad(), learning.copies.use("policy"):
            v = learning.velocity(x, t, group.conditions).double()
        with torch.no_grad(), learning.copies.use("reference"):
            base = learning.velocity(x, t, group.conditions).double()
        total += float((step.move**2 * (v - base).square()).sum()) / (2 * step.std**2)
    assert method._update(group, path, torch.zeros(4), 0) == pytest.approx(total / 8, rel=1e-3)
    assert total > 0


def test_a_step_counts_its_backwards_by_update(task: Any) -> None:
    learning = task()
    method = FlowGrpo(learning, SETTINGS | {"updates": 2})
    taken = method.step(learning.rows(0))
    assert taken.backwards == 2 * 2 * 4  # updates x noisy steps x samples
    assert math.isfinite(taken.loss)
    assert method._learner.steps == 2


def test_guidance_is_trained_as_it_was_sampled(task: Any) -> None:
    """At guidance 1.5 the ratio is 1 as well: training asks for the velocity that the rollout followed."""
    learning = task("rl.guidance=1.5")
    method = FlowGrpo(learning, SETTINGS)
    method.step(learning.rows(0))
    assert method.largest_ratio == pytest.approx(1.0, abs=1e-3)
