"""The stochastic sampler's formulas, against what is known of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from nftctl.algorithm import schedule
from nftctl.learning.methods.sde import clipped_objective, divergence, log_probability, sde_steps

GRID = schedule.sigmas(10, 3.0)
MEAN, SPREAD = 0.7, 0.4
"""Of the data in the Gaussian example."""


def velocity(x: Tensor, t: float) -> Tensor:
    """E[eps - x0 | x_t = x] for data N(MEAN, SPREAD^2): both are jointly normal with x_t."""
    variance = ((1 - t) * SPREAD) ** 2 + t**2
    centred = x - (1 - t) * MEAN
    x0 = MEAN + (1 - t) * SPREAD**2 / variance * centred
    eps = t / variance * centred
    return eps - x0


def marginal(t: float) -> tuple[float, float]:
    """Mean and standard deviation of x_t."""
    return (1 - t) * MEAN, math.sqrt(((1 - t) * SPREAD) ** 2 + t**2)


def test_the_steps_are_the_papers_formula_written_out() -> None:
    a = 0.7
    x, v = torch.tensor([0.3, -1.2]), torch.tensor([0.5, 2.0])
    for step, t, to in zip(sde_steps(GRID, a)[1:-1], GRID[1:], GRID[2:], strict=False):
        sigma, dt = a * math.sqrt(t / (1 - t)), to - t
        assert (step.t, step.to) == (t, to)
        assert step.std == pytest.approx(sigma * math.sqrt(-dt), rel=1e-12)
        expected = x + (v + sigma**2 / (2 * t) * (x + (1 - t) * v)) * dt
        torch.testing.assert_close(step.mean(x, v), expected)


def test_at_the_start_the_next_time_stands_in_the_denominator_and_the_end_has_no_noise() -> None:
    for first in (1.0, GRID[0]):
        steps = sde_steps([first, *GRID[1:]], 0.5)
        dt = GRID[1] - first
        assert steps[0].std == pytest.approx(0.5 * math.sqrt(first / (1 - GRID[1])) * math.sqrt(-dt), rel=1e-6)
        x, v = torch.tensor([1.5]), torch.tensor([-0.25])
        assert steps[-1].std == 0
        torch.testing.assert_close(steps[-1].mean(x, v), x - GRID[-2] * v)


def test_without_noise_it_is_eulers_step() -> None:
    x = torch.linspace(-2, 2, 9)
    for step in sde_steps(GRID, 0.0):
        v = velocity(x, step.t)
        assert step.std == 0
        assert torch.equal(step.mean(x, v), x + v * (step.to - step.t))
        x = step.mean(x, v)


def run(a: float, grid: Sequence[float], louder: float = 1.0) -> list[tuple[float, float, float]]:
    """Time, mean and standard deviation after every step, of what starts as the marginal at grid[0].

    Exact, since a step is linear in x here: a Gaussian stays one. `louder` multiplies the noise and leaves the drift.
    """
    mean, spread = marginal(grid[0])
    found = []
    for step in sde_steps(grid, a):
        low, at, high = (
            float(step.mean(x, velocity(x, step.t)))
            for x in torch.tensor([mean - 1, mean, mean + 1], dtype=torch.float64)
        )
        mean, spread = at, math.hypot((high - low) / 2 * spread, louder * step.std)
        found.append((step.to, mean, spread))
    return found


def off(found: Sequence[tuple[float, float, float]]) -> float:
    """How far mean or spread is from the flow's at the worst."""
    return max(max(abs(mean - marginal(to)[0]), abs(spread - marginal(to)[1])) for to, mean, spread in found)


def even(steps: int) -> list[float]:
    """A grid from 0.95 to 0."""
    return [0.95 * i / steps for i in range(steps, -1, -1)]


@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 1.0])
def test_the_marginals_are_those_of_the_flow_at_every_time(a: float) -> None:
    coarse, fine = off(run(a, even(200))), off(run(a, even(800)))
    assert fine < 0.004
    # What is left is the grid's, and goes with it.
    assert fine < 0.35 * coarse


def test_drift_and_noise_belong_together() -> None:
    """What the comparison of marginals would show if they did not."""
    assert off(run(0.7, even(800), louder=1.1)) > 0.02


@pytest.mark.parametrize("a", [0.3, 0.7, 1.0])
def test_from_pure_noise_it_ends_at_the_data(a: float) -> None:
    """The very first step is too wide whatever the grid is, and most of that is forgotten on the way."""
    found = run(a, schedule.sigmas(800, 1.0))
    assert found[0][2] ** 2 == pytest.approx((1 - a**2 / 2) ** 2 + a**2, abs=0.01)
    assert off(found[-1:]) < 0.02


def test_log_probabilities_are_those_of_normal_distributions() -> None:
    x, mean = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    std = torch.tensor([0.1, 1.0, 2.5], dtype=torch.float64)
    expected = Normal(mean, std.view(3, 1, 1).expand(3, 2, 4)).log_prob(x).sum(dim=(1, 2))
    torch.testing.assert_close(log_probability(x, mean, std), expected)


def test_the_penalty_is_the_divergence_of_normal_distributions() -> None:
    mean, other = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    std = torch.tensor([0.1, 1.0, 2.5], dtype=torch.float64)
    spread = std.view(3, 1, 1).expand(3, 2, 4)
    expected = kl_divergence(Normal(mean, spread), Normal(other, spread)).sum(dim=(1, 2))
    torch.testing.assert_close(divergence(mean, other, std), expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.0, 2.0, 2.0), (1.5, 2.0, 2.4), (0.5, 2.0, 1.0), (1.5, -2.0, -3.0), (0.5, -2.0, -1.6), (1.1, -1.0, -1.1)],
)
def test_the_objective_is_clipped_where_a_larger_step_would_gain(
    ratio: float, advantage: float, expected: float
) -> None:
    found = clipped_objective(torch.tensor([np.log(ratio)]), torch.tensor([advantage]), 0.2)
    assert found.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("grid", "a"), [([1.0, 0.5], 0.1), ([1.0, 0.0], 0.1), ([1.0, 0.5, 0.0], -0.1)])
def test_grids_that_do_not_end_with_an_image_are_refused(grid: list[float], a: float) -> None:
    with pytest.raises(ValueError, match="ends with 0"):
        sde_steps(grid, a)
