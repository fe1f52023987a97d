"""Every profile in the package: valid as it is, or lacking exactly what is the operator's to give."""

from pathlib import Path

import pytest

from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.profile.preflight import check
from nftctl.profile.t2i import T2I_PROFILES

from .conftest import toml_of, write_base

OPERATOR = {
    "rl.init_from": "init-from-missing",
    "model.vae": "vae-missing",
    "data.prompt_file": "prompt-file-missing",
    "reward.providers.0.url": "reward-url-missing",
    "reward.providers.0.revision": "reward-revision-missing",
}


def test_which_profiles_ship() -> None:
    assert list(bundled_profiles()) == ["cosmos3_nft_t2i_public", "cosmos3_nft_t2i_public_4gpu", "tiny_t2i_cpu"]


@pytest.mark.parametrize("name", bundled_profiles())
def test_a_shipped_profile_needs_nothing_but_the_operator(name: str, tmp_path: Path) -> None:
    path = bundled_profiles()[name]
    found = check(load_profile(path, env={}))
    public = "public" in name
    assert [(f.key, f.code) for f in found] == (list(OPERATOR.items()) if public else [])
    assert all(f.line is not None for f in found)
    if not public:
        return
    base = write_base(tmp_path / "base")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\nd\n")
    env = {
        "NFTCTL_RL__INIT_FROM": str(base),
        "NFTCTL_MODEL__VAE": str(base / "vae"),
        "NFTCTL_DATA__PROMPT_FILE": str(prompts),
        "NFTCTL_REWARD__PROVIDERS__0__URL": "http://127.0.0.1:8000",
        "NFTCTL_REWARD__PROVIDERS__0__REVISION": "r1",
    }
    for line in path.read_text().split("\n") if "extends" not in path.read_text() else []:
        if line.split("=")[0].strip() in ("init_from", "vae", "prompt_file", "url", "revision"):
            assert any(f"# {variable}:" in line for variable in env), line
    assert check(load_profile(path, env=env)) == []
    # One value missing is one finding.
    for variable, code in zip(env, OPERATOR.values(), strict=True):
        fewer = {key: value for key, value in env.items() if key != variable}
        expected = [] if code == "vae-missing" else [code]  # the base's own VAE stands in
        assert [f.code for f in check(load_profile(path, env=fewer))] == expected


@pytest.mark.parametrize("name", bundled_profiles())
def test_a_shipped_profile_has_its_contract(name: str) -> None:
    assert name in T2I_PROFILES
    assert T2I_PROFILES[name].name == name
    assert load_profile(bundled_profiles()[name], env={}).profile.rl.profile in T2I_PROFILES


def test_the_four_gpu_profile_adds_three_values() -> None:
    base = load_profile(bundled_profiles()["cosmos3_nft_t2i_public"], env={})
    four = load_profile(bundled_profiles()["cosmos3_nft_t2i_public_4gpu"], env={})
    own = {key for key, origin in four.origins.items() if origin.source == "profile"}
    assert own == {"job.name", "rl.group_size", "rl.max_steps"}
    assert (four.profile.job.name, four.profile.rl.group_size, four.profile.rl.max_steps) == ("nft_public_4gpu", 4, 400)
    assert four.profile.model == base.profile.model
    assert four.name == "cosmos3_nft_t2i_public_4gpu"


def test_the_public_recipe() -> None:
    profile = load_profile(bundled_profiles()["cosmos3_nft_t2i_public"], env={}).profile
    rl, model = profile.rl, profile.model
    assert (rl.kl_beta, rl.guidance, rl.sampler_shift, rl.sample_steps, profile.data.rows_per_step) == (0, 3, 5, 20, 4)
    assert (rl.old.decay, rl.old.update_every, rl.timesteps_per_sample, rl.uniform_timestep) == ("copy", 1, 1, False)
    assert (model.lora.rank, model.lora.alpha, model.dtype, model.height, model.width) == (16, 32, "bfloat16", 512, 512)
    assert profile.optimizer.lr == 3e-4


def test_the_embedded_default() -> None:
    profile = load_profile(bundled_profiles()["tiny_t2i_cpu"], env={}).profile
    rl = profile.rl
    assert (rl.group_size, profile.data.rows_per_step, rl.max_steps, rl.kl_beta, rl.guidance) == (4, 8, 200, 0, 1)
    assert (rl.sample_steps, rl.sampler_shift, rl.timestep_source, rl.timesteps_per_sample) == (10, 3, "grid", 4)
    assert (rl.old.update_every, rl.old.decay, profile.optimizer.lr, profile.checkpoint.every) == (
        1,
        "linear",
        1e-3,
        100,
    )
    assert (profile.eval.samples_per_prompt, profile.reward.providers[0].scorer) == (12, "tiny_digits")


def test_comments_and_values_of_toml_helper_agree(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(toml_of({"grid.shapes": {"policy": [1, 4]}, "rl.beta": 2}, [{"name": "a", "clip": [0, 1]}]))
    profile = load_profile(path, env={}).profile
    assert (profile.grid.shapes, profile.rl.beta, profile.reward.providers[0].clip) == (
        {"policy": [1, 4]},
        2.0,
        [0.0, 1.0],
    )
