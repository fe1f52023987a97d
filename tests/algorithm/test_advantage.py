"""Advantages and optimality against values worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nftctl.algorithm.advantage import advantages, clamp, gdpo, optimality, statistics, zero_spread
from nftctl.errors import TrainingFailed


def f64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def whole(rewards: torch.Tensor) -> torch.Tensor:
    return torch.ones(rewards.shape[0], dtype=torch.bool)


def group(values: list[float], std: str = "group") -> list[float]:
    return advantages(f64([values]), torch.tensor([True]), std)[0].tolist()  # type: ignore[arg-type]


def test_worked_groups() -> None:
    assert group([0, 1, 0, 1]) == pytest.approx([-0.9998, 0.9998, -0.9998, 0.9998], abs=1e-6)
    assert group([1, 0, 0, 0]) == pytest.approx([1.7317, -0.5772, -0.5772, -0.5772], abs=5e-5)


def test_four_samples_never_reach_the_default_bounds() -> None:
    worst = max(abs(a) for values in ([1, 0, 0, 0], [0, 0, 0, 1e9], [5, 5, 5, -1e-3]) for a in group(values))
    assert worst <= 1.74


def test_shifted_rows_get_the_same_advantages() -> None:
    a = advantages(f64([[0, 1, 0, 1], [10, 11, 10, 11]]), torch.tensor([True, True]))
    assert torch.equal(a[0], a[1])
    assert a.mean(dim=1).abs().max() < 1e-15


@pytest.mark.parametrize("std", ["group", "global"])
def test_equal_rows_stay_two_groups(std: str) -> None:
    a = advantages(f64([[0, 1, 0, 1], [4, 5, 6, 7]]), torch.tensor([True, True]), std)  # type: ignore[arg-type]
    np.testing.assert_allclose(a.mean(dim=1), 0, atol=1e-15)


def test_global_spread_is_the_steps_and_the_mean_the_rows() -> None:
    rewards = np.array([[0.0, 1, 0, 1], [3, 5, 3, 5]])
    expected = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std() + 1e-4)
    np.testing.assert_allclose(
        advantages(torch.tensor(rewards), torch.tensor([True, True]), "global"), expected, rtol=1e-12
    )


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, -3e5, 1e-12])
@pytest.mark.parametrize("std", ["group", "global"])
def test_a_constant_group_has_no_advantage(value: float, std: str) -> None:
    rewards = f64([[value] * 4, [0, 1, 0, 1]])
    a = advantages(rewards, whole(rewards), std)  # type: ignore[arg-type]
    assert a[0].tolist() == [0.0] * 4
    assert optimality(a[0], "linear", tau=0.5, high=5.0).tolist() == [0.5] * 4
    assert zero_spread(rewards).tolist() == [True, False]


def test_rounding_is_not_spread_but_small_quality_is() -> None:
    assert group([0.1 + 0.2, 0.3, 0.3, 0.3]) == [0.0] * 4
    assert group([1e6, 1e6 + 1e-4, 1e6, 1e6]) == [0.0] * 4
    assert group([0, 1e-6, 0, 1e-6])[1] > 0


def test_a_dropped_group_leaves_the_others_alone() -> None:
    rewards, kept = f64([[0, 1, 0, 1], [float("nan")] * 4, [2, 4, 2, 4]]), torch.tensor([True, False, True])
    for std in ("group", "global"):
        a = advantages(rewards, kept, std)  # type: ignore[arg-type]
        assert torch.equal(a[kept], advantages(rewards[kept], torch.tensor([True, True]), std))  # type: ignore[arg-type]
        assert a[1].tolist() == [0.0] * 4


def test_nothing_left_and_not_finite_are_refused() -> None:
    with pytest.raises(TrainingFailed, match="nothing to train on"):
        advantages(f64([[1, 2]]), torch.tensor([False]))
    with pytest.raises(TrainingFailed, match="not a finite number"):
        advantages(f64([[1, float("inf")]]), torch.tensor([True]))


@given(st.lists(st.lists(st.floats(-100, 100), min_size=4, max_size=4), min_size=1, max_size=5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_agrees_with_numpy_on_any_rewards(rows: list[list[float]], use_global: bool) -> None:
    r = np.array(rows)
    spread = r.std(axis=1, keepdims=True)
    expected = (r - r.mean(axis=1, keepdims=True)) / ((r.std() if use_global else spread) + 1e-4)
    tolerance = 1e-8 * np.maximum(1, np.abs(r.mean(axis=1, keepdims=True)))
    if (np.abs(spread - tolerance) < 1e-12).any():
        return  # on the edge of the rule either answer is right
    expected = np.where(spread < tolerance, 0.0, expected)
    got = advantages(torch.tensor(r), torch.ones(len(rows), dtype=torch.bool), "global" if use_global else "group")
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("a", "r"), [(0, 0.5), (5, 1), (-5, 0), (9, 1), (-9, 0), (2.5, 0.75)])
def test_linear_map(a: float, r: float) -> None:
    assert optimality(clamp(f64([a]), -5, 5), "linear", tau=0.5, high=5.0).item() == pytest.approx(r, abs=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "a", "r"), [(-2, 5, -20, 0.3), (-10, 5, -5, 0.0), (-10, 5, 0, 0.5), (-1, 4, 4, 1.0)]
)
def test_linear_map_divides_by_the_upper_bound_alone(low: float, high: float, a: float, r: float) -> None:
    assert optimality(clamp(f64([a]), low, high), "linear", tau=0.5, high=high).item() == pytest.approx(r, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "tau", "r"), [(1, 0.5, 0.8808), (0, 0.5, 0.5), (-1, 0.5, 0.1192), (5, 0.5, 0.99995), (1, 2.5, 0.5987)]
)
def test_sigmoid_map(a: float, tau: float, r: float) -> None:
    assert optimality(f64([a]), "sigmoid", tau=tau, high=5.0).item() == pytest.approx(r, abs=5e-5)


def test_fact_e_sigmoid_is_a_tanh_and_steeper_than_linear_at_the_defaults() -> None:
    a = torch.linspace(-4, 4, 17, dtype=torch.float64)
    sigmoid = 2 * optimality(a, "sigmoid", tau=0.5, high=5.0) - 1
    np.testing.assert_allclose(sigmoid, np.tanh(a.numpy() / (2 * 0.5)), atol=1e-12)

    def slope(r_map: str, tau: float) -> float:
        r = optimality(f64([-1e-6, 1e-6]), r_map, tau=tau, high=5.0)  # type: ignore[arg-type]
        return ((2 * r[1] - 1) - (2 * r[0] - 1)).item() / 2e-6

    assert slope("sigmoid", 0.5) == pytest.approx(1.0, abs=1e-6)
    assert slope("linear", 0.5) == pytest.approx(0.2, abs=1e-6)
    assert slope("sigmoid", 2.5) == pytest.approx(slope("linear", 2.5), abs=1e-6)


def test_statistics_are_means_over_the_kept_samples() -> None:
    rewards, kept = f64([[0, 1, 0, 1], [float("nan")] * 4, [7, 7, 7, 7]]), torch.tensor([True, False, True])
    a = advantages(rewards, kept)
    r = optimality(clamp(a, -0.5, 0.5), "linear", tau=0.5, high=0.5)
    assert statistics(rewards, kept, a, r, low=-0.5, high=0.5) == pytest.approx(
        {
            "train/reward_mean": 3.75, "reward/group_std": 0.25, "reward/std": (2 * (7 - 3.75) ** 2 / 4
            + (3.75**2 + 2.75**2) / 4) ** 0.5, "train/advantage_mean": 0.0, "train/optimality_mean": 0.5,
            "train/optimality_second_moment": (2 * 1.0 + 2 * 0.0 + 4 * 0.25) / 8, "train/advantage_clamped_low": 0.25,
            "train/advantage_clamped_high": 0.25, "reward/zero_spread_groups": 1.0, "reward/dropped_groups": 1.0,
        }
    )  # fmt: skip


def test_advantage_mean_is_taken_after_the_clamp() -> None:
    rewards = f64([[1, 0, 0, 0]])
    a = advantages(rewards, whole(rewards))
    r = optimality(clamp(a, -5, 0.5), "linear", tau=0.5, high=0.5)
    stats = statistics(rewards, whole(rewards), a, r, low=-5.0, high=0.5)
    assert stats["train/advantage_mean"] == pytest.approx((0.5 - 3 * 0.57722) / 4, abs=1e-4)
    assert stats["train/advantage_clamped_low"] == 0.0
    assert stats["train/advantage_clamped_high"] == 0.25


# ---- several rewards of unlike scale


def numpy_gdpo(scores: np.ndarray, weights: list[float]) -> np.ndarray:
    """The same in other words: row by row, one reward at a time."""
    total = np.zeros(scores.shape[1:])
    for score, weight in zip(scores, weights, strict=True):
        for row, values in enumerate(score):
            if weight and np.std(values) >= 1e-8 * max(1.0, abs(np.mean(values))):
                total[row] += weight * (values - np.mean(values)) / max(np.std(values), 1e-6)
    return (total - total.mean()) / max(np.std(total), 1e-6)


def test_gdpo_by_hand() -> None:
    scores = f64([[[0, 2], [0, 0]], [[300, 100], [500, 900]]])
    # Row 0: +-1 from each, opposed. Row 1: only the second speaks.
    a = gdpo(scores, [1.0, 0.5], torch.tensor([True, True]))
    raw = np.array([[-1 + 0.5, 1 - 0.5], [-0.5, 0.5]])
    np.testing.assert_allclose(a, raw / raw.std(), rtol=1e-12)
    assert a.tolist() == [[-1.0, 1.0], [-1.0, 1.0]]


@given(
    st.lists(
        st.lists(st.lists(st.floats(-100, 100), min_size=4, max_size=4), min_size=3, max_size=3), min_size=2, max_size=3
    ),
    st.lists(st.floats(0.1, 3), min_size=3, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_gdpo_agrees_with_numpy(values: list[list[list[float]]], weights: list[float]) -> None:
    scores, weights = np.array(values), weights[: len(values)]
    spread = scores.std(axis=2)
    if (np.abs(spread - 1e-8 * np.maximum(1, np.abs(scores.mean(axis=2)))) < 1e-9).any() and spread.max() > 0:
        return  # on the edge of the rule either answer is right
    expected = numpy_gdpo(scores, weights)
    if 0 < expected.std() < 0.999:
        return  # the rewards cancel down to rounding
    got = gdpo(torch.tensor(scores), weights, torch.ones(3, dtype=torch.bool))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_gdpo_does_not_see_scale_or_offset() -> None:
    scores = f64([[[1, 2, 4, 8], [3, 1, 2, 2]], [[0.5, 0.1, 0.2, 0.3], [0.9, 0.9, 0.1, 0.2]]])
    plain = gdpo(scores, [1.0, 1.0], torch.tensor([True, True]))
    scores[0] = 1000 * scores[0] - 7
    np.testing.assert_allclose(gdpo(scores, [1.0, 1.0], torch.tensor([True, True])), plain, rtol=1e-9)
    assert plain.std(correction=0).item() == pytest.approx(1.0)
    np.testing.assert_allclose(plain.mean(dim=1), 0, atol=1e-12)


def test_gdpo_leaves_out_weight_zero_and_dropped_rows() -> None:
    nan = float("nan")
    scores = f64([[[0, 1, 2, 3], [nan] * 4, [5, 5, 5, 9]], [[4, 3, nan, 1], [nan] * 4, [0, 1, 0, 1]]])
    kept = torch.tensor([True, False, True])
    a = gdpo(scores, [2.0, 0.0], kept)
    np.testing.assert_allclose(a[kept], numpy_gdpo(scores[:1, [0, 2]].numpy(), [2.0]), rtol=1e-12)
    assert a[1].tolist() == [0.0] * 4
    with pytest.raises(TrainingFailed, match="not a finite number"):
        gdpo(scores, [2.0, 1.0], kept)
    with pytest.raises(TrainingFailed, match="nothing to train on"):
        gdpo(scores, [2.0, 1.0], torch.zeros(3, dtype=torch.bool))


def test_gdpo_of_constant_rows_is_exactly_nothing_and_counted() -> None:
    scores = f64([[[7, 7, 7, 7], [0, 1, 0, 1]], [[0.1 + 0.2, 0.3, 0.3, 0.3], [5, 5, 5, 5]]])
    kept = torch.tensor([True, True])
    a = gdpo(scores, [1.0, 3.0], kept)
    assert a[0].tolist() == [0.0] * 4
    np.testing.assert_allclose(a[1], [-(2**0.5), 2**0.5] * 2, rtol=1e-12)
    row = statistics(scores.sum(dim=0), kept, a, optimality(a, "linear", tau=0.5, high=5.0), low=-5.0, high=5.0)
    assert row["reward/zero_spread_groups"] == 1.0
    assert gdpo(scores[:, :1], [1.0, 3.0], torch.tensor([True])).tolist() == [[0.0] * 4]
    opposed = torch.stack([scores[0], -scores[0]])
    assert gdpo(opposed, [1.0, 1.0], kept).tolist() == [[0.0] * 4] * 2
