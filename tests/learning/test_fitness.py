"""Profiles that nothing can be compared on are refused by the key at fault."""

from __future__ import annotations

from typing import Any

import pytest

from nftctl.errors import ProfileRefused
from nftctl.learning.fitness import refuse_times, refuse_unfit
from nftctl.profile.load import EMBEDDED_DEFAULT, bundled_profiles, load_profile


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


@pytest.mark.parametrize(("name", "held_out"), [(EMBEDDED_DEFAULT, 72), ("tiny_t2i_cpu", 12)])
def test_the_embedded_profiles_are_fit_as_they_are(name: str, held_out: int) -> None:
    assert len(refuse_unfit(load_profile(bundled_profiles()[name], env={}).profile).test) == held_out
