"""Identity: what is inside, what is outside, and that hash and difference always agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nftctl.profile.schema import Profile
from nftctl.run.identity import ABSENT, WHY, differences, fingerprint, identity_document, seed_contract, why

PROVIDER = {"name": "digits", "kind": "embedded", "scorer": "tiny_digits"}


def dump(**sections: dict[str, Any]) -> dict[str, Any]:
    return Profile.model_validate({"reward": {"providers": [PROVIDER]}, **sections}).model_dump()


def document(**sections: dict[str, Any]) -> dict[str, object]:
    return identity_document(dump(**sections), base_fingerprint="b", prompt_hash="p", revisions={"digits": "r"})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("job", {"name": "other"}),
        ("job", {"run_dir": "/elsewhere"}),
        ("rl", {"max_steps": 7}),
        ("rl", {"init_from": "/elsewhere/base"}),
        ("model", {"vae": "/elsewhere/vae"}),
        ("model", {"tokenizer": "/elsewhere/tok"}),
        ("model", {"shard": "reshard"}),
        ("model", {"gradient_checkpointing": True}),
        ("data", {"prompt_file": "/elsewhere/prompts.txt"}),
        ("grid", {"address": "10.0.0.1:6379"}),
        ("grid", {"collective_timeout_s": 300.0}),
        ("checkpoint", {"every": 1, "keep_last": 9, "keep_every": 2}),
        ("logging", {"tensorboard": False}),
        ("samples", {"every": 5, "prompts": 1, "noises": 1}),
        ("eval", {"prompt_file": "embedded", "seed": 9, "samples_per_prompt": 2}),
        ("eval", {"prompt_file": "embedded", "providers": [PROVIDER]}),
        ("alarms", {"enabled": False, "stop": ["clamp"]}),
        ("reward", {"providers": [PROVIDER], "deadline_s": 9.0, "retries": 0}),
        ("reward", {"providers": [PROVIDER], "connect_timeout_s": 1.0, "read_timeout_s": 2.0}),
        ("reward", {"providers": [PROVIDER | {"url": "http://127.0.0.1:9", "token_env": "OTHER"}]}),
    ],
)  # fmt: skip
def test_places_timeouts_and_records_are_outside(section: str, values: dict[str, Any]) -> None:
    assert document(**{section: values}) == document()


@pytest.mark.parametrize(
    ("key", "section", "values"),
    [
        ("rl.beta", "rl", {"beta": 2.0}),
        ("rl.old.decay", "rl", {"old": {"decay": "linear"}}),
        ("rl.timestep_source", "rl", {"timestep_source": "grid"}),
        ("rl.init_keys_to_skip_loading", "rl", {"init_keys_to_skip_loading": ["proj_out"]}),
        ("model.lora.rank", "model", {"lora": {"rank": 4}}),
        ("model.dtype", "model", {"dtype": "float32"}),
        ("model.train_micro_batch", "model", {"train_micro_batch": 1}),
        ("optimizer.lr", "optimizer", {"lr": 1e-3}),
        ("job.deterministic", "job", {"deterministic": True}),
        ("reward.on_failure", "reward", {"providers": [PROVIDER], "on_failure": "drop-group"}),
        ("reward.providers.digits.weight", "reward", {"providers": [PROVIDER | {"weight": 2.0}]}),
        ("reward.providers.digits.clip", "reward", {"providers": [PROVIDER | {"clip": [0.0, 1.0]}]}),
    ],
)
def test_what_changes_a_result_is_inside_and_named(key: str, section: str, values: dict[str, Any]) -> None:
    found = differences(document(), document(**{section: values}))
    assert [d.key for d in found] == [key]
    assert found[0].why


def test_content_hashes_stand_in_for_paths() -> None:
    other = identity_document(
        dump(), base_fingerprint="B", prompt_hash="P", vae_hash="v", tokenizer_hash="t", revisions={"digits": "R"}
    )
    assert {d.key for d in differences(document(), other)} == {
        "base.fingerprint", "data.prompt_hash", "model.vae_hash", "model.tokenizer_hash",
        "reward.providers.digits.revision",
    }  # fmt: skip


def test_pinning_the_served_revision_changes_nothing() -> None:
    assert document(reward={"providers": [PROVIDER | {"revision": "r"}]}) == document()


def test_the_order_and_the_names_of_providers_count() -> None:
    a, b = PROVIDER, PROVIDER | {"name": "judge", "weight": 0.0}
    one = identity_document(dump(reward={"providers": [a, b]}), base_fingerprint="", prompt_hash="", revisions={})
    two = identity_document(dump(reward={"providers": [b, a]}), base_fingerprint="", prompt_hash="", revisions={})
    assert [d.key for d in differences(one, two)] == ["reward.providers"]


def test_providers_of_one_name_do_not_hide_each_other() -> None:
    both = [PROVIDER, PROVIDER | {"weight": 0.5}]
    found = identity_document(dump(reward={"providers": both}), base_fingerprint="", prompt_hash="", revisions={})
    assert found["reward.providers.digits[0].weight"] == 1.0
    assert found["reward.providers.digits[1].weight"] == 0.5


def test_the_seed_contract_is_part_of_the_identity() -> None:
    contract = seed_contract(dump(), prompt_hash="p")
    assert contract.items() <= document().items()
    assert set(contract) == {
        "rl.seed", "rl.rollout_seed_clock", "rl.group_size", "rl.scheduler_type", "rl.sample_steps", "rl.sampler_shift",
        "rl.guidance", "rl.negative_prompt", "rl.modality", "model.height", "model.width", "data.rows_per_step",
        "data.shuffle", "data.prompt_hash", "sampler.order", "sampler.solver", "generator_version",
    }  # fmt: skip


def test_every_key_has_a_reason_of_its_own() -> None:
    assert all(why(key) != "part of the run's identity" for key in document())
    assert why("rl.old.update_every") == WHY["rl.old"]
    assert why("something.new") == "part of the run's identity"


def test_a_known_hash_never_moves() -> None:
    # sha256 of {"a":1.0,"b":[true,null]} computed with coreutils.
    assert (
        fingerprint({"b": [True, None], "a": 1.0}) == "e7e6449090b8ae32df18bc1220a5c55d6d44fe573f47b27189a7f5b049a5d363"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, -math.inf], {"x": math.nan}])
def test_numbers_that_are_not_finite_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="only finite numbers"):
        fingerprint({"rl.beta": value})


def test_absent_is_not_the_same_as_unset() -> None:
    (found,) = differences({"grid.shapes": None}, {})
    assert (found.was, found.now) == (None, ABSENT)
    assert differences({"a": 1}, {"a": True})


scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
documents = st.dictionaries(st.sampled_from(["a", "b.c", "b.d"]), scalars | st.lists(scalars, max_size=3))


@given(documents, documents)
def test_equal_hashes_and_no_differences_are_the_same_thing(was: dict[str, object], now: dict[str, object]) -> None:
    assert (fingerprint(was) == fingerprint(now)) == (not differences(was, now))


@given(documents)
def test_key_order_does_not_matter(values: dict[str, object]) -> None:
    assert fingerprint(values) == fingerprint(dict(reversed(values.items())))
