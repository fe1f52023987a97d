"""The small Wan autoencoder of the scenes: 32 x 32 pixels to 8 x 8 latents of six channels and back.

Owns its training on drawn scenes and the normalisation of its latents, which goes into its configuration as diffusers
keeps it. On a CPU a fourth of the tokens is worth far more than the decoder costs. Refuses nothing: its inputs are the
project's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor

from nftctl.model.scenes.drawing import SIZE, draw, wanted
from nftctl.model.scenes.training import Trainer
from nftctl.model.scenes.words import split_scenes
from nftctl.model.tiny.recipe import warm_cosine

CHANNELS = 6
SCALE = 4
"""Pixels per latent."""
SIDE = SIZE // SCALE
"""Latents along a side."""
PATCH = 2
CONFIG: dict[str, Any] = {
    "base_dim": 32,
    "z_dim": CHANNELS,
    "dim_mult": [1, 1],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False],
    # Patches of pixels first: no convolution runs at the full size.
    "patch_size": PATCH,
    "in_channels": 3 * PATCH**2,
    "out_channels": 3 * PATCH**2,
    "scale_factor_spatial": SCALE,
    "scale_factor_temporal": 1,
}
MEASURED = 64
"""Batches over which mean and spread of the latents are taken."""


@dataclass(frozen=True)
class AutoencoderRecipe:
    """Numbers of the autoencoder's training. The defaults made the packaged one."""

    iterations: int = 5000
    seed: int = 1
    batch: int = 128
    learning_rate: float = 2e-3
    warmup: int = 100
    divergence: float = 2e-4
    """Weight of the divergence from a standard normal, a mean over latents, beside the mean absolute error."""

    def rate(self, iteration: int) -> float:
        """Learning rate of an iteration, counted from 0."""
        return warm_cosine(iteration, self.learning_rate, self.warmup, self.iterations)


class _Still(WanCausalConv3d):  # type: ignore[misc]
    """Of a single frame a causal convolution sees with its last slice in time alone: this trains that slice.

    The decoder of `model.still` does the same with weights that are final, and without an encoder's strides.
    """

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        beside: Any = self._padding
        last = self.weight[:, :, -1]
        return F.conv2d(x[:, :, 0], last, self.bias, self.stride[1:], (beside[2], beside[0])).unsqueeze(2)


def _stilled(vae: Any) -> list[WanCausalConv3d]:
    """Its causal convolutions, which from now on take single frames."""
    causal = [module for module in vae.modules() if isinstance(module, WanCausalConv3d)]
    for module in causal:
        module.__class__ = _Still
    return causal


class _Batch(NamedTuple):
    """Pictures [B, 3, 1, SIZE, SIZE] in [-1, 1] and the noise of their latents [B, CHANNELS, 1, SIDE, SIDE]."""

    pictures: Tensor
    noise: Tensor


def train(
    recipe: AutoencoderRecipe,
    device: torch.device,
    report: Callable[[int, float], None] | None = None,
    *,
    recorded: bool = True,
) -> AutoencoderKLWan:
    """Train from scratch on pictures of the pretraining scenes; float32, of numbers that bfloat16 holds.

    `report(iterations done, loss)` is called after every hundredth iteration.
    """
    torch.manual_seed(recipe.seed)
    vae: Any = AutoencoderKLWan(**CONFIG, latents_mean=[0.0] * CHANNELS, latents_std=[1.0] * CHANNELS)
    vae.to(device)
    for module in _stilled(vae):
        module.weight.data[:, :, :-1] = 0.0
    want = wanted(split_scenes().pretraining, device)
    clock = torch.Generator(device).manual_seed(recipe.seed)

    def pictures() -> Tensor:
        pick = torch.randint(len(want.relation), (recipe.batch,), generator=clock, device=device)
        return draw(want[pick], clock)[:, :, None] * 2 - 1

    def loss(batch: _Batch) -> Tensor:
        seen = vae.encode(batch.pictures).latent_dist
        error = (_pixels(vae, seen.mean + seen.std * batch.noise) - batch.pictures).abs().mean()
        apart: Tensor = 0.5 * (seen.mean.square() + seen.var - 1 - seen.logvar).mean()
        return error + recipe.divergence * apart

    trainer = Trainer(loss, list(vae.parameters()), device, weight_decay=0.0, recorded=recorded)
    shape = (recipe.batch, CHANNELS, 1, SIDE, SIDE)
    for iteration in range(recipe.iterations):
        noise = torch.randn(shape, generator=clock, device=device)
        last = trainer.step(_Batch(pictures(), noise), recipe.rate(iteration))
        if report and (iteration + 1) % 100 == 0:
            report(iteration + 1, last.item())
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    _normalise(vae, pictures)
    return vae.eval().requires_grad_(False)


@torch.no_grad()
def _normalise(vae: Any, pictures: Callable[[], Tensor]) -> None:
    latents = torch.cat([vae.encode(pictures()).latent_dist.mean for _ in range(MEASURED)]).movedim(1, 0).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())


@torch.no_grad()
def encode(vae: Any, pictures: Tensor) -> Tensor:
    """Pictures [n, 3, SIZE, SIZE] in [0, 1] -> normalised latents [n, CHANNELS, 1, SIDE, SIDE]."""
    mean, std = _statistics(vae)
    latents: Tensor = (vae.encode(pictures[:, :, None] * 2 - 1).latent_dist.mean - mean) / std
    return latents


@torch.no_grad()
def decode(vae: Any, latents: Tensor) -> Tensor:
    """Normalised latents [n, CHANNELS, 1, SIDE, SIDE] -> pictures uint8 [n, SIZE, SIZE, 3] in host memory."""
    mean, std = _statistics(vae)
    pixels = _pixels(vae, latents * std + mean)[:, :, 0]
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu()


def load(folder: Path) -> AutoencoderKLWan:
    """One that `save` wrote, in float32."""
    vae: Any = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32)
    _stilled(vae)
    frozen: AutoencoderKLWan = vae.eval().requires_grad_(False)
    return frozen


def save(vae: Any, folder: Path) -> None:
    """Write it as a diffusers component in bfloat16; back to float32 behind that, which loses nothing."""
    vae.to(torch.bfloat16).save_pretrained(folder)
    vae.float()


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    shape = (1, -1, 1, 1, 1)
    mean, std = vae.config.latents_mean, vae.config.latents_std
    return torch.tensor(mean, device=vae.device).view(shape), torch.tensor(std, device=vae.device).view(shape)


def _pixels(vae: Any, z: Tensor) -> Tensor:
    """[n, 3, 1, SIZE, SIZE], not clamped, as training needs it."""
    pixels: Tensor = unpatchify(vae.decoder(vae.post_quant_conv(z), first_chunk=True), PATCH)
    return pixels
