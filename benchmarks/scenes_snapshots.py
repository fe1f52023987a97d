"""Pretrains the scenes base and leaves it as it was at some iterations, with what each scores and draws.

From this the place to stop was chosen: where reinforcement has room, by the prompts of reinforcement alone; test
prompts are never drawn here. Each snapshot is a bfloat16 safetensors file and a grid, guidance 1 above and 3 below.

    python benchmarks/scenes_snapshots.py OUT --device cuda --iterations 16000 --at 500 1000 2000 4000 8000 16000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from nftctl.model.scenes.autoencoder import AutoencoderRecipe, decode, encode, save, train
from nftctl.model.scenes.drawing import draw, wanted
from nftctl.model.scenes.recipe import Progress, Recipe, pretrain, sample
from nftctl.model.scenes.words import split_scenes
from nftctl.reward.scorers import load_scorer


def reward(pictures: Tensor, prompts: Sequence[str]) -> float:
    """Mean score of uint8 pictures [n, S, S, 3] by the rule scorer."""
    scored = load_scorer("colour_shape").score(list(pictures.numpy()), list(prompts), [{}] * len(prompts))
    return float(np.mean([score for score, _ in scored]))


def save_grid(pictures: Tensor, path: Path, *, columns: int = 16, zoom: int = 2) -> None:
    """Write pictures [n, S, S, 3] side by side, row by row, enlarged `zoom` times."""
    framed = torch.nn.functional.pad(pictures.permute(0, 3, 1, 2), (1, 1, 1, 1))
    rows = [torch.cat(list(row), dim=-1) for row in framed.split(columns) if len(row) == columns]
    grid = torch.cat(rows, dim=-2).permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(grid)
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST).save(path)


def main() -> None:
    """Pretrain; write and print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--iterations", type=int, default=Recipe.iterations)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--pool", type=int, default=Recipe.pool, help="pictures drawn of each scene")
    parser.add_argument("--wrong", type=float, default=Recipe.wrong, help="share of captions with a wrong word")
    parser.add_argument("--autoencoder-iterations", type=int, default=AutoencoderRecipe.iterations)
    parser.add_argument("--every", type=int, default=100, help="iterations between two lines about the loss")
    parser.add_argument("--at", type=int, nargs="+", required=True, help="iterations of the snapshots")
    parser.add_argument("--pictures", type=int, default=320, help="drawn for the reward of each")
    parser.add_argument("--eager", action="store_true", help="do not record the step")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    rl = [str(scene) for scene in split_scenes().rl]
    prompts = [rl[n % len(rl)] for n in range(options.pictures)]

    def report(progress: Progress) -> None:
        print(f"iteration {progress.iteration}: loss {progress.loss:.4f}", flush=True)
        if progress.iteration not in options.at:
            return
        stem = options.out / f"{progress.iteration:06d}"
        weights = {n: v.to(torch.bfloat16).cpu().contiguous() for n, v in progress.mean.state_dict().items()}
        save_file(weights, stem.with_suffix(".safetensors"))
        made = [sample(progress.mean, vae, prompts, options.device, guidance=g, seed=7) for g in (1.0, 3.0)]
        save_grid(torch.cat([pictures[:64] for pictures in made]), stem.with_suffix(".png"))
        scores = [reward(pictures, prompts) for pictures in made]
        print(f"snapshot {progress.iteration}: reward {scores[0]:.3f} at guidance 1, {scores[1]:.3f} at 3", flush=True)

    def say(iteration: int, loss: float) -> None:
        if iteration % 1000 == 0:
            print(f"autoencoder, iteration {iteration}: loss {loss:.4f}", flush=True)

    vae = train(
        AutoencoderRecipe(iterations=options.autoencoder_iterations), options.device, say, recorded=not options.eager
    )
    save(vae, options.out / "vae")
    clock = torch.Generator(options.device).manual_seed(5)
    drawn = draw(wanted(split_scenes().rl, options.device), clock)
    print(f"drawn scenes score {reward(decode(vae, encode(vae, drawn)), rl):.3f} when encoded and decoded", flush=True)
    recipe = Recipe(
        iterations=options.iterations,
        batch=options.batch,
        pool=options.pool,
        seed=options.seed,
        wrong=options.wrong,
    )
    pretrain(recipe, vae, options.device, report=report, every=options.every, recorded=not options.eager)


if __name__ == "__main__":
    main()
