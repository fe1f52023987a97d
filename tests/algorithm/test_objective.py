"""The objective against an independent float64 NumPy form, its closed gradient, and the facts that follow from it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nftctl.algorithm.advantage import clamp, optimality
from nftctl.algorithm.objective import METRICS, Terms, branch_residuals, nft_terms, noisy


@dataclasses.dataclass
class Case:
    """Inputs of the objective in float64."""

    v: np.ndarray
    v_old: np.ndarray
    v_ref: np.ndarray
    x0: np.ndarray
    eps: np.ndarray
    t: np.ndarray
    r: np.ndarray

    def terms(
        self,
        v: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        on_policy: bool = False,
        r: np.ndarray | None = None,
        **knobs: float,
    ) -> Terms:
        knobs = {"beta": 1.0, "kl_beta": 0.0, "scale": 5.0} | knobs
        tensor = {name: torch.tensor(value, dtype=dtype) for name, value in vars(self).items()}
        return nft_terms(
            tensor["v"] if v is None else v, None if on_policy else tensor["v_old"], tensor["v_ref"], tensor["x0"],
            tensor["eps"], tensor["t"], tensor["r"] if r is None else torch.tensor(r, dtype=dtype), **knobs,
        )  # fmt: skip

    def gradient(self, count: int, *, dtype: torch.dtype = torch.float64, **knobs) -> np.ndarray:
        v = torch.tensor(self.v, dtype=dtype, requires_grad=True)
        self.terms(v, dtype=dtype, **knobs).loss(count).backward()
        return v.grad.numpy()

    def cut(self, part: slice) -> Case:
        return Case(*(value[part] for value in vars(self).values()))


def random_case(seed: int, shape: tuple[int, ...] = (3, 2, 1, 2, 3), gap: float = 0.3) -> Case:
    rng = np.random.default_rng(seed)
    v_old = rng.normal(size=shape)
    return Case(
        v=v_old + gap * rng.normal(size=shape), v_old=v_old, v_ref=rng.normal(size=shape), x0=rng.normal(size=shape),
        eps=rng.normal(size=shape), t=rng.uniform(0.01, 0.99, shape[0]), r=rng.uniform(0, 1, shape[0]),
    )  # fmt: skip


def reference(
    case: Case, beta: float, kl_beta: float, scale: float, weights_at: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The loss as written in x0 space: implicit velocities, predicted images, self-normalised errors."""
    shape = (-1, *[1] * (case.v.ndim - 1))
    t, axes = case.t.reshape(shape), tuple(range(1, case.v.ndim))
    x_t = (1 - t) * case.x0 + t * case.eps

    def error(v: np.ndarray, sign: int) -> np.ndarray:
        implicit = (1 - sign * beta) * case.v_old + sign * beta * v
        return x_t - t * implicit - case.x0

    anchor = case.v if weights_at is None else weights_at
    absolute = {sign: np.abs(error(anchor, sign)).mean(axis=axes) for sign in (1, -1)}
    losses = {s: np.square(error(case.v, s)).mean(axis=axes) / np.maximum(absolute[s], 1e-5) for s in (1, -1)}
    return {
        "policy": scale * (case.r * losses[1] + (1 - case.r) * losses[-1]) / beta,
        "kl": kl_beta * np.square(case.v - case.v_ref).mean(axis=axes),
        "positive_error": absolute[1],
        "negative_error": absolute[-1],
        "old_gap": np.square(case.v - case.v_old).mean(axis=axes),
    }


cases = st.builds(
    random_case,
    st.integers(0, 2**32),
    st.sampled_from([(1, 1), (2, 3), (3, 2, 1, 2, 3), (2, 4, 2, 3)]),
    st.sampled_from([0.0, 1e-3, 0.5, 3.0]),
)
betas, penalties, scales = st.floats(0.05, 4), st.sampled_from([0.0, 1e-4, 1.0]), st.floats(0.1, 10)


@given(cases, betas, penalties, scales)
@settings(max_examples=40, deadline=None)
def test_values_equal_the_x0_space_form(case: Case, beta: float, kl_beta: float, scale: float) -> None:
    knobs = {"beta": beta, "kl_beta": kl_beta, "scale": scale}
    expected = reference(case, **knobs)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        got = case.terms(dtype=dtype, **knobs)
        for name, value in expected.items():
            np.testing.assert_allclose(
                getattr(got, name), value, rtol=tolerance, atol=tolerance, err_msg=f"{name} {dtype}"
            )


@given(cases, betas, penalties, scales)
@settings(max_examples=40, deadline=None)
def test_gradient_equals_the_closed_form(case: Case, beta: float, kl_beta: float, scale: float) -> None:
    shape = (-1, *[1] * (case.v.ndim - 1))
    t, r, n = case.t.reshape(shape), case.r.reshape(shape), case.v[0].size
    e, d = case.eps - case.x0 - case.v_old, case.v - case.v_old
    terms = reference(case, beta, kl_beta, scale)
    w_plus, w_minus = (np.maximum(terms[k], 1e-5).reshape(shape) for k in ("positive_error", "negative_error"))
    policy = 2 * t**2 / n * (r * (beta * d - e) / w_plus + (1 - r) * (beta * d + e) / w_minus)
    expected = (scale * policy + kl_beta * 2 * (case.v - case.v_ref) / n) / 7
    got = case.gradient(7, beta=beta, kl_beta=kl_beta, scale=scale)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.3, 1.0, 2.0])
def test_gradient_equals_finite_differences_with_fixed_weights(seed: int, beta: float) -> None:
    case, h = random_case(seed, (2, 2, 3)), 1e-5
    knobs = {"beta": beta, "kl_beta": 0.5, "scale": 5.0}
    numeric = np.zeros_like(case.v)
    for index in np.ndindex(case.v.shape):
        values = []
        for step in (h, -h):
            moved = case.v.copy()
            moved[index] += step
            terms = reference(dataclasses.replace(case, v=moved), **knobs, weights_at=case.v)
            values.append((terms["policy"] + terms["kl"]).sum() / 4)
        numeric[index] = (values[0] - values[1]) / (2 * h)
    np.testing.assert_allclose(case.gradient(4, **knobs), numeric, rtol=1e-6, atol=1e-8)


def scalar_case(r: float, v: float = 0.5) -> Case:
    """One number: x0 0, noise 1 (target 1), v_old 0, t 1/2, so x0 errors 0.25 and 0.75 at v 1/2 and beta 1."""
    return Case(*(np.array([[x]]) for x in (v, 0.0, 0.1, 0.0, 1.0)), t=np.array([0.5]), r=np.array([r]))  # type: ignore[misc]


def test_golden_scalar_case_tells_the_branches_apart() -> None:
    terms = scalar_case(0.75).terms()
    assert terms.positive_error.item() == pytest.approx(0.25)
    assert terms.negative_error.item() == pytest.approx(0.75)
    assert terms.old_gap.item() == pytest.approx(0.25)
    # 5 (0.75 x 0.25 + 0.25 x 0.75); with r and 1 - r swapped it would be 5 (0.25 x 0.25 + 0.75 x 0.75) = 3.125.
    assert terms.policy.item() == pytest.approx(1.875)
    assert scalar_case(0.25).terms().policy.item() == pytest.approx(3.125)


def test_beta_moves_the_mixing_and_kl_beta_the_penalty_alone() -> None:
    case = random_case(5)
    base, other_kl, other_beta = case.terms(kl_beta=0.0), case.terms(kl_beta=1.0), case.terms(kl_beta=0.0, beta=0.5)
    for name in ("policy", "positive_error", "negative_error", "old_gap"):
        assert torch.equal(getattr(base, name), getattr(other_kl, name))
    assert (other_kl.kl > 0).all()
    assert torch.equal(base.kl, other_beta.kl)
    assert not torch.allclose(base.positive_error, other_beta.positive_error)


def test_without_weight_the_penalty_is_exactly_zero_and_has_no_gradient() -> None:
    case = random_case(6)
    terms = case.terms(torch.tensor(case.v, requires_grad=True), kl_beta=0.0)
    assert terms.kl.tolist() == [0.0] * 3
    assert not terms.kl.requires_grad
    silent = dataclasses.replace(case, v_ref=np.full_like(case.v, np.nan))
    assert np.array_equal(case.gradient(3), silent.gradient(3))


def test_penalty_needs_its_reference() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="needs the reference velocity"):
        nft_terms(x, None, None, x, x, torch.full((2,), 0.5), torch.full((2,), 0.5), beta=1.0, kl_beta=1.0, scale=5.0)


def test_fact_a_unweighted_optimum() -> None:
    rng = np.random.default_rng(0)
    e, r, beta = torch.tensor(rng.normal(size=(64, 5))), torch.tensor(rng.uniform(size=(64, 1))), 0.7
    d = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(e)
    plus, minus = branch_residuals(d.expand_as(e), zero, e, beta)
    loss = (r * plus.square() + (1 - r) * minus.square()).sum()
    # A quadratic: one Newton step from 0 lands on the optimum.
    (slope,) = torch.autograd.grad(loss, d)
    optimum = -slope / (2 * beta**2 * 64)
    np.testing.assert_allclose(optimum, ((2 * r - 1) * e).mean(dim=0) / beta, rtol=1e-10)


def test_fact_b_on_policy_gradient_is_independent_of_beta() -> None:
    case = random_case(1, gap=0.0)
    shape = (-1, *[1] * (case.v.ndim - 1))
    e, n = case.eps - case.x0 - case.v_old, case.v[0].size
    scale_of_e = np.abs(e).reshape(len(e), -1).mean(axis=1).reshape(shape)
    expected = -(2 * case.t.reshape(shape) / n) * (2 * case.r.reshape(shape) - 1) * e / scale_of_e
    for beta in (0.1, 1.0, 3.0):
        for on_policy in (True, False):
            np.testing.assert_allclose(case.gradient(1, beta=beta, scale=1.0, on_policy=on_policy), expected, rtol=1e-6)


def test_fact_b_scale_times_optimality_is_the_clipped_advantage() -> None:
    a = torch.tensor([-7.0, -1.3, 0.0, 0.4, 6.0], dtype=torch.float64)
    r = optimality(clamp(a, -5.0, 5.0), "linear", tau=0.5, high=5.0)
    np.testing.assert_allclose(5.0 * (2 * r - 1), [-5.0, -1.3, 0.0, 0.4, 5.0], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fact_c_half_optimality_on_policy_has_exactly_no_gradient(dtype: torch.dtype) -> None:
    case = dataclasses.replace(random_case(2, gap=0.0), r=np.full(3, 0.5))
    for on_policy in (True, False):
        assert not case.gradient(3, dtype=dtype, on_policy=on_policy, beta=0.7).any()


def test_fact_c_half_optimality_off_policy_pulls_back_to_old() -> None:
    case = dataclasses.replace(random_case(2, gap=0.3), r=np.full(3, 0.5))
    gradient = case.gradient(3)
    assert ((gradient * (case.v - case.v_old)).reshape(3, -1).sum(axis=1) > 0).all()


def test_fact_d_on_policy_value_does_not_depend_on_r() -> None:
    case = random_case(3, gap=0.0)
    values = [case.terms(r=np.full(3, r), on_policy=True).policy for r in (0.0, 0.3, 1.0)]
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(values[0], values[2], rtol=1e-12, atol=0)
    gradients = [dataclasses.replace(case, r=np.full(3, r)).gradient(3, on_policy=True) for r in (0.0, 1.0)]
    np.testing.assert_allclose(gradients[0], -gradients[1], rtol=1e-12)
    assert np.abs(gradients[0]).max() > 1e-3


def test_fact_f_everything_but_the_policy_term_ignores_r() -> None:
    case = random_case(4)
    a, b = case.terms(r=np.zeros(3), kl_beta=1.0), case.terms(r=np.ones(3), kl_beta=1.0)
    assert not torch.allclose(a.policy, b.policy)
    for name in ("kl", "positive_error", "negative_error", "old_gap"):
        assert torch.equal(getattr(a, name), getattr(b, name))


def test_branches_agree_on_policy_and_part_after_an_update() -> None:
    case = random_case(8, gap=0.0)
    start = case.terms(on_policy=True)
    assert torch.equal(start.positive_error, start.negative_error)
    assert start.old_gap.tolist() == [0.0] * 3
    moved = dataclasses.replace(case, v=case.v - 0.5 * case.gradient(3, on_policy=True))
    after = moved.terms()
    assert (after.positive_error - after.negative_error).abs().min() > 1e-4
    assert (after.old_gap > 0).all()


def test_omitted_old_policy_equals_an_identical_old_policy() -> None:
    case = random_case(9, gap=0.0)
    for dtype in (torch.float32, torch.float64):
        assert np.array_equal(case.gradient(3, dtype=dtype, on_policy=True), case.gradient(3, dtype=dtype))


def test_an_exact_positive_branch_meets_the_floor_not_a_division_by_zero() -> None:
    # v = v_old + e/beta makes v+ the target itself.
    terms = scalar_case(1.0, v=1.0).terms()
    assert terms.positive_error.item() == 0.0
    assert terms.policy.item() == 0.0
    assert np.isfinite(scalar_case(1.0, v=1.0).gradient(1)).all()


def test_old_and_reference_get_no_gradient() -> None:
    case = random_case(10)
    v, v_old, v_ref = (torch.tensor(x, requires_grad=True) for x in (case.v, case.v_old, case.v_ref))
    rest = [torch.tensor(x) for x in (case.x0, case.eps, case.t, case.r)]
    nft_terms(v, v_old, v_ref, *rest, beta=1.0, kl_beta=1.0, scale=5.0).loss(3).backward()
    assert v.grad is not None
    assert v_old.grad is None
    assert v_ref.grad is None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole(size: int) -> None:
    case = random_case(11, (8, 2, 3))
    knobs = {"kl_beta": 0.5, "dtype": torch.float32}
    parts = [case.cut(slice(i, i + size)) for i in range(0, 8, size)]
    gradient = np.concatenate([part.gradient(8, **knobs) for part in parts])
    np.testing.assert_allclose(gradient, case.gradient(8, **knobs), rtol=1e-5, atol=1e-8)
    loss = sum(part.terms(**knobs).loss(8) for part in parts)
    torch.testing.assert_close(loss, case.terms(**knobs).loss(8), rtol=1e-5, atol=0)


def test_sums_of_four_ranks_give_the_float64_means() -> None:
    case, knobs = random_case(12, (12, 2, 3)), {"beta": 0.8, "kl_beta": 0.25, "scale": 5.0}
    ranks = [case.cut(slice(rank, None, 4)).terms(**knobs, dtype=torch.float32).sums() for rank in range(4)]
    means = dict(zip(METRICS, (torch.stack(ranks).sum(dim=0) / 12).tolist(), strict=True))
    expected = reference(case, **knobs)
    assert means == pytest.approx(
        {
            "policy_loss": expected["policy"].mean(), "kl_loss": expected["kl"].mean(),
            "positive_error": expected["positive_error"].mean(), "negative_error": expected["negative_error"].mean(),
            "old_gap": expected["old_gap"].mean(),
        },
        rel=1e-5,
    )  # fmt: skip
    assert ranks[0].dtype == torch.float64
    assert means["policy_loss"] + means["kl_loss"] == pytest.approx(case.terms(**knobs).loss(12).item(), rel=1e-5)


def test_half_precision_velocities_are_computed_in_float32() -> None:
    case = random_case(13)
    v = torch.tensor(case.v, dtype=torch.bfloat16)
    assert case.terms(v, dtype=torch.bfloat16).policy.dtype == torch.float32


def test_noisy_lies_on_the_straight_line() -> None:
    x0, eps = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[-1.0, 0.0], [1.0, 8.0]])
    assert noisy(x0, eps, torch.tensor([0.25, 0.5])).tolist() == [[0.5, 1.5], [2.0, 6.0]]


@pytest.mark.parametrize("name", ["v_old", "x0", "t", "r"])
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    case = random_case(14, (3, 2))
    value = getattr(case, name)
    bad = value[:, None] if name in ("t", "r") else value[:, :1]
    with pytest.raises(ValueError, match="shape"):
        dataclasses.replace(case, **{name: bad}).terms()
