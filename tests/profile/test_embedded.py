"""What `embedded` means: the packaged base and prompts of the contract, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nftctl.errors import Finding
from nftctl.profile.artifacts import EMBEDDED_SETS, base_place, bundled_profiles, embedded_set, hub_id, inspect_base
from nftctl.profile.load import load_profile, load_resolved
from nftctl.profile.preflight import check
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


def found_in(*sets: str) -> list[Finding]:
    return [finding for finding in check(load_profile(SCENES, sets=sets, env={})) if finding.severity == "error"]


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("rl.init_from", "init-from-missing"),
        ("data.prompt_file", "prompt-file-missing"),
        ("eval.prompt_file", "prompt-file-missing"),
    ],
)
def test_a_set_that_there_is_not_is_answered_with_those_that_there_are(key: str, code: str) -> None:
    (finding,) = found_in(f"{key}=embedded:scene")
    assert (finding.code, finding.key, finding.origin) == (code, key, "--set " + f"{key}=embedded:scene")
    assert finding.message == f'{key} = "embedded:scene": scene is no packaged set'
    assert finding.help == "did you mean embedded:scenes? packaged: embedded:digits, embedded:scenes"
    (finding,) = found_in(f"{key}=embedded:")
    assert finding.message.endswith("an empty name is no packaged set")


def test_a_file_of_that_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "embedded:mine.txt").write_text("a red circle\n" * 9)
    assert found_in("data.prompt_file=embedded:mine.txt") == []


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (("data.prompt_file=embedded:digits",), ["data.prompt_file"]),
        (("eval.prompt_file=embedded:digits",), ["eval.prompt_file"]),
    ],
)
def test_a_base_and_prompts_of_another_set_are_refused(sets: tuple[str, ...], keys: list[str]) -> None:
    found = [finding for finding in found_in(*sets) if finding.code == "prompt-file-other-set"]
    assert sorted(finding.key for finding in found) == keys
    assert all("are prompts of digits, and rl.init_from is the base of scenes" in f.message for f in found)


def test_a_bare_word_and_the_set_that_it_means_are_one() -> None:
    digits = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=["data.prompt_file=embedded:digits"], env={})
    assert not [finding for finding in check(digits) if finding.code == "prompt-file-other-set"]


def test_a_set_is_no_hub_id() -> None:
    assert hub_id("embedded:scenes") is None
    assert hub_id("embedded") is None
