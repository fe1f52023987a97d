"""Latents -> uint8 pixels: the identity decoder of pixel-space bases, and diffusers' Wan VAE.

Owns the one place where floats become bytes: clamp to [-1, 1], scale, round to nearest. Refuses numbers that are not
finite on either side of the decoder, since a cast would turn them into a black image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from nftctl.errors import CheckpointUnusable, TrainingFailed


def refuse_non_finite(x: Tensor, what: str) -> None:
    """Raise TrainingFailed naming the first sample (dimension 0) of `x` that holds a NaN or an infinity."""
    finite = torch.isfinite(x).flatten(1).all(dim=1)
    if not bool(finite.all()):
        bad = [int(i) for i in (~finite).nonzero().flatten()]
        raise TrainingFailed(
            f"{what} of sample {bad[0]} is not finite (samples {bad} of {x.shape[0]})",
            hint='lower optimizer.lr, or set model.decode_dtype = "float32" if only the decoder\'s output is at fault',
        )


def to_bytes(pixels: Tensor) -> Tensor:
    """[B, 3, T, H, W] in [-1, 1] -> uint8 [B, T, H, W, 3]; what lies outside is clamped, never wrapped."""
    levels = (pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5
    return levels.round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


class PixelDecoder:
    """For bases whose latents are pixels scaled to [-1, 1]."""

    def decode(self, x0: Tensor) -> Tensor:
        refuse_non_finite(x0, "the final latent")
        return to_bytes(x0)


class WanDecoder:
    """Frozen Wan VAE. Latents are normalised per channel: z = x0 * std + mean, as the Cosmos3 pipeline does."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae.eval().requires_grad_(False)
        shape = (1, -1, 1, 1, 1)
        self.mean = torch.tensor(vae.config.latents_mean, dtype=vae.dtype, device=vae.device).view(shape)
        self.inverse_std = 1.0 / torch.tensor(vae.config.latents_std, dtype=vae.dtype, device=vae.device).view(shape)

    @property
    def channels(self) -> int:
        return int(self.vae.config.z_dim)

    @property
    def scale(self) -> int:
        """Pixels per latent, along height and width."""
        return int(self.vae.config.scale_factor_spatial)

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        refuse_non_finite(x0, "the final latent")
        z = x0.to(self.vae.device, self.vae.dtype) / self.inverse_std + self.mean
        pixels = self.vae.decode(z).sample
        refuse_non_finite(pixels, "the decoded image")
        return to_bytes(pixels)


def load_wan(folder: Path, dtype: torch.dtype, device: torch.device) -> WanDecoder:
    """Load `AutoencoderKLWan` from a local folder; raises CheckpointUnusable when it is incomplete or another class."""
    wan: Any = AutoencoderKLWan
    try:
        vae, info = wan.from_pretrained(
            folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointUnusable(f"no Wan VAE can be read from {folder}: {error}") from error
    names = [*info["missing_keys"], *info["unexpected_keys"], *(str(m[0]) for m in info["mismatched_keys"])]
    if names:
        raise CheckpointUnusable(f"the VAE in {folder} does not match its config: {', '.join(sorted(names))}")
    return WanDecoder(vae.to(device))
