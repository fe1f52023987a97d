"""Which forwards an optimizer step needs, and how many denoiser rows a step must cost: the numbers that metrics compare
with what was executed.

Leaves forwards out only where the result is the same to the bit. Groups without spread are *not* left out: their policy
gradient is zero only while old and policy are the same weights and no penalty runs, and even then their pairs belong to
the means of the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Forwards beside the policy's own in one optimizer step."""

    old: bool
    """Run the old policy; false: it is the policy itself, so v_old is v without gradient."""
    reference: bool
    """Run the frozen base; false: the penalty has no weight."""

    @property
    def rows_per_pair(self) -> int:
        """Denoiser rows for one (sample, timestep) pair."""
        return 1 + self.old + self.reference

    @property
    def skipped_per_pair(self) -> int:
        """Denoiser rows that one pair does without, of the three that policy, old and reference would take."""
        return 3 - self.rows_per_pair


def plan_forwards(*, kl_beta: float, build_old: bool, policy_version: int, old_version: int) -> ForwardPlan:
    """Plan of the next optimizer step.

    Versions are counted, weights are never compared. `old_version` is the policy version that old is an exact copy of,
    or any other number (-1, say) when it is a blend.
    """
    return ForwardPlan(old=build_old and old_version != policy_version, reference=kl_beta > 0)


@dataclass(frozen=True, slots=True)
class ForwardCount:
    """Denoiser rows (one sample through the model once) of a step on one rank."""

    rollout: int
    policy: int
    old: int
    reference: int

    @property
    def train(self) -> int:
        """All rows of the training phase."""
        return self.policy + self.old + self.reference

    @property
    def total(self) -> int:
        """All rows of the step."""
        return self.rollout + self.train


def rows_per_velocity(guidance: float) -> int:
    """Denoiser rows for one guided velocity of one sample: 2, or 1 where guidance 0 or 1 needs a single branch."""
    return 1 if guidance in (0, 1) else 2


def expected_forwards(
    plans: Sequence[ForwardPlan], *, rows: int, kept_rows: int, steps: int, guidance: float, timesteps: int
) -> ForwardCount:
    """Rows that one rank must execute in a step with one plan per optimizer step.

    Every source row is sampled (`rows`); only rows whose group was scored are trained on (`kept_rows`).
    """
    pairs = kept_rows * timesteps
    return ForwardCount(
        rollout=rows * steps * rows_per_velocity(guidance),
        policy=pairs * len(plans),
        old=pairs * sum(plan.old for plan in plans),
        reference=pairs * sum(plan.reference for plan in plans),
    )
