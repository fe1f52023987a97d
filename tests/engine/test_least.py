"""The least time of a step, against the sum written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nftctl.engine.least import LeastTime
from nftctl.model.arithmetic import Forward
from nftctl.profile.schema import Profile

FORWARD = Forward(tokens=4, fixed=1000, linear=10, quadratic=1)


def profile(guidance: float, *, train: str = "lora", updates: int = 1) -> Profile:
    rl: dict[str, Any] = {
        "guidance": guidance,
        "sample_steps": 5,
        "timesteps_per_sample": 3,
        "updates_per_rollout": updates,
    }
    return Profile.model_validate({"rl": rl, "model": {"train": train}})


# One row of 2 prompt tokens and one of 3: 1024 and 1039 operations; the negative prompt of 1 token: 1011.
@pytest.mark.parametrize(
    ("given", "operations"),
    [
        (profile(1.0), 5 * 2063 + 3 * 2 * 2063),
        (profile(3.0), 5 * (2063 + 2022) + 3 * 2 * 2063),
        (profile(0.0), 5 * 2022 + 3 * 2 * 2063),
        (profile(3.0, train="full", updates=2), 5 * (2063 + 2022) + 3 * 3 * 2 * 2063),
    ],
)
def test_every_branch_step_and_pair_is_counted(given: Profile, operations: int) -> None:
    assert LeastTime(FORWARD, given, rate=100.0).seconds([2, 3], 1) == pytest.approx(operations / 100)
