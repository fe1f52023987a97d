"""The packaged base of the scenes: small, plain, with room to learn; and the recipe that made it."""

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

from nftctl.model.registry import load_family
from nftctl.model.scenes import recipe
from nftctl.model.scenes.words import split_scenes
from nftctl.model.tiny.recipe import SCHEDULER
from nftctl.profile.schema import Model
from nftctl.reward.scorers import load_scorer
from nftctl.run.hashing import hash_file

BASE = Path(recipe.__file__).parent / "base"
WEIGHTS = BASE / "transformer" / "diffusion_pytorch_model.safetensors"
SHA256 = "c0edd60a77c339e7cd8c377b2b4c46f901c0dee7fa0b76468f4f131d9b4bbb92"
MODEL = Model(height=32, width=32, dtype="float32", system_prompt=False, resolution_template=False)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads_stay_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def stock() -> Cosmos3OmniTransformer:
    made, info = Cosmos3OmniTransformer.from_pretrained(BASE / "transformer", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return made.float()


def test_the_folder_is_a_small_plain_diffusers_base_without_a_vae() -> None:
    assert json.loads((BASE / "model_index.json").read_text())["vae"] == [None, None]
    assert hash_file(WEIGHTS) == SHA256
    assert sum(path.stat().st_size for path in BASE.rglob("*") if path.is_file()) < 8_000_000
    with safe_open(WEIGHTS, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_its_configuration_is_that_of_the_recipe(stock: Cosmos3OmniTransformer) -> None:
    assert {key: stock.config[key] for key in recipe.TRANSFORMER} == recipe.TRANSFORMER
    scheduler = UniPCMultistepScheduler.from_pretrained(BASE / "scheduler")
    assert {key: scheduler.config[key] for key in SCHEDULER} == SCHEDULER


def test_it_draws_much_of_what_it_never_saw_and_leaves_room_to_learn(stock: Cosmos3OmniTransformer) -> None:
    prompts = [str(scene) for scene in split_scenes().test[::2]]
    pictures = list(recipe.sample(stock, prompts, CPU, guidance=1.0, seed=23).numpy())
    rules = load_scorer("colour_shape")
    score = np.mean([value for value, _ in rules.score(pictures, prompts, [{}] * len(prompts))])
    assert 0.3 < score < 0.6
    turned = prompts[1:] + prompts[:1]
    assert np.mean([value for value, _ in rules.score(pictures, turned, [{}] * len(prompts))]) < 0.15


def test_padded_captions_read_as_the_family_reads_them() -> None:
    family = load_family(MODEL, "embedded:scenes", "cosmos3", CPU)
    assert family.latent_shape == (3, 1, 32, 32)
    texts = ["a red circle", "two red circles left of a blue square", "four black squares"]
    towers = recipe.Towers(Cosmos3OmniTransformer.from_pretrained(BASE / "transformer").float(), CPU)
    x = torch.randn(3, 3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.2, 0.5, 0.9])
    with torch.no_grad():
        mine = towers.denoiser.velocity(x, sigma, towers.read(*recipe.captions(texts)))
        theirs = family.denoiser(x, sigma, family.batch(family.encoder.encode(texts)))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_one_prompt_is_learnt_and_the_loss_falls() -> None:
    scenes = [scene for scene in split_scenes().pretraining if str(scene) == "a red circle"]
    losses: list[float] = []
    made = recipe.Recipe(iterations=24, batch=4, warmup=4, learning_rate=2e-3)
    recipe.pretrain(made, CPU, scenes=scenes, report=lambda progress: losses.append(progress.loss), every=8)
    assert len(losses) == 3
    assert losses[2] < 0.75 * losses[0]


def run_recipe(folder: Path, seed: int) -> dict[str, bytes]:
    recipe.main(["--out", str(folder), "--iterations", "2", "--batch", "4", "--seed", str(seed)])
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_iterations_repeat_bit_for_bit_and_another_seed_changes_the_weights_alone(tmp_path: Path) -> None:
    first, second, other = (run_recipe(tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))
    assert first == second
    weights = "base/transformer/diffusion_pytorch_model.safetensors"
    assert {name for name in first if first[name] != other[name]} == {weights}
    made, packaged = load_file(tmp_path / "0" / weights), load_file(WEIGHTS)
    assert {name: value.shape for name, value in made.items()} == {n: value.shape for n, value in packaged.items()}
    # What is in the folder beside the weights is what is packaged.
    for name in first.keys() - {weights}:
        assert (BASE.parent / name).read_bytes() == first[name], name


def test_the_learning_rate_warms_up_and_is_high_where_training_stops() -> None:
    made = recipe.Recipe()
    assert made.rate(0) == pytest.approx(made.learning_rate / made.warmup, rel=1e-3)
    assert made.rate(made.iterations) > 0.9 * made.learning_rate


def test_scenes_of_one_group_are_drawn_as_often_as_the_recipe_says() -> None:
    scenes, made = split_scenes().pretraining, recipe.Recipe()
    odds = made.odds(scenes)
    single = torch.tensor([scene.second is None for scene in scenes])
    assert float(odds.sum()) == pytest.approx(1)
    assert float(odds[single].sum()) == pytest.approx(made.single)
