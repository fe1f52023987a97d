"""What methods share: their names, and an optimizer that refuses what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nftctl.errors import TrainingFailed, UsageRefused
from nftctl.learning.methods import make
from nftctl.learning.methods.method import Learner
from tests.roles.samples import copies


def test_an_unknown_name_is_refused(task: Any) -> None:
    with pytest.raises(UsageRefused, match="no method 'ppo'"):
        make("ppo", task(), {})


def test_gradients_are_clipped_and_the_rate_warms_up(task: Any) -> None:
    learning = task("optimizer.warmup_steps=4", "optimizer.grad_clip=0.5")
    learner = Learner(learning, 1e-2)
    (name, parameter), *_ = learning.copies.parameters.items()
    for step in range(2):
        learner.clear()
        parameter.grad = torch.full_like(parameter, 100.0)
        learner.step()
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * (step + 1) / 4)
    assert learner.steps == 2
    # Both gradients had the norm 0.5: the first moment is (0.1 + 0.09) of it.
    assert float(learner.optimizer.state[parameter]["exp_avg"].norm()) == pytest.approx(0.19 * 0.5, rel=1e-3)
    assert name


def test_a_gradient_that_is_not_finite_moves_nothing(task: Any) -> None:
    learning = task()
    learner, before = Learner(learning, 1e-2), copies(learning.copies.parameters)
    next(iter(learning.copies.parameters.values())).grad = torch.full_like(next(iter(before.values())), float("nan"))
    with pytest.raises(TrainingFailed, match="the gradient norm is nan at rate"):
        learner.step()
    assert all(torch.equal(before[n], p.detach()) for n, p in learning.copies.parameters.items())
