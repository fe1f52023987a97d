"""The packaged base of the scenes: small, plain, with room to learn; and the recipe that made it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniTransformer, UniPCMultistepScheduler
from safetensors import safe_open
from safetensors.torch import load_file

from nftctl.model.registry import load_family
from nftctl.model.scenes import autoencoder, recipe
from nftctl.model.scenes.drawing import draw, wanted
from nftctl.model.scenes.words import split_scenes
from nftctl.model.tiny.recipe import SCHEDULER
from nftctl.profile.schema import Model
from nftctl.reward.scorers import load_scorer
from nftctl.run.hashing import hash_file

BASE = Path(recipe.__file__).parent / "base"
WEIGHTS = BASE / "transformer" / "diffusion_pytorch_model.safetensors"
AUTOENCODER = BASE / "vae" / "diffusion_pytorch_model.safetensors"
SHA256 = {
    WEIGHTS: "fc406c45cae1d1909b79ee3848d39477685f5930fb113af9d96805ac5c9c213a",
    AUTOENCODER: "5e0e0f710cfc5e7654a6798dfc23000fea974df9f1cecd1dd8368f70d728a68e",
}
MODEL = Model(height=32, width=32, dtype="float32", system_prompt=False, resolution_template=False)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads_stay_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def stock() -> Any:
    made, info = Cosmos3OmniTransformer.from_pretrained(BASE / "transformer", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return made.float()


@pytest.fixture(scope="module")
def vae() -> Any:
    return autoencoder.load(BASE / "vae")


def test_the_folder_is_a_small_plain_diffusers_base_with_its_autoencoder() -> None:
    assert json.loads((BASE / "model_index.json").read_text())["vae"] == ["diffusers", "AutoencoderKLWan"]
    assert {path: hash_file(path) for path in SHA256} == SHA256
    assert sum(path.stat().st_size for path in BASE.rglob("*") if path.is_file()) < 8_000_000
    for path in SHA256:
        with safe_open(path, "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_its_configuration_is_that_of_the_recipe(stock: Any) -> None:
    assert {key: stock.config[key] for key in recipe.TRANSFORMER} == recipe.TRANSFORMER
    scheduler = UniPCMultistepScheduler.from_pretrained(BASE / "scheduler")
    assert {key: scheduler.config[key] for key in SCHEDULER} == SCHEDULER


def test_it_draws_some_of_what_it_never_saw_and_leaves_room_to_learn(stock: Any, vae: Any) -> None:
    prompts = [str(scene) for scene in split_scenes().test]
    pictures = recipe.sample(stock, vae, prompts, CPU, guidance=1.0, seed=23)
    assert 0.15 < reward(pictures, prompts) < 0.4
    assert reward(pictures, prompts[1:] + prompts[:1]) < 0.1


def reward(pictures: torch.Tensor, prompts: list[str]) -> float:
    scored = load_scorer("colour_shape").score(list(pictures.numpy()), prompts, [{}] * len(prompts))
    return float(np.mean([value for value, _ in scored]))


def test_a_base_that_draws_something_else_is_outside_the_band_of_the_recipe(
    stock: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packaged one draws within it; see its card. A few pictures show what noise in one layer does."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import scenes_check

    found = scenes_check.figures(BASE, CPU, 24)
    assert scenes_check.outside(found) == []
    shutil.copytree(BASE, tmp_path / "base")
    broken = copy.deepcopy(stock)
    with torch.no_grad():
        broken.layers[2].self_attn.to_add_out.weight.normal_(std=0.5)
    broken.save_pretrained(tmp_path / "base" / "transformer")
    assert scenes_check.main([str(tmp_path / "base"), "--pictures", "8"]) == 1
    said = capsys.readouterr().out
    assert "autoencoder: reward 0.92, within" in said.replace("0.919", "0.92")
    assert "outside 0.58 to 0.82" in said


def test_the_autoencoder_keeps_what_the_rules_see(vae: Any) -> None:
    scenes = split_scenes().rl[:160]
    drawn = draw(wanted(scenes), torch.Generator().manual_seed(5))
    latents = autoencoder.encode(vae, drawn)
    assert latents.shape == (160, 6, 1, 8, 8)
    # Normalised: each channel of the scenes has mean 0 and spread 1.
    assert latents.movedim(1, 0).flatten(1).mean(1).abs().max() < 0.15
    assert (latents.movedim(1, 0).flatten(1).std(1) - 1).abs().max() < 0.15
    back = autoencoder.decode(vae, latents)
    assert (back / 255 - drawn.permute(0, 2, 3, 1)).abs().mean() < 0.02
    assert reward(back, [str(scene) for scene in scenes]) > 0.85


def test_what_trains_single_frames_is_what_diffusers_computes(vae: Any) -> None:
    plain = AutoencoderKLWan.from_pretrained(BASE / "vae", torch_dtype=torch.float32)
    pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = plain.encode(pictures[:, :, None] * 2 - 1).latent_dist.mean
        shape = (1, -1, 1, 1, 1)
        latents = (mean - torch.tensor(plain.config.latents_mean).view(shape)) / torch.tensor(
            plain.config.latents_std
        ).view(shape)
        pixels = plain.decode(mean).sample[:, :, 0]
    torch.testing.assert_close(autoencoder.encode(vae, pictures), latents, rtol=0, atol=1e-4)
    made = autoencoder.decode(vae, latents).permute(0, 3, 1, 2)
    assert (made - (pixels + 1) * 127.5).abs().max() < 0.51


def test_an_autoencoder_learns_and_a_seed_makes_the_same_one() -> None:
    made = autoencoder.AutoencoderRecipe(iterations=100, batch=2, warmup=4)
    losses: list[float] = []
    first: Any = autoencoder.train(
        replace(made, iterations=2), CPU, lambda *_: pytest.fail("says nothing before 100 iterations")
    )
    again: Any = autoencoder.train(replace(made, iterations=2), CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    autoencoder.train(made, CPU, lambda _, loss: losses.append(loss))
    # The ground alone is most of a picture: a first loss is about 0.8.
    assert losses[0] < 0.45


def test_neighbours_differ_in_one_word() -> None:
    scenes = split_scenes().pretraining
    near, many = recipe.neighbours(scenes)
    place = scenes.index(next(scene for scene in scenes if str(scene) == "a red circle"))
    others = {str(scenes[int(n)]) for n in near[place, : many[place]]}
    colours = {f"a {colour} circle" for colour in ("green", "blue", "yellow", "purple", "black")}
    # Three red circles are held out.
    assert others == colours | {"a red square", "a red triangle", "two red circles", "four red circles"}
    for index in (1, 500, 1500):
        words = str(scenes[index]).split()
        for other in near[index, : many[index]]:
            there = str(scenes[int(other)]).split()
            changed = [(a, b) for a, b in zip(words, there, strict=False) if a.rstrip("s") != b.rstrip("s")]
            assert len(changed) == 1 or scenes[index].relation != scenes[int(other)].relation
    lone_near, lone_many = recipe.neighbours(scenes[:1])
    assert lone_near.tolist() == [[0]]
    assert lone_many.tolist() == [1]


def test_the_share_of_wrong_captions_is_what_the_recipe_says(vae: Any) -> None:
    scenes = [scene for scene in split_scenes().pretraining if str(scene) in ("a red circle", "a blue circle")]
    made = recipe.Recipe(batch=400, pool=2, wrong=0.25, caption_dropout=0.0)
    batch = recipe.Batches(scenes, made, vae, CPU).next(0)
    blue = autoencoder.decode(vae, batch.x0).float().mean((1, 2)).argmax(1) == 2
    asked = (batch.tokens == recipe.VOCABULARY["blue"]).any(1)
    assert 0.17 < float((blue != asked).float().mean()) < 0.33


def test_padded_captions_read_as_the_family_reads_them() -> None:
    family = load_family(MODEL, "embedded:scenes", "cosmos3", CPU)
    assert family.latent_shape == (6, 1, 8, 8)
    texts = ["a red circle", "two red circles left of a blue square", "four black squares"]
    towers = recipe.Towers(Cosmos3OmniTransformer.from_pretrained(BASE / "transformer").float(), CPU)
    x = torch.randn(3, 6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.2, 0.5, 0.9])
    with torch.no_grad():
        mine = towers.denoiser.velocity(x, sigma, towers.read(*recipe.captions(texts)))
        theirs = family.denoiser(x, sigma, family.batch(family.encoder.encode(texts)))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_one_prompt_is_learnt_and_the_loss_falls(vae: Any) -> None:
    scenes = [scene for scene in split_scenes().pretraining if str(scene) == "a red circle"]
    losses: list[float] = []
    made = recipe.Recipe(iterations=24, batch=4, pool=4, warmup=4, learning_rate=2e-3)
    recipe.pretrain(made, vae, CPU, scenes=scenes, report=lambda progress: losses.append(progress.loss), every=8)
    assert len(losses) == 3
    assert losses[2] < 0.75 * losses[0]


def run_recipe(folder: Path, seed: int) -> dict[str, bytes]:
    sizes = ["--iterations", "2", "--batch", "4", "--pool", "1", "--autoencoder-iterations", "1"]
    recipe.main(["--out", str(folder), *sizes, "--seed", str(seed)])
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_iterations_repeat_bit_for_bit_and_another_seed_changes_the_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = split_scenes()
    few = replace(whole, pretraining=whole.pretraining[:60])
    monkeypatch.setattr(recipe, "split_scenes", lambda: few)
    monkeypatch.setattr(autoencoder, "MEASURED", 1)
    first, second, other = (run_recipe(tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))
    assert first == second
    weights = "base/transformer/diffusion_pytorch_model.safetensors"
    assert {name for name in first if first[name] != other[name]} == {weights}
    made, packaged = load_file(tmp_path / "0" / weights), load_file(WEIGHTS)
    assert {name: value.shape for name, value in made.items()} == {n: value.shape for n, value in packaged.items()}
    # What is in the folder beside the weights is what is packaged.
    learnt = {"base/vae/diffusion_pytorch_model.safetensors", "base/vae/config.json"}
    for name in first.keys() - {weights} - learnt:
        assert (BASE.parent / name).read_bytes() == first[name], name


@pytest.mark.parametrize("made", [recipe.Recipe(), autoencoder.AutoencoderRecipe()])
def test_the_learning_rate_warms_up_and_is_low_where_training_stops(
    made: recipe.Recipe | autoencoder.AutoencoderRecipe,
) -> None:
    assert made.rate(0) == pytest.approx(made.learning_rate / made.warmup, rel=1e-3)
    assert made.rate(made.warmup) > 0.95 * made.learning_rate
    assert made.rate(made.iterations) < 0.06 * made.learning_rate


def test_scenes_of_one_group_are_drawn_as_often_as_the_recipe_says() -> None:
    scenes, made = split_scenes().pretraining, recipe.Recipe()
    odds = made.odds(scenes)
    single = torch.tensor([scene.second is None for scene in scenes])
    assert float(odds.sum()) == pytest.approx(1)
    assert float(odds[single].sum()) == pytest.approx(made.single)
