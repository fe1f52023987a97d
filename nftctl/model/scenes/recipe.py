"""Makes the embedded base of the scenes: `python -m nftctl.model.scenes.recipe --device cuda`, minutes on one GPU.

Owns the pretraining by flow matching and the folder that it leaves: a plain diffusers Cosmos3OmniTransformer in
bfloat16, its autoencoder, scheduler, tokenizer and the prompt files. Counts iterations, never seconds. Captions are
noisy on purpose, as captions of collected pictures are: of many pictures one word is wrong. Such a base draws cleanly
and often draws something else than what was asked, and that is what reinforcement has to learn.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from torch import Tensor, nn

from nftctl.model.cosmos3 import split
from nftctl.model.cosmos3_encoder import PromptCache
from nftctl.model.scenes.autoencoder import CHANNELS, SIDE, AutoencoderRecipe, decode, encode, save, train
from nftctl.model.scenes.drawing import Wanted, draw, wanted
from nftctl.model.scenes.training import Trainer
from nftctl.model.scenes.words import MOST_WORDS, WORDS, Scene, split_scenes
from nftctl.model.tiny.recipe import SCHEDULER, follow, save_base, warm_cosine
from nftctl.model.tiny.tokenizer import SPECIAL, vocabulary

PLACE = Path(__file__).parent
VOCABULARY = vocabulary(WORDS)
TRANSFORMER: dict[str, Any] = {
    "hidden_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 416,
    "latent_channel": CHANNELS,
    "latent_patch_size": 2,
    "patch_latent_dim": 4 * CHANNELS,
    "rope_axes_dim": [6, 5, 5],
    "rope_theta": 10_000.0,
    "timestep_scale": 0.001,
    "unified_3d_mrope_temporal_modality_margin": 64,
    "vocab_size": len(VOCABULARY),
}
CAPTION = 16
"""Tokens that every caption is padded to, so that all batches have one shape; masks keep the padding unread."""
ENCODED_TOGETHER = 1024
SHORTEST, LONGEST = 3, MOST_WORDS + 3
"""True tokens of the empty caption and of the longest."""


@dataclass(frozen=True)
class Recipe:
    """Numbers of the pretraining. The defaults made the packaged weights."""

    iterations: int = 14_000
    horizon: int = 16_000
    """Iterations after which the cosine schedule would reach zero."""
    seed: int = 0
    batch: int = 256
    pool: int = 512
    """Pictures that are drawn and encoded of each scene before training, which then reads nothing else."""
    learning_rate: float = 1e-3
    warmup: int = 200
    ema: float = 0.999
    caption_dropout: float = 0.1
    wrong: float = 0.5
    """Share of pictures whose caption has one word wrong: a number, a colour, a shape or where things stand."""
    single: float = 0.35
    """Share of pictures with one group; these prompts are few, and counting is the hardest thing here."""
    lone: float = 0.25
    """Of the pictures with one group, those with one thing in it."""

    def rate(self, iteration: int) -> float:
        """Learning rate of an iteration, counted from 0."""
        return warm_cosine(iteration, self.learning_rate, self.warmup, self.horizon)

    def odds(self, scenes: Sequence[Scene]) -> Tensor:
        """How often each scene is drawn, float64 [n], adding up to 1."""
        lone = torch.tensor([s.second is None and s.first.count == 1 for s in scenes])
        more = torch.tensor([s.second is None and s.first.count > 1 for s in scenes])
        shares = {self.single * self.lone: lone, self.single * (1 - self.lone): more, 1 - self.single: ~(lone | more)}
        weight = torch.zeros(len(scenes), dtype=torch.float64)
        for share, these in shares.items():
            weight[these] = share / max(1, int(these.sum()))
        return weight / weight.sum()


class Batch(NamedTuple):
    """Latents [B, C, 1, S, S], noise alike, noise levels [B], token ids [B, CAPTION], true lengths [B]."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor
    tokens: Tensor
    lengths: Tensor


class Batches:
    """Draws batches from the scenes on a device, all of them from one generator there."""

    def __init__(self, scenes: Sequence[Scene], recipe: Recipe, vae: AutoencoderKLWan, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._until = recipe.odds(scenes).cumsum(0).float().to(device)
        self._near, self._many = (part.to(device) for part in neighbours(scenes))
        rows, lengths = captions([str(scene) for scene in scenes])
        self._rows, self._lengths = rows.to(device), lengths.to(device)
        self._empty = captions([""])[0].to(device)
        self._clock = torch.Generator(device).manual_seed(recipe.seed)
        self._pool = self._encoded(wanted(scenes, device), vae)

    def _encoded(self, want: Wanted, vae: AutoencoderKLWan) -> Tensor:
        """Latents [scenes, pool, C, 1, S, S], kept in half precision."""
        size = len(want.relation)
        rows = torch.arange(size, device=self._device).repeat_interleave(self._recipe.pool)
        parts = [encode(vae, draw(want[part], self._clock)).half() for part in rows.split(ENCODED_TOGETHER)]
        return torch.cat(parts).unflatten(0, (size, self._recipe.pool))

    def next(self, iteration: int) -> Batch:
        """Noise levels are logit-normal on even iterations, uniform on odd ones, so that both ends are seen."""
        count = self._recipe.batch
        pick = torch.searchsorted(self._until, self._uniform(count)).clamp(max=len(self._until) - 1)
        other = self._near[pick, (self._uniform(count) * self._many[pick]).long()]
        drawn = torch.where(self._uniform(count) < self._recipe.wrong, other, pick)
        x0 = self._pool[drawn, (self._uniform(count) * self._recipe.pool).long()].float()
        noise = self._normal(x0.shape)
        sigma = self._uniform(count) if iteration % 2 else self._normal((count,)).sigmoid()
        dropped = self._uniform(count) < self._recipe.caption_dropout
        tokens = torch.where(dropped[:, None], self._empty, self._rows[pick])
        lengths = torch.where(dropped, SHORTEST, self._lengths[pick])
        return Batch(x0, noise, sigma, tokens, lengths)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._clock, device=self._device)

    def _normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._clock, device=self._device)


def neighbours(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """Of each scene those of the list that differ from it in one word, int64 [n, most], and how many they are [n].

    Rows are filled up with the scene itself, which is also the one neighbour of a scene that has none.
    """
    lacking: dict[tuple[int, tuple[int | None, ...]], list[int]] = defaultdict(list)
    for index, scene in enumerate(scenes):
        for hole in _holes(scene):
            lacking[hole].append(index)
    near = [
        [other for hole in _holes(scene) for other in lacking[hole] if other != i] for i, scene in enumerate(scenes)
    ]
    most = max(1, *map(len, near))
    rows = [row + [index] * (most - len(row)) for index, row in enumerate(near)]
    return torch.tensor(rows), torch.tensor([max(1, len(row)) for row in near])


def _holes(scene: Scene) -> list[tuple[int, tuple[int | None, ...]]]:
    """The scene with each of its words left out in turn."""
    words = [scene.relation, *(word for group in scene.groups for word in (group.count, group.colour, group.shape))]
    return [(place, (*words[:place], None, *words[place + 1 :])) for place in range(len(words))]


def captions(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids int64 [n, CAPTION], padded, as the pipeline makes them, and their true lengths [n]."""
    start, end, image = SPECIAL[1:]
    ids = [[VOCABULARY[token] for token in (start, *text.split(), end, image)] for text in texts]
    return torch.tensor([row + [0] * (CAPTION - len(row)) for row in ids]), torch.tensor([len(row) for row in ids])


class Towers:
    """Both towers of a transformer, run on padded captions without a shape that depends on them."""

    def __init__(self, stock: Cosmos3OmniTransformer, device: torch.device, *, half: bool = False) -> None:
        self.encoder, self.denoiser = split(stock)
        self._half = half
        layers, heads, width = (TRANSFORMER[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        lengths = (*range(SHORTEST, LONGEST + 1), CAPTION)
        blank = torch.zeros(layers, len(lengths), heads, CAPTION, width, device=device)
        rows = torch.zeros(len(lengths), CHANNELS, 1, SIDE, SIDE, device=device)
        # Where an image stands and what it may read depends on its caption's length alone: one row for each.
        reading: Any = self.denoiser.reading(rows, PromptCache(blank, blank, lengths))
        _, _, self._cos, self._sin, self._mask, *self._rest = reading

    def parameters(self) -> list[nn.Parameter]:
        """All that a pixel depends on. The text head and the last layer's text output stay as they were drawn."""
        return [*self.encoder.parameters(), *self.denoiser.parameters()]

    def precision(self) -> AbstractContextManager[Any]:
        """bfloat16 matrix products over float32 weights, or plain float32."""
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self._half else nullcontext()

    def read(self, tokens: Tensor, lengths: Tensor) -> tuple[Any, ...]:
        """What the denoiser's layers read of padded captions [B, CAPTION] with true lengths [B]."""
        cache = self.encoder(tokens, [CAPTION] * len(tokens))
        row = lengths - SHORTEST
        return cache.keys, cache.values, self._cos[row], self._sin[row], self._mask[row], *self._rest

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error of the velocity, whose target is noise - latent."""
        level = batch.sigma.view(-1, 1, 1, 1, 1)
        with self.precision():
            reading = self.read(batch.tokens, batch.lengths)
            velocity = self.denoiser.velocity((1 - level) * batch.x0 + level * batch.noise, batch.sigma, reading)
        return (velocity.float() - (batch.noise - batch.x0)).square().mean()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where pretraining stands: iterations done, the loss's running mean, and the running mean of the weights."""

    iteration: int
    loss: float
    mean: Cosmos3OmniTransformer


def pretrain(
    recipe: Recipe,
    vae: AutoencoderKLWan,
    device: torch.device,
    *,
    scenes: Sequence[Scene] = (),
    report: Callable[[Progress], None] | None = None,
    every: int = 100,
    recorded: bool = True,
) -> Cosmos3OmniTransformer:
    """Train from scratch on the pretraining scenes (or on `scenes`) and return the running mean of the weights.

    `report` is called after every `every` iterations with the mean loss over these. `recorded` says whether a GPU may
    record the step and replay it.
    """
    torch.manual_seed(recipe.seed)
    stock: Any = Cosmos3OmniTransformer(**TRANSFORMER)
    stock.to(device)
    mean = copy.deepcopy(stock).requires_grad_(False)
    towers = Towers(stock, device, half=device.type == "cuda")
    trainer = Trainer(towers.loss, towers.parameters(), device, recorded=recorded)
    batches = Batches(scenes or split_scenes().pretraining, recipe, vae, device)
    total = torch.zeros((), device=device)
    for iteration in range(recipe.iterations):
        total += trainer.step(batches.next(iteration), recipe.rate(iteration)).to(device)
        follow(mean, stock, min(recipe.ema, (1 + iteration) / (10 + iteration)))
        if report and (iteration + 1) % every == 0:
            report(Progress(iteration + 1, total.item() / every, mean))
            total.zero_()
    return mean.eval()


@torch.no_grad()
def sample(
    stock: Cosmos3OmniTransformer,
    vae: AutoencoderKLWan,
    prompts: Sequence[str],
    device: torch.device,
    *,
    guidance: float,
    seed: int,
) -> Tensor:
    """Pictures of the prompts by the base's own sampler in ten steps, uint8 [n, S, S, 3] in host memory."""
    towers = Towers(stock, device)
    made: Any = UniPCMultistepScheduler(**SCHEDULER)
    made.set_timesteps(10)
    made.timesteps = made.sigmas[:-1] * 1000
    clock = torch.Generator().manual_seed(seed)
    x = torch.randn((len(prompts), CHANNELS, 1, SIDE, SIDE), generator=clock).to(device)
    positive = towers.read(*(part.to(device) for part in captions(prompts)))
    negative = towers.read(*(part.to(device) for part in captions([""] * len(prompts))))
    for t in made.timesteps:
        sigma = (t / 1000).to(device).expand(len(prompts))
        velocity = towers.denoiser.velocity(x, sigma, positive)
        if guidance != 1:
            without = towers.denoiser.velocity(x, sigma, negative)
            velocity = without + guidance * (velocity - without)
        x = made.step(velocity, t, x, return_dict=False)[0]
    return decode(vae, x)


def save_prompts(folder: Path) -> None:
    """Write prompts_train.txt, prompts_tuning.txt and prompts_test.txt."""
    lists = split_scenes()
    for name, scenes in (("train", lists.rl), ("tuning", lists.tuning), ("test", lists.test)):
        (folder / f"prompts_{name}.txt").write_text("".join(f"{scene}\n" for scene in scenes))


def main(arguments: Sequence[str] | None = None) -> None:
    """Pretrain and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLACE, help="folder that receives base/ and the prompt files")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, or cuda")
    parser.add_argument("--iterations", type=int, default=Recipe.iterations)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--pool", type=int, default=Recipe.pool, help="pictures drawn of each scene")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--autoencoder-iterations", type=int, default=AutoencoderRecipe.iterations)
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    recipe = Recipe(iterations=options.iterations, batch=options.batch, pool=options.pool, seed=options.seed)

    def report(progress: Progress) -> None:
        print(f"iteration {progress.iteration} of {recipe.iterations}: loss {progress.loss:.4f}", flush=True)

    def say(iteration: int, loss: float) -> None:
        print(f"autoencoder, iteration {iteration}: loss {loss:.4f}", flush=True)

    vae: Any = train(AutoencoderRecipe(iterations=options.autoencoder_iterations), options.device, say)
    base: Any = pretrain(recipe, vae, options.device, report=report)
    save_base(base.cpu(), options.out / "base", WORDS, vae="AutoencoderKLWan")
    save(vae.cpu(), options.out / "base" / "vae")
    save_prompts(options.out)
    print(f"wrote {options.out / 'base'}")


if __name__ == "__main__":
    main()
