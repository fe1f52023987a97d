"""What `embedded` means: the packaged base and prompts of the contract, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nftctl.profile.artifacts import EMBEDDED_SETS, base_place, bundled_profiles, embedded_set, hub_id, inspect_base
from nftctl.profile.load import load_profile, load_resolved
from nftctl.profile.prompts import read_prompts, resolve_prompt_file
from nftctl.profile.t2i import T2I_PROFILES

SCENES = bundled_profiles()["scenes_t2i_cpu"]


def places(profile):
    return profile.rl.init_from, profile.data.prompt_file, profile.eval.prompt_file


def test_every_contract_with_a_packaged_set_has_it_whole_and_of_its_size() -> None:
    having = {contract.embedded: contract for contract in T2I_PROFILES.values() if contract.embedded}
    assert set(having) == set(EMBEDDED_SETS)
    for name, contract in having.items():
        base = inspect_base(f"embedded:{name}")
        assert (base.kind, base.transformer_class()) == ("diffusers", contract.transformer)
        for split in ("train", "test"):
            assert len(read_prompts(resolve_prompt_file(f"embedded:{name}", split))) >= 12


def test_a_profile_says_in_full_which_set_it_means() -> None:
    assert places(load_profile(SCENES, env={}).profile) == ("embedded:scenes",) * 3
    digits = load_profile(bundled_profiles()["tiny_t2i_cpu"], env={}).profile
    assert places(digits) == ("embedded",) * 3
    assert base_place("embedded") == base_place("embedded:digits") == EMBEDDED_SETS["digits"] / "base"


def test_only_what_says_embedded_is_named(tmp_path: Path) -> None:
    mine = load_profile(SCENES, sets=[f"data.prompt_file={tmp_path}/mine.txt", "eval.prompt_file="], env={}).profile
    assert places(mine) == ("embedded:scenes", f"{tmp_path}/mine.txt", "")
    other = load_profile(SCENES, sets=["rl.init_from=embedded:digits"], env={}).profile
    assert other.rl.init_from == "embedded:digits"


def test_a_runs_own_profile_keeps_its_set_whatever_a_contract_may_mean_later() -> None:
    resolved = load_profile(SCENES, env={})
    again = load_resolved(resolved.profile.model_dump(mode="json"), name="run", text="", env={})
    assert again.profile == resolved.profile


@pytest.mark.parametrize("value", ["embedded:", "embedded:mine", "embedded/scenes", "scenes", ""])
def test_other_words_name_no_set(value: str) -> None:
    assert embedded_set(value) is None


def test_a_set_is_no_hub_id() -> None:
    assert hub_id("embedded:scenes") is None
    assert hub_id("embedded") is None
