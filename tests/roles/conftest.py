"""A world of one process over gloo, the embedded base, and roles made from the bundled profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nftctl.model import adapters
from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.profile.schema import Profile
from nftctl.roles.policy import PolicyRole
from nftctl.roles.rollout import RolloutRole
from tests.roles.samples import CPU


@pytest.fixture(scope="package")
def control() -> Iterator[dist.ProcessGroup]:
    """The control group of a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


@pytest.fixture
def profile(tiny: Any) -> Callable[..., Profile]:
    """`profile("rl.beta=2.0", ...)`: the bundled profile with two rows, four sampler steps and two training times."""

    def make(*sets: str) -> Profile:
        small = ("data.rows_per_step=2", "rl.sample_steps=4", "rl.timesteps_per_sample=2")
        resolved: Profile = tiny(2, (*small, *sets)).profile
        return resolved

    return make


@pytest.fixture
def load() -> Callable[[Profile], Family]:
    """The embedded base with its adapter pair, unsharded."""

    def make(profile: Profile) -> Family:
        family = load_family(profile.model, "embedded", "cosmos3", CPU, seed=profile.rl.seed)
        adapters.add_adapters(family.denoiser, profile.model.lora, seed=profile.rl.seed, ema=profile.rl.ema_decay > 0)
        return family

    return make


@pytest.fixture
def roles(load: Any, control: dist.ProcessGroup) -> Callable[[Profile], tuple[Family, RolloutRole, PolicyRole]]:
    """Model, rollout and policy of rank 0 of one."""

    def make(profile: Profile) -> tuple[Family, RolloutRole, PolicyRole]:
        family = load(profile)
        policy = PolicyRole(family, profile, rank=0, device=CPU, control=control)
        return family, RolloutRole(family, profile, rank=0, device=torch.device("cpu")), policy

    return make
