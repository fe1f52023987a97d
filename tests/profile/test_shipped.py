"""Every profile in the package: valid as it is, or lacking exactly what is the operator's to give."""

from pathlib import Path

import pytest

from nftctl.profile.load import EMBEDDED_DEFAULT, bundled_profiles, load_profile
from nftctl.profile.preflight import check
from nftctl.profile.t2i import T2I_PROFILES

from .conftest import toml_of, write_base, write_sd3_base

OPERATOR = {
    "rl.init_from": "init-from-missing",
    "model.vae": "vae-missing",
    "data.prompt_file": "prompt-file-missing",
    "reward.providers.0.url": "reward-url-missing",
    "reward.providers.0.revision": "reward-revision-missing",
}


VARIABLES = {
    "rl.init_from": "NFTCTL_RL__INIT_FROM",
    "model.vae": "NFTCTL_MODEL__VAE",
    "data.prompt_file": "NFTCTL_DATA__PROMPT_FILE",
    "reward.providers.0.url": "NFTCTL_REWARD__PROVIDERS__0__URL",
    "reward.providers.0.revision": "NFTCTL_REWARD__PROVIDERS__0__REVISION",
}


def operator_values(name: str) -> dict[str, str]:
    """Key -> code of what a profile leaves to the operator. A Stable Diffusion base brings its own VAE."""
    if T2I_PROFILES[name].embedded:
        return {}
    return {key: code for key, code in OPERATOR.items() if key != "model.vae" or name.startswith("cosmos3")}


def test_which_profiles_ship() -> None:
    assert list(bundled_profiles()) == [
        "cosmos3_nft_t2i_public",
        "cosmos3_nft_t2i_public_2gpu",
        "cosmos3_nft_t2i_public_4gpu",
        "scenes_t2i_cpu",
        "sd35m_nft_paper",
        "sd35m_nft_paper_2gpu",
        "tiny_t2i_cpu",
    ]


@pytest.mark.parametrize("name", bundled_profiles())
def test_a_shipped_profile_needs_nothing_but_the_operator(name: str, tmp_path: Path) -> None:
    path, left = bundled_profiles()[name], operator_values(name)
    found = check(load_profile(path, env={}))
    assert [(f.key, f.code) for f in found] == list(left.items())
    assert all(f.line is not None for f in found)
    if not left:
        return
    base = (write_base if name.startswith("cosmos3") else write_sd3_base)(tmp_path / "base")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {n}\n" for n in range(48)))
    values = {
        "rl.init_from": str(base),
        "model.vae": str(base / "vae"),
        "data.prompt_file": str(prompts),
        "reward.providers.0.url": "http://127.0.0.1:8000",
        "reward.providers.0.revision": "r1",
    }
    env = {VARIABLES[key]: values[key] for key in left}
    commented = 0
    for line in path.read_text().split("\n") if "extends" not in path.read_text() else []:
        if line.split("=")[0].strip() in ("init_from", "vae", "prompt_file", "url", "revision"):
            assert any(f"# {variable}:" in line for variable in env), line
            commented += 1
    assert commented in (0, len(left))
    assert check(load_profile(path, env=env)) == []
    # One value missing is one finding.
    for variable, code in zip(env, left.values(), strict=True):
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


@pytest.mark.parametrize("name", ["cosmos3_nft_t2i_public", "sd35m_nft_paper"])
def test_a_two_gpu_profile_changes_name_and_group_alone(name: str) -> None:
    base, two = (load_profile(bundled_profiles()[n], env={}) for n in (name, f"{name}_2gpu"))
    assert {key for key, origin in two.origins.items() if origin.source == "profile"} == {"job.name", "rl.group_size"}
    assert two.profile.ranks == 2
    assert two.profile.rl.model_copy(update={"group_size": base.profile.rl.group_size}) == base.profile.rl
    assert (two.profile.model, two.profile.data) == (base.profile.model, base.profile.data)


def test_the_paper_s_recipe() -> None:
    profile = load_profile(bundled_profiles()["sd35m_nft_paper"], env={}).profile
    rl, lora, optimizer = profile.rl, profile.model.lora, profile.optimizer
    assert (profile.ranks, profile.data.rows_per_step, rl.updates_per_rollout) == (24, 48, 1)
    assert (rl.beta, rl.kl_beta, rl.policy_loss_scale, rl.advantage_std, rl.r_map) == (1, 1e-4, 5, "global", "linear")
    assert (rl.advantage_low, rl.advantage_high) == (-5, 5)
    assert (rl.sample_steps, rl.guidance, rl.sampler_shift, rl.scheduler_type) == (10, 1, 3, "unipc")
    assert (rl.timestep_source, rl.timesteps_per_sample, rl.train_t_range) == ("grid", 9, [0, 1])
    assert (rl.old.decay, rl.old.update_every) == ("linear", 1)
    assert (lora.rank, lora.alpha, lora.init, len(lora.targets)) == (32, 64, "gaussian", 8)
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay, optimizer.eps) == (3e-4, [0.9, 0.999], 1e-4, 1e-8)
    assert (optimizer.grad_clip, optimizer.warmup_steps) == (1, 0)
    assert (profile.model.height, profile.model.width) == (512, 512)


def test_the_public_recipe() -> None:
    profile = load_profile(bundled_profiles()["cosmos3_nft_t2i_public"], env={}).profile
    rl, model = profile.rl, profile.model
    assert (rl.kl_beta, rl.guidance, rl.sampler_shift, rl.sample_steps, profile.data.rows_per_step) == (0, 3, 5, 20, 4)
    assert (rl.old.decay, rl.old.update_every, rl.timesteps_per_sample, rl.uniform_timestep) == ("copy", 1, 1, False)
    assert (model.lora.rank, model.lora.alpha, model.dtype, model.height, model.width) == (16, 32, "bfloat16", 512, 512)
    assert profile.optimizer.lr == 3e-4


def test_the_embedded_default() -> None:
    assert EMBEDDED_DEFAULT == "scenes_t2i_cpu"
    profile = load_profile(bundled_profiles()[EMBEDDED_DEFAULT], env={}).profile
    rl = profile.rl
    assert (rl.group_size, profile.data.rows_per_step, rl.max_steps, rl.kl_beta, rl.guidance) == (4, 8, 70, 0, 1)
    assert (rl.sample_steps, rl.sampler_shift, rl.timestep_source, rl.timesteps_per_sample) == (10, 3, "grid", 4)
    assert (rl.old.update_every, rl.old.decay, rl.advantage_std) == (1, "linear", "global")
    assert (profile.model.height, profile.model.width) == (32, 32)
    assert (profile.optimizer.lr, profile.optimizer.warmup_steps, profile.checkpoint.every) == (1e-3, 5, 35)
    assert (profile.eval.every, profile.eval.samples_per_prompt) == (35, 2)
    assert profile.reward.providers[0].scorer == "scenes"


def test_the_digits() -> None:
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
