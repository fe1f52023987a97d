"""The schema against the specification's table of defaults, and its manners towards numbers."""

import math

import pytest
from pydantic import ValidationError

from nftctl.profile.keys import dotted, leaves, locate
from nftctl.profile.outline import dotted_keys, meanings
from nftctl.profile.schema import Profile

# Section 5 of the specification, and what sections 3 and 4 say of modality and topology.
SPECIFIED = {
    "rl.group_size": 4,
    "rl.beta": 1.0,
    "rl.kl_beta": 1.0,
    "rl.policy_loss_scale": 5.0,
    "rl.advantage_low": -5.0,
    "rl.advantage_high": 5.0,
    "rl.r_map": "linear",
    "rl.r_tau": 0.5,
    "rl.uniform_timestep": False,
    "rl.sample_steps": 20,
    "rl.sampler_shift": 5.0,
    "rl.guidance": 3.0,
    "rl.rollout_seed_clock": "source_row",
    "rl.old.update_every": None,
    "rl.old.build_old": True,
    "rl.ref.update_every": 0,
    "rl.modality": "video",
    "rl.profile": "",
    "rl.init_from": "",
    "rl.init_keys_to_skip_loading": [],
    "rl.scheduler_type": "unipc",
    "grid.backend": "ray",
    "grid.grouping": "single",
    "grid.gpu_placement": "colocated",
    "grid.gpus_per_role": None,
}
# What contract and design decide beyond it.
DECIDED = {
    "rl.max_steps": None,
    "rl.updates_per_rollout": 1,
    "rl.advantage_std": "group",
    "rl.timestep_source": "continuous",
    "rl.timesteps_per_sample": 1,
    "rl.train_shift": None,
    "rl.train_t_range": [0.0, 1.0],
    "rl.old.decay": "copy",
    "data.rows_per_step": 4,
    "data.shuffle": False,
    "reward.on_failure": "fail",
    "reward.max_dropped_groups": 1,
    "grid.ranks": None,
    "grid.num_replicas": 1,
    "grid.shapes": None,
    "grid.device": "auto",
    "grid.collective_timeout_s": 120.0,
    "optimizer.lr": 3e-4,
    "model.lora.rank": 16,
    "model.lora.alpha": 32.0,
    "model.height": 512,
    "model.width": 512,
}


def value_at(profile: Profile, key: str) -> object:
    value: object = profile
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("key", "default"), [*SPECIFIED.items(), *DECIDED.items()])
def test_default(key: str, default: object) -> None:
    found = value_at(Profile(), key)
    assert found == default
    assert type(found) is type(default)


def test_there_is_no_default_provider() -> None:
    assert Profile().reward.providers == []


@pytest.mark.parametrize(
    "values",
    [
        {"rl": {"beta": math.nan}},
        {"rl": {"beta": math.inf}},
        {"rl": {"beta": "1"}},
        {"rl": {"beta": True}},
        {"rl": {"beta": 0.0}},
        {"rl": {"kl_beta": -0.1}},
        {"rl": {"group_size": 4.5}},
        {"rl": {"group_size": 4.0}},
        {"rl": {"group_size": True}},
        {"rl": {"group_size": "4"}},
        {"rl": {"uniform_timestep": 1}},
        {"rl": {"r_map": "cubic"}},
        {"rl": {"train_t_range": [0.0]}},
        {"rl": {"kl_bta": 0}},
        {"rll": {}},
        {"reward": {"providers": [{}]}},
    ],
)
def test_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Profile.model_validate(values)


def test_whole_numbers_are_fine_where_floats_are_meant() -> None:
    beta = Profile.model_validate({"rl": {"beta": 1}}).rl.beta
    assert beta == 1.0
    assert type(beta) is float


def test_every_key_says_what_it_is() -> None:
    count = 0
    for path in leaves():
        above = locate(path[:-1])
        assert above is not None
        assert above.section is not None
        assert meanings(above.section.__name__)[str(path[-1])], dotted(path)
        count += 1
    assert count == len({dotted(path) for path in leaves()}) >= 90


def test_the_outline_lists_the_keys_of_the_schema_in_order() -> None:
    assert list(dotted_keys()) == [dotted(path) for path in leaves()]


def test_the_json_schema_says_what_each_key_is() -> None:
    document = Profile.model_json_schema()
    assert document["$defs"]["Rl"]["properties"]["beta"]["description"].startswith(
        "Sharpness of the implicit velocities."
    )
    assert "providers" in document["$defs"]["Reward"]["properties"]
    # A docstring over several lines is one text.
    decay = document["$defs"]["Old"]["properties"]["decay"]["description"]
    assert decay == meanings("Old")["decay"]
    assert decay.endswith("or `constant`.")
