"""Sigmas, timestep laws, the old policy's share and the warm-up, against values worked out apart from the code."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from nftctl.algorithm import schedule
from nftctl.algorithm.draws import uniform


def draw(**changes: object) -> torch.Tensor:
    arguments: dict = {
        "seed": 0, "row": 0, "rank": 0, "update": 0, "count": 1, "source": "continuous", "uniform_law": False,
        "shift": 5.0, "t_range": (0.0, 1.0), "grid": schedule.sigmas(20, 5.0),
    }  # fmt: skip
    return schedule.draw_timesteps(**(arguments | changes))


def quadrature_mean(shift: float, low: float = 0.0, high: float = 1.0) -> float:
    """Mean of the shifted logit-normal law conditioned on [low, high], by summation over z."""
    z = np.linspace(-9, 9, 400_001)
    u = 1 / (1 + np.exp(-z))
    t = shift * u / (1 + (shift - 1) * u)
    weight = np.exp(-z * z / 2) * ((t >= low) & (t <= high))
    return float((weight * t).sum() / weight.sum())


def test_the_shift_is_applied_exactly_once() -> None:
    sigma = schedule.sigmas(20, 5.0)
    assert sigma[1] == pytest.approx(0.98959, abs=5e-6)
    assert schedule.sigmas(20, 1.0)[1] == pytest.approx(0.95005, abs=5e-6)
    assert sigma[0] == pytest.approx(0.999999, abs=1e-7)


@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (2, 5.0), (20, 5.0), (10, 3.0), (7, 1.0)])
def test_sigmas_follow_the_formula_and_end_at_zero(steps: int, shift: float) -> None:
    u = np.linspace(1, 1 / 1000, steps + 1)[:-1]
    sigma = schedule.sigmas(steps, shift)
    assert len(sigma) == steps + 1
    assert sigma[-1] == 0.0
    np.testing.assert_allclose(sigma[:-1], shift * u / (1 + (shift - 1) * u), atol=1.1e-6)
    assert all(a > b for a, b in pairwise(sigma))


def test_callers_cannot_spoil_the_cached_sigmas() -> None:
    schedule.sigmas(3, 2.0).clear()
    assert len(schedule.sigmas(3, 2.0)) == 4


def test_shifted_law_has_its_declared_mean() -> None:
    assert quadrature_mean(5.0) == pytest.approx(0.794, abs=5e-4)
    assert draw(count=10_000).mean().item() == pytest.approx(0.794, abs=0.01)
    assert draw(count=10_000, shift=1.0).mean().item() == pytest.approx(0.5, abs=0.01)


def test_uniform_law_is_flat_and_not_shifted() -> None:
    t = draw(count=10_000, uniform_law=True)
    assert t.mean().item() == pytest.approx(0.5, abs=0.01)
    assert t.var(correction=0).item() == pytest.approx(1 / 12, abs=0.003)


def test_shifted_law_has_its_quantiles() -> None:
    t = draw(count=10_000).sort().values
    # Median: z = 0, u = 1/2, t = 5/6; one standard deviation up: u = 0.731059, t = 0.931461.
    assert t[5000].item() == pytest.approx(5 / 6, abs=0.01)
    assert t[8413].item() == pytest.approx(0.931461, abs=0.01)


@pytest.mark.parametrize("uniform_law", [True, False])
def test_a_range_conditions_the_law(uniform_law: bool) -> None:
    t = draw(count=4000, uniform_law=uniform_law, t_range=(0.4, 0.8))
    assert t.min() >= 0.4 - 1e-6
    assert t.max() <= 0.8 + 1e-6
    assert t.mean().item() == pytest.approx(0.6 if uniform_law else quadrature_mean(5.0, 0.4, 0.8), abs=0.01)
    assert (t == t.max()).sum() == 1  # conditioned, not piled up at an end


def test_continuous_times_keep_off_both_ends() -> None:
    assert draw(count=3, shift=1e9).tolist() == pytest.approx([0.999] * 3, abs=1e-7)
    assert draw(count=3, shift=1e-9).tolist() == pytest.approx([0.001] * 3, abs=1e-7)
    assert draw().dtype == torch.float32


def test_a_draw_depends_on_its_key_alone() -> None:
    first = draw(count=1)
    assert torch.equal(draw(count=3)[:1], first)
    assert torch.equal(draw(update=2, count=1), draw(count=3)[2:])
    others = [draw(row=1), draw(rank=1), draw(update=1), draw(seed=1)]
    assert all(not torch.equal(first, other) for other in others)


def test_continuous_draw_is_the_keyed_uniform_through_the_law() -> None:
    u = uniform((1,), 7, "train_t", 11, 2, 5).item()
    assert draw(seed=7, row=11, rank=2, update=5, uniform_law=True).item() == pytest.approx(u, abs=1e-7)


def test_grid_draws_the_rollouts_own_sigmas_without_replacement() -> None:
    grid = schedule.sigmas(20, 5.0)
    picks = draw(source="grid", count=20)
    assert sorted(picks.tolist(), reverse=True) == grid[:-1]
    assert len(set(draw(source="grid", count=9).tolist())) == 9
    assert torch.equal(draw(source="grid", count=9), picks[:9])
    orders = {
        tuple(draw(source="grid", count=20, row=row, rank=rank, update=k).tolist())
        for row in (0, 1)
        for rank in (0, 1)
        for k in (0, 1)
    }
    assert len(orders) == 8


def test_grid_keeps_to_the_range() -> None:
    allowed = {s for s in schedule.sigmas(20, 5.0) if 0.5 <= s <= 0.9}
    picks = draw(source="grid", count=len(allowed), t_range=(0.5, 0.9))
    assert set(picks.tolist()) == allowed


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(ValueError, match="21 training timesteps without replacement"):
        draw(source="grid", count=21)
    with pytest.raises(ValueError, match="no training time is left"):
        draw(t_range=(0.9995, 1.0))


@pytest.mark.parametrize(
    ("decay", "i", "share"),
    [
        ("copy", 1, 0.0), ("copy", 1000, 0.0),
        ("linear", 1, 0.001), ("linear", 100, 0.1), ("linear", 500, 0.5), ("linear", 900, 0.5),
        ("delayed", 74, 0.0), ("delayed", 75, 0.0), ("delayed", 76, 0.0075), ("delayed", 208, 0.9975),
        ("delayed", 209, 0.999),
        ("constant", 3, 0.25),
    ],
)  # fmt: skip
def test_old_share_follows_its_law(decay: schedule.OldDecay, i: int, share: float) -> None:
    assert schedule.old_share(decay, i, constant=0.25) == pytest.approx(share, abs=1e-12)


def test_unknown_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="'cosine'"):
        schedule.old_share("cosine", 1)  # type: ignore[arg-type]


def test_learning_rate_rises_linearly_then_stays() -> None:
    assert [schedule.learning_rate(0.4, 4, done) for done in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert schedule.learning_rate(0.4, 0, 0) == 0.4


@pytest.mark.parametrize(("step", "share"), [(1, 2 / 11), (8, 0.5), (80, 0.9), (10_000, 0.9)])
def test_ema_share_grows_to_its_decay(step: int, share: float) -> None:
    assert schedule.ema_share(0.9, step) == pytest.approx(share, abs=1e-12)
    assert schedule.ema_share(0.0, step) == 0.0
