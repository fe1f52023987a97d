"""Holds a base of the scenes, the packaged one or one that `make scenes` has just rebuilt, to the band of its recipe.

A GPU adds in another order each time, and over 14,000 iterations that becomes another base; so what is promised is
what it draws, not its numbers. Prompts of reinforcement are drawn and scored by the rules; no test prompt is looked at.
Exits with 1 where a figure lies outside its band.

    python benchmarks/scenes_check.py [BASE] [--device cuda] [--pictures 320]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from diffusers import Cosmos3OmniTransformer

sys.path.insert(0, str(Path(__file__).parent))
from scenes_snapshots import reward

from nftctl.model.scenes.autoencoder import decode, encode, load
from nftctl.model.scenes.drawing import draw, wanted
from nftctl.model.scenes.recipe import PLACE, sample
from nftctl.model.scenes.words import split_scenes

BANDS = {
    "drawn scenes through the autoencoder": (0.90, 0.95),
    "guidance 1": (0.23, 0.37),
    "guidance 3": (0.58, 0.82),
}
"""Lowest and highest mean reward. Three builds with the packaged settings, 640 pictures each, gave 0.92 to 0.93, 0.28
to 0.32 and 0.65 to 0.75; a mean of 320 pictures adds a standard error of 0.022."""
TOGETHER = 80
"""Pictures sampled at a time."""


def figures(folder: Path, device: torch.device, pictures: int) -> dict[str, float]:
    """Mean rewards of a base under the names of `BANDS`."""
    scenes = split_scenes().rl
    prompts = [str(scene) for scene in scenes]
    stock = Cosmos3OmniTransformer.from_pretrained(folder / "transformer").to(device).float()
    vae = load(folder / "vae").to(device)
    drawn = draw(wanted(scenes, device), torch.Generator(device).manual_seed(5))
    found = {"drawn scenes through the autoencoder": reward(decode(vae, encode(vae, drawn)), prompts)}
    chosen = [prompts[n % len(prompts)] for n in range(pictures)]
    for guidance in (1.0, 3.0):
        made = [
            sample(stock, vae, chosen[start : start + TOGETHER], device, guidance=guidance, seed=7000 + start)
            for start in range(0, pictures, TOGETHER)
        ]
        found[f"guidance {guidance:g}"] = reward(torch.cat(made), chosen)
    return found


def outside(found: Mapping[str, float]) -> list[str]:
    """The names of the figures that lie outside their bands."""
    return [name for name, (low, high) in BANDS.items() if not low <= found[name] <= high]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures beside their bands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, nargs="?", default=PLACE / "base")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--pictures", type=int, default=320)
    options = parser.parse_args(arguments)
    found = figures(options.base, options.device, options.pictures)
    bad = outside(found)
    for name, value in found.items():
        low, high = BANDS[name]
        print(f"{name}: reward {value:.3f}, {'outside' if name in bad else 'within'} {low:.2f} to {high:.2f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
