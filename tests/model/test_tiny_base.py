"""The packaged base loads everywhere it should, is small, and knows its task; its recipe is repeatable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Cosmos3OmniTransformer, UniPCMultistepScheduler
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.model.tiny import data, recipe
from nftctl.profile.schema import Model
from nftctl.reward.scorers import load_scorer

BASE = Path(recipe.__file__).parent / "base"
WEIGHTS = BASE / "transformer" / "diffusion_pytorch_model.safetensors"
MODEL = Model(height=8, width=8, dtype="float32", system_prompt=False, resolution_template=False)


@pytest.fixture(autouse=True)
def _torch_settings_stay_here() -> Iterator[None]:
    # The recipe sets both for its own process.
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def family() -> Family:
    return load_family(MODEL, "embedded", "cosmos3", torch.device("cpu"))


@torch.no_grad()
def draw(family: Family, prompts: list[str], guidance: float, seed: int) -> Tensor:
    """Ten UniPC steps from seeded noise: uint8 [B, 8, 8, 3]."""
    scheduler = UniPCMultistepScheduler.from_pretrained(BASE / "scheduler")
    scheduler.set_timesteps(10)
    scheduler.timesteps = scheduler.sigmas[:-1] * 1000
    x = torch.randn(family.noise_shape(len(prompts)), generator=torch.Generator().manual_seed(seed))
    positive = family.encoder.encode(prompts)
    negative = family.encoder.encode([""], negative=True) * len(prompts)
    both = family.batch([*positive, *negative])
    for t in scheduler.timesteps:
        sigma = (t / 1000).expand(2 * len(prompts))
        v_positive, v_negative = family.denoiser(torch.cat([x, x]), sigma, both).chunk(2)
        x = scheduler.step(v_negative + guidance * (v_positive - v_negative), t, x, return_dict=False)[0]
    return family.decoder.decode(x.clamp(-1, 1))[:, 0]


def rewards(pictures: Tensor, prompts: list[str]) -> list[float]:
    scored = load_scorer("tiny_digits").score(list(pictures.numpy()), prompts, [{}] * len(prompts))
    return [score for score, _ in scored]


def test_the_folder_is_a_small_plain_diffusers_base_without_a_vae() -> None:
    index = json.loads((BASE / "model_index.json").read_text())
    assert index["vae"] == [None, None]
    assert index["_class_name"] == "Cosmos3OmniPipeline"
    assert WEIGHTS.stat().st_size < 2_000_000
    assert sum(path.stat().st_size for path in BASE.rglob("*") if path.is_file()) < 2_100_000
    assert not list(BASE.rglob("*.bin"))
    with safe_open(WEIGHTS, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_stock_diffusers_loads_every_tensor_and_the_scheduler() -> None:
    stock, info = Cosmos3OmniTransformer.from_pretrained(BASE / "transformer", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert all(bool(torch.isfinite(value).all()) for value in stock.state_dict().values())
    assert {key: stock.config[key] for key in recipe.TRANSFORMER} == recipe.TRANSFORMER
    scheduler = UniPCMultistepScheduler.from_pretrained(BASE / "scheduler")
    assert {key: scheduler.config[key] for key in recipe.SCHEDULER} == recipe.SCHEDULER


def test_the_family_draws_pixels_of_three_channels(family: Family) -> None:
    assert family.latent_shape == (3, 1, 8, 8)
    assert family.clamp_x0


def test_with_guidance_it_draws_what_the_prompt_says(family: Family) -> None:
    _, test = data.split_prompts()
    prompts = [text for text in test for _ in range(4)]
    guided = rewards(draw(family, prompts, 3.0, seed=11), prompts)
    assert np.mean(guided) > 0.7
    # The same pictures under another prompt's words: the score is about the prompt, not about looking neat.
    assert np.mean(rewards(draw(family, prompts, 3.0, seed=11), prompts[4:] + prompts[:4])) < 0.1


def test_without_guidance_it_leaves_room_to_learn(family: Family) -> None:
    _, test = data.split_prompts()
    prompts = [text for text in test for _ in range(4)]
    assert 0.3 < np.mean(rewards(draw(family, prompts, 1.0, seed=11), prompts)) < 0.7


def run_recipe(folder: Path, seed: int) -> dict[str, bytes]:
    recipe.main(["--out", str(folder), "--iterations", "3", "--seed", str(seed)])
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_three_iterations_of_the_recipe_repeat_bit_for_bit(tmp_path: Path) -> None:
    first, second = run_recipe(tmp_path / "a", 0), run_recipe(tmp_path / "b", 0)
    assert first == second
    other = run_recipe(tmp_path / "c", 1)
    assert {name for name in first if first[name] != other[name]} == {
        "base/transformer/diffusion_pytorch_model.safetensors"
    }


def test_pretraining_moves_every_tensor_that_a_pixel_depends_on() -> None:
    start = recipe.pretrain(recipe.Recipe(iterations=0)).state_dict()
    moved = recipe.pretrain(recipe.Recipe(iterations=3)).state_dict()
    still = {name for name in start if torch.equal(start[name], moved[name])}
    last = f"layers.{recipe.TRANSFORMER['num_hidden_layers'] - 1}."
    text_output = ("self_attn.to_q.", "self_attn.to_out.", "self_attn.norm_q.", "mlp.", "post_attention_layernorm.")
    assert still == {name for name in start if name.startswith(("lm_head.", "norm.", *(last + t for t in text_output)))}


def test_the_packaged_weights_come_from_the_recipe_in_shape_and_name(tmp_path: Path) -> None:
    run_recipe(tmp_path, 0)
    made, packaged = load_file(tmp_path / WEIGHTS.relative_to(BASE.parent)), load_file(WEIGHTS)
    assert {name: value.shape for name, value in made.items()} == {n: value.shape for n, value in packaged.items()}


def test_the_learning_rate_warms_up_and_is_still_high_where_training_stops() -> None:
    made = recipe.Recipe()
    assert made.rate(0) == pytest.approx(made.learning_rate / 100, rel=1e-3)
    assert made.rate(99) == pytest.approx(made.learning_rate * 0.5 * (1 + np.cos(np.pi * 99 / 1400)))
    assert made.rate(made.iterations) > 0.1 * made.learning_rate
