"""Flow matching on the best sample of each group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nftctl.algorithm import draws, schedule
from nftctl.learning.methods.best_of_group import BestOfGroup, best_samples
from nftctl.learning.task import Group
from tests.roles.samples import set_adapter


def test_the_best_of_each_group_with_a_spread() -> None:
    rewards = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.5, 0.5], [0.7, 0.2, 0.7]], dtype=torch.float64)
    assert best_samples(rewards) == [(0, 1), (2, 0)]


def test_the_loss_is_flow_matching_on_those_samples(task: Any) -> None:
    learning = task(seed=5)
    set_adapter(learning.family, "policy", 1)
    method = BestOfGroup(learning, {"lr": 1e-3, "timesteps": 2})
    rows = learning.rows(3)
    rolled = learning.roll(rows, 0, "policy")
    group = Group(rows, rolled.x0, rolled.conditions, torch.tensor([[0.2, 0.8], [0.9, 0.1]], dtype=torch.float64))
    errors = []
    for row, rank in ((0, 1), (1, 0)):
        x0, number = rolled.x0[2 * row + rank], rows[row].number
        picks = draws.permutation(3, 5, "train_t", number, rank, 0)[:2]
        for k, pick in enumerate(picks.tolist()):
            t = torch.tensor(schedule.sigmas(3, 3.0)[pick])
            eps = draws.normal(x0.shape, 5, "train_eps", number, rank, k)
            with torch.no_grad(), learning.copies.use("policy"):
                v = learning.velocity(((1 - t) * x0 + t * eps)[None], t[None], [rolled.conditions[2 * row + rank]])[0]
            errors.append(float((v - (eps - x0)).double().square().mean()))
    loss = method._update(group, best_samples(group.rewards))
    assert loss == pytest.approx(sum(errors) / 4, rel=1e-4)


def test_groups_alike_teach_nothing(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learning = task()
    method = BestOfGroup(learning, {"lr": 1e-3, "timesteps": 2})
    monkeypatch.setattr(learning, "rewards", lambda images, rows: torch.full((2, 2), 0.25, dtype=torch.float64))
    taken = method.step(learning.rows(0))
    assert (taken.reward, taken.backwards, taken.loss) == (0.25, 0, 0.0)
    assert method._learner.steps == 0


def test_a_step_trains_one_sample_a_group(task: Any) -> None:
    learning = task()
    method = BestOfGroup(learning, {"lr": 1e-3, "timesteps": 3})
    taken = method.step(learning.rows(0))
    assert (taken.backwards, method._learner.steps) == (2 * 3, 1)
    assert any(bool(p.detach().any()) for n, p in learning.copies.parameters.items() if n.endswith("lora_B"))
