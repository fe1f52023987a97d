"""A profile as one text: what is read from it again is what was meant, whatever its values are."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nftctl.profile.load import Resolved, bundled_profiles, load_profile
from nftctl.submit.portable import paths_of, profile_text, token_variables

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def read_again(resolved: Resolved, folder: Path) -> Resolved:
    path = folder / "again.toml"
    path.write_text(profile_text(resolved), newline="")
    return load_profile(path, env={})


@pytest.mark.parametrize("name", bundled_profiles())
def test_what_ships_comes_back_equal_and_needs_no_other_file(name: str, tmp_path: Path) -> None:
    resolved = load_profile(bundled_profiles()[name], env={})
    assert read_again(resolved, tmp_path).profile == resolved.profile
    assert "extends" not in tomllib.loads(profile_text(resolved))


def test_all_layers_are_in_it_and_defaults_are_not(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text('extends = "tiny_t2i_cpu"\n[rl]\nguidance = 2.5\nmax_steps = 7\n')
    resolved = load_profile(
        tmp_path / "below.toml",
        sets=["grid.shapes={policy=[1,4], rollout=[1,4]}", "reward.providers.0.clip=[-1, 1]", "alarms.stop=[]"],
        flags={"job.name": "n"},
        env={"NFTCTL_RL__BETA": "0.25"},
    )
    again = read_again(resolved, tmp_path)
    assert again.profile == resolved.profile
    document = tomllib.loads(profile_text(resolved))
    assert (document["rl"]["guidance"], document["rl"]["beta"], document["job"]) == (2.5, 0.25, {"name": "n"})
    assert document["grid"] == {"shapes": {"policy": [1, 4], "rollout": [1, 4]}}
    assert document["alarms"] == {"stop": []}
    assert list(document["reward"]["providers"][0]) == ["name", "kind", "scorer", "clip"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANY_TEXT, lr=st.floats(min_value=1e-300, max_value=1e300), key=ANY_TEXT.filter(bool))
def test_any_value_comes_back_and_every_line_can_be_printed(text: str, lr: float, key: str, tmp_path: Path) -> None:
    plain = load_profile(bundled_profiles()["tiny_t2i_cpu"], flags={"job.name": text, "optimizer.lr": lr}, env={})
    profile = plain.profile.model_copy(
        update={"grid": plain.profile.grid.model_copy(update={"gpus_per_role": {key: 3}})}
    )
    from dataclasses import replace

    resolved = replace(
        plain, profile=profile, origins=plain.origins | {"grid.gpus_per_role": plain.origins["job.name"]}
    )
    written = profile_text(resolved)
    assert all(line.isprintable() for line in written.split("\n"))
    assert written.isprintable() is False  # it has lines at all
    document = tomllib.loads(written)
    assert document["job"]["name"] == text
    assert document["optimizer"]["lr"] == lr
    assert document["grid"]["gpus_per_role"] == {key: 3}


def test_paths_are_files_and_folders_alone() -> None:
    sets = [
        "rl.init_from=nvidia/Cosmos3-Nano@main", "data.prompt_file=p.txt", "model.vae=/v", "job.run_dir=~/runs",
    ]  # fmt: skip
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, env={})
    packaged = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=["data.prompt_file=embedded:scenes"], env={})
    assert paths_of(packaged) == {"job.run_dir": "runs"}
    assert paths_of(resolved) == {"model.vae": "/v", "data.prompt_file": "p.txt", "job.run_dir": "~/runs"}


def test_tokens_are_those_of_services() -> None:
    sets = [
        'reward.providers=[{name="a", kind="http", url="http://h", token_env="B"}, {name="e", kind="embedded"}]',
        'eval.providers=[{name="c", url="http://h"}, {name="d", url="http://h", token_env="B"}]',
    ]
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, env={})
    assert token_variables(resolved) == ["B", "NFTCTL_REWARD_TOKEN"]
    assert token_variables(load_profile(bundled_profiles()["tiny_t2i_cpu"], env={})) == []
