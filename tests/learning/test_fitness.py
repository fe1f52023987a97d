"""Profiles that nothing can be compared on are refused by the key at fault."""

from __future__ import annotations

from typing import Any

import pytest

from nftctl.errors import ProfileRefused
from nftctl.learning.fitness import refuse_times, refuse_unfit


def test_a_sampler_with_fewer_times_than_trials_train_on_is_refused(profile: Any) -> None:
    for sets in (("rl.sample_steps=4",), ("rl.sample_steps=8", "rl.train_t_range=[0.0, 0.9]")):
        with pytest.raises(ProfileRefused) as refused:
            refuse_times(profile(*sets))
        assert refused.value.findings[0].key == "rl.timestep_source"
    refuse_times(profile("rl.sample_steps=5"))
    refuse_times(profile('rl.timestep_source="continuous"'))


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        ('model.train="full"', "model.train"),
        ("rl.sample_steps=3", "rl.timestep_source"),
        ('reward.aggregation="gdpo"', "reward.aggregation"),
        ('eval.prompt_file=""', "eval.prompt_file"),
    ],
)
def test_each_reason_is_found(profile: Any, sets: str, key: str) -> None:
    with pytest.raises(ProfileRefused) as refused:
        refuse_unfit(profile("rl.sample_steps=8", sets))
    assert [finding.key for finding in refused.value.findings] == [key]


def test_the_embedded_default_is_fit(profile: Any) -> None:
    assert len(refuse_unfit(profile("rl.sample_steps=10")).test) == 12
