"""Which forwards run, and how many rows a step must cost."""

from __future__ import annotations

import pytest

from nftctl.algorithm.plan import ForwardPlan, expected_forwards, plan_forwards, rows_per_velocity


@pytest.mark.parametrize(
    ("build_old", "policy_version", "old_version", "needs_old"),
    [(True, 0, 0, False), (True, 3, 3, False), (True, 1, 0, True), (True, 4, 2, True), (False, 4, 0, False)],
)
def test_old_runs_only_while_it_differs_from_the_policy(
    build_old: bool, policy_version: int, old_version: int, needs_old: bool
) -> None:
    plan = plan_forwards(kl_beta=0.0, build_old=build_old, policy_version=policy_version, old_version=old_version)
    assert plan == ForwardPlan(old=needs_old, reference=False)


@pytest.mark.parametrize(("kl_beta", "needs_reference"), [(0.0, False), (1e-9, True), (1.0, True)])
def test_reference_runs_only_under_a_penalty(kl_beta: float, needs_reference: bool) -> None:
    assert plan_forwards(kl_beta=kl_beta, build_old=True, policy_version=0, old_version=0).reference is needs_reference


@pytest.mark.parametrize(("guidance", "rows"), [(0.0, 1), (1.0, 1), (3.0, 2), (0.5, 2)])
def test_guided_velocity_costs_two_rows(guidance: float, rows: int) -> None:
    assert rows_per_velocity(guidance) == rows


def test_public_recipe_costs_40_rollout_rows_and_one_training_row_per_sample() -> None:
    plan = plan_forwards(kl_beta=0.0, build_old=True, policy_version=7, old_version=7)
    count = expected_forwards([plan], rows=4, kept_rows=4, steps=20, guidance=3.0, timesteps=1)
    assert (count.rollout, count.policy, count.old, count.reference) == (160, 4, 0, 0)
    assert (count.train, count.total) == (4, 164)


def test_old_joins_at_the_second_update_after_a_copy() -> None:
    plans = [plan_forwards(kl_beta=0.1, build_old=True, policy_version=2 + k, old_version=2) for k in range(2)]
    assert [plan.rows_per_pair for plan in plans] == [2, 3]
    assert [plan.skipped_per_pair for plan in plans] == [1, 0]
    count = expected_forwards(plans, rows=4, kept_rows=3, steps=10, guidance=1.0, timesteps=5)
    assert (count.rollout, count.policy, count.old, count.reference) == (40, 30, 15, 30)
