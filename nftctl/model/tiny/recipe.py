"""Makes the base of the digits: `python -m nftctl.model.tiny.recipe` (`make base`), about two minutes on one core.

Owns the pretraining and the folder it leaves: a plain diffusers Cosmos3OmniTransformer in bfloat16, scheduler,
tokenizer, and the prompt files. Counts iterations, never seconds, and runs on one thread from one seed, so that two
runs on one machine are equal bit for bit. Training stops early on purpose: reinforcement needs room above the base.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from torch import Tensor

from nftctl.model.cosmos3 import split
from nftctl.model.tiny.data import WORDS, prompt, read_halves, split_prompts, training_batch
from nftctl.model.tiny.tokenizer import VOCABULARY, build_tokenizer, prompt_tokens

PLACE = Path(__file__).parent
TRANSFORMER: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 240,
    "latent_channel": 3,
    "latent_patch_size": 2,
    "patch_latent_dim": 12,
    "rope_axes_dim": [4, 4, 4],
    "rope_theta": 10_000.0,
    "timestep_scale": 0.001,
    "unified_3d_mrope_temporal_modality_margin": 64,
    "vocab_size": len(VOCABULARY),
}
SCHEDULER: dict[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "solver_order": 2,
}


@dataclass(frozen=True)
class Recipe:
    """Numbers of the pretraining. The defaults made the packaged weights."""

    iterations: int = 1000
    horizon: int = 1400
    """Iterations after which the cosine schedule would reach zero; stopping before it leaves the base unfinished."""
    seed: int = 0
    batch: int = 64
    learning_rate: float = 1.5e-3
    warmup: int = 100
    ema: float = 0.998
    caption_dropout: float = 0.12

    def rate(self, iteration: int) -> float:
        """Learning rate of an iteration, counted from 0."""
        return warm_cosine(iteration, self.learning_rate, self.warmup, self.horizon)


def warm_cosine(iteration: int, peak: float, warmup: int, horizon: int) -> float:
    """Rate of an iteration, counted from 0: a linear rise over `warmup` times a cosine that is zero at `horizon`."""
    warm = min(1.0, (iteration + 1) / warmup)
    return peak * warm * 0.5 * (1 + float(np.cos(np.pi * iteration / horizon)))


def pretrain(recipe: Recipe, *, report: Callable[[int, float], None] | None = None) -> Cosmos3OmniTransformer:
    """Train from scratch by flow matching (target: noise - image) and return the running mean of the weights.

    Only half A of the scans is used. `report(iteration, loss)` is called after every iteration.
    """
    torch.manual_seed(recipe.seed)
    rng, clock = np.random.default_rng(recipe.seed), torch.Generator().manual_seed(recipe.seed)
    scans, _ = read_halves()
    stock = Cosmos3OmniTransformer(**TRANSFORMER)
    mean = copy.deepcopy(stock)
    tower, denoiser = split(stock)
    # The text head and the last layer's text output reach no pixel: they are no part of the towers, and stay as drawn.
    trained = [*tower.parameters(), *denoiser.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    for iteration in range(recipe.iterations):
        optimizer.param_groups[0]["lr"] = recipe.rate(iteration)
        images, colours, digits = training_batch(scans, recipe.batch, rng)
        dropped = rng.uniform(size=recipe.batch) < recipe.caption_dropout
        captions = ["" if drop else prompt(c, d) for drop, c, d in zip(dropped, colours, digits, strict=True)]
        x0 = torch.from_numpy(images)[:, :, None]
        noise = torch.randn(x0.shape, generator=clock)
        sigma = draw_sigma(recipe.batch, iteration, clock)
        level = sigma.view(-1, 1, 1, 1, 1)
        cache = tower.run([prompt_tokens(caption) for caption in captions])
        velocity = denoiser((1 - level) * x0 + level * noise, sigma, cache)
        loss = (velocity - (noise - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        follow(mean, stock, min(recipe.ema, (1 + iteration) / (10 + iteration)))
        if report:
            report(iteration, loss.item())
    return mean.eval()


def draw_sigma(count: int, iteration: int, clock: torch.Generator) -> Tensor:
    """Noise levels [count] in (0, 1): logit-normal on even iterations, uniform on odd ones, so both ends are seen."""
    if iteration % 2:
        return torch.rand(count, generator=clock)
    return torch.randn(count, generator=clock).sigmoid()


@torch.no_grad()
def follow(mean: torch.nn.Module, now: torch.nn.Module, keep: float) -> None:
    """Move every parameter of `mean` towards `now`: keep * mean + (1 - keep) * now."""
    torch._foreach_lerp_(list(mean.parameters()), list(now.parameters()), 1 - keep)


def save_base(
    stock: Cosmos3OmniTransformer, folder: Path, words: Sequence[str] = WORDS, *, vae: str | None = None
) -> None:
    """Write the base in diffusers layout: model_index.json, transformer/ (bfloat16), scheduler/, tokenizer/.

    `vae` is the class of the one that the caller puts beside them. Without one latents are pixels, and a pair of nulls
    is how diffusers says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    transformer: Any = copy.deepcopy(stock)
    for parameter in transformer.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    transformer.save_pretrained(folder / "transformer")
    scheduler: Any = UniPCMultistepScheduler(**SCHEDULER)
    scheduler.save_pretrained(folder / "scheduler")
    build_tokenizer(words).save_pretrained(folder / "tokenizer")
    index = {
        "_class_name": "Cosmos3OmniPipeline",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "Cosmos3OmniTransformer"],
        "vae": [vae and "diffusers", vae],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_prompts(folder: Path) -> None:
    """Write prompts_train.txt and prompts_test.txt."""
    for name, prompts in zip(("train", "test"), split_prompts(), strict=True):
        (folder / f"prompts_{name}.txt").write_text("\n".join(prompts) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Pretrain and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLACE, help="folder that receives base/ and the prompt files")
    parser.add_argument("--iterations", type=int, default=Recipe.iterations)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    def report(iteration: int, loss: float) -> None:
        if (iteration + 1) % 100 == 0:
            print(f"iteration {iteration + 1} of {options.iterations}: loss {loss:.4f}", flush=True)

    base = pretrain(Recipe(iterations=options.iterations, seed=options.seed), report=report)
    save_base(base, options.out / "base")
    save_prompts(options.out)
    print(f"wrote {options.out / 'base'}")


if __name__ == "__main__":
    main()
