"""Makes the embedded base of the scenes: `python -m nftctl.model.scenes.recipe --device cuda`, minutes on one GPU.

Owns the pretraining by flow matching and the folder that it leaves: a plain diffusers Cosmos3OmniTransformer in
bfloat16, scheduler, tokenizer and the prompt files. Counts iterations, never seconds. Training stops early on purpose:
reinforcement needs room above the base.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from torch import Tensor, nn

from nftctl.model.cosmos3 import split
from nftctl.model.cosmos3_encoder import PromptCache
from nftctl.model.scenes.drawing import SIZE, draw, wanted
from nftctl.model.scenes.words import MOST_WORDS, WORDS, Scene, split_scenes
from nftctl.model.tiny.recipe import SCHEDULER, follow, save_base
from nftctl.model.tiny.tokenizer import SPECIAL, vocabulary

PLACE = Path(__file__).parent
VOCABULARY = vocabulary(WORDS)
TRANSFORMER: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "latent_channel": 3,
    "latent_patch_size": 4,
    "patch_latent_dim": 48,
    "rope_axes_dim": [6, 5, 5],
    "rope_theta": 10_000.0,
    "timestep_scale": 0.001,
    "unified_3d_mrope_temporal_modality_margin": 64,
    "vocab_size": len(VOCABULARY),
}
CAPTION = 16
"""Tokens that every caption is padded to, so that all batches have one shape; masks keep the padding unread."""
SHORTEST, LONGEST = 3, MOST_WORDS + 3
"""True tokens of the empty caption and of the longest."""


@dataclass(frozen=True)
class Recipe:
    """Numbers of the pretraining. The defaults made the packaged weights."""

    iterations: int = 6500
    horizon: int = 40_000
    """Iterations after which the cosine schedule would reach zero; stopping long before leaves the base unfinished."""
    seed: int = 0
    batch: int = 512
    learning_rate: float = 1e-3
    warmup: int = 200
    ema: float = 0.999
    caption_dropout: float = 0.1
    single: float = 0.35
    """Share of pictures with one group; these prompts are few, and counting is the hardest thing here."""
    lone: float = 0.25
    """Of the pictures with one group, those with one thing in it."""

    def rate(self, iteration: int) -> float:
        """Learning rate of an iteration, counted from 0."""
        warm = min(1.0, (iteration + 1) / self.warmup)
        return self.learning_rate * warm * 0.5 * (1 + float(np.cos(np.pi * iteration / self.horizon)))

    def odds(self, scenes: Sequence[Scene]) -> Tensor:
        """How often each scene is drawn, float64 [n], adding up to 1."""
        lone = torch.tensor([s.second is None and s.first.count == 1 for s in scenes])
        more = torch.tensor([s.second is None and s.first.count > 1 for s in scenes])
        shares = {self.single * self.lone: lone, self.single * (1 - self.lone): more, 1 - self.single: ~(lone | more)}
        weight = torch.zeros(len(scenes), dtype=torch.float64)
        for share, these in shares.items():
            weight[these] = share / max(1, int(these.sum()))
        return weight / weight.sum()


@dataclass(frozen=True, slots=True)
class Batch:
    """Pictures [B, 3, 1, S, S] in [-1, 1], noise alike, noise levels [B], token ids [B, CAPTION], true lengths [B]."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor
    tokens: Tensor
    lengths: Tensor

    def take(self, other: Batch) -> None:
        """Copy the other's numbers into these tensors."""
        for name in self.__slots__:
            getattr(self, name).copy_(getattr(other, name))


class Batches:
    """Draws batches from the scenes on a device, all of them from one generator there."""

    def __init__(self, scenes: Sequence[Scene], recipe: Recipe, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._want = wanted(scenes, device)
        self._until = recipe.odds(scenes).cumsum(0).float().to(device)
        rows, lengths = captions([str(scene) for scene in scenes])
        self._rows, self._lengths = rows.to(device), lengths.to(device)
        self._empty = captions([""])[0].to(device)
        self._clock = torch.Generator(device).manual_seed(recipe.seed)

    def next(self, iteration: int) -> Batch:
        """Noise levels are logit-normal on even iterations, uniform on odd ones, so that both ends are seen."""
        count = self._recipe.batch
        pick = torch.searchsorted(self._until, self._uniform(count)).clamp(max=len(self._until) - 1)
        x0 = draw(self._want[pick], self._clock)[:, :, None] * 2 - 1
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
        rows = torch.zeros(len(lengths), 3, 1, SIZE, SIZE, device=device)
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
        """Mean squared error of the velocity, whose target is noise - picture."""
        level = batch.sigma.view(-1, 1, 1, 1, 1)
        with self.precision():
            reading = self.read(batch.tokens, batch.lengths)
            velocity = self.denoiser.velocity((1 - level) * batch.x0 + level * batch.noise, batch.sigma, reading)
        return (velocity.float() - (batch.noise - batch.x0)).square().mean()


class Trainer:
    """One optimizer step after another; on a GPU the whole step is recorded once and replayed."""

    UNRECORDED = 3

    def __init__(self, towers: Towers, device: torch.device, *, recorded: bool = True) -> None:
        self._towers, self._cuda, self._recorded = towers, device.type == "cuda", recorded
        rate = torch.zeros((), device=device) if self._cuda else 0.0
        self._optimizer = torch.optim.AdamW(
            towers.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01, capturable=self._cuda
        )
        self._batch: Batch | None = None
        self._loss = torch.zeros(())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Take a step; returns the loss, a tensor that the next step may overwrite."""
        group = self._optimizer.param_groups[0]
        if not self._cuda:
            group["lr"] = rate
            self._work(batch)
            return self._loss
        group["lr"].fill_(rate)
        if self._batch is None:
            self._batch = copy.deepcopy(batch)
        self._batch.take(batch)
        if self._graph is None:
            self._first(self._batch)
        else:
            self._graph.replay()
        return self._loss

    def _first(self, batch: Batch) -> None:
        self._steps += 1
        if self._steps <= self.UNRECORDED or not self._recorded:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._work(batch)
            torch.cuda.current_stream().wait_stream(side)
            return
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._work(batch)
        self._graph = graph
        graph.replay()

    def _work(self, batch: Batch) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._towers.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._towers.parameters(), 1.0)
        self._optimizer.step()
        self._loss = loss.detach()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where pretraining stands: iterations done, the loss's running mean, and the running mean of the weights."""

    iteration: int
    loss: float
    mean: Cosmos3OmniTransformer


def pretrain(
    recipe: Recipe,
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
    trainer = Trainer(towers, device, recorded=recorded)
    batches = Batches(scenes or split_scenes().pretraining, recipe, device)
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
    stock: Cosmos3OmniTransformer, prompts: Sequence[str], device: torch.device, *, guidance: float, seed: int
) -> Tensor:
    """Pictures of the prompts by the base's own sampler in ten steps, uint8 [n, S, S, 3] in host memory."""
    towers = Towers(stock, device)
    made: Any = UniPCMultistepScheduler(**SCHEDULER)
    made.set_timesteps(10)
    made.timesteps = made.sigmas[:-1] * 1000
    clock = torch.Generator().manual_seed(seed)
    x = torch.randn((len(prompts), 3, 1, SIZE, SIZE), generator=clock).to(device)
    positive = towers.read(*(part.to(device) for part in captions(prompts)))
    negative = towers.read(*(part.to(device) for part in captions([""] * len(prompts))))
    for t in made.timesteps:
        sigma = (t / 1000).to(device).expand(len(prompts))
        velocity = towers.denoiser.velocity(x, sigma, positive)
        if guidance != 1:
            without = towers.denoiser.velocity(x, sigma, negative)
            velocity = without + guidance * (velocity - without)
        x = made.step(velocity, t, x, return_dict=False)[0]
    return ((x[:, :, 0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu()


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
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    options = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = True
    recipe = Recipe(iterations=options.iterations, batch=options.batch, seed=options.seed)

    def report(progress: Progress) -> None:
        print(f"iteration {progress.iteration} of {recipe.iterations}: loss {progress.loss:.4f}", flush=True)

    base: Any = pretrain(recipe, options.device, report=report)
    save_base(base.cpu(), options.out / "base", WORDS)
    save_prompts(options.out)
    print(f"wrote {options.out / 'base'}")


if __name__ == "__main__":
    main()
