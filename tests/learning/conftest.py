"""The embedded digits made small: two rows of two samples, few sampler steps, one sample of each held-out prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from nftctl.learning.task import Task
from nftctl.profile.schema import Profile


@pytest.fixture
def profile(tiny: Any) -> Callable[..., Profile]:
    """`profile("rl.beta=2.0", ...)`: the bundled profile, held-out prompts included."""

    def make(*sets: str) -> Profile:
        small = (
            "data.rows_per_step=2",
            "rl.group_size=2",
            "rl.sample_steps=3",
            "rl.timesteps_per_sample=2",
            "eval.samples_per_prompt=2",
        )
        resolved: Profile = tiny(2, (*small, *sets), look=True).profile
        return resolved

    return make


@pytest.fixture
def task(profile: Any) -> Callable[..., Task]:
    """`task(seed=3, "rl.kl_beta=0.5")`: the base with its adapters."""

    def make(*sets: str, seed: int = 0, **more: Any) -> Task:
        return Task(profile(*sets), seed, **more)

    return make


@pytest.fixture(scope="package")
def control() -> Iterator[dist.ProcessGroup]:
    """The control group of a world of one, for the engine's roles."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()
