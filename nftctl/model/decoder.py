"""Latents -> uint8 pixels: the identity decoder of pixel-space bases, and diffusers' Wan and KL VAEs.

Owns the one place where floats become bytes: clamp to [-1, 1], scale, round to nearest, and the way of those bytes to
the host, for which nothing else has to wait. Refuses numbers that are not finite on either side of the decoder, since a
cast would turn them into a black image, and slicing or tiling asked of a decoder that has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from torch import Tensor

from nftctl.errors import Finding, ProfileRefused, TrainingFailed
from nftctl.model import compiled
from nftctl.model.still import StillDecoder
from nftctl.model.weights import load_component
from nftctl.profile.schema import Model


class Decoded:
    """Images that a device may still be working on."""

    def __init__(self, images: Tensor, finite: Sequence[tuple[Tensor, str]]) -> None:
        """`images` uint8 [B, T, H, W, 3]; `finite` says of each sample [B] whether what it is the result of is."""
        self._images = images.to("cpu", non_blocking=True)
        self._finite = [(flags.to("cpu", non_blocking=True), what) for flags, what in finite]
        self._ready = torch.cuda.Event() if images.is_cuda else None
        if self._ready is not None:
            self._ready.record(torch.cuda.current_stream(images.device))

    def wait(self) -> Tensor:
        """The images, on the CPU; TrainingFailed names the first sample that holds a NaN or an infinity."""
        if self._ready is not None:
            self._ready.synchronize()
        for flags, what in self._finite:
            if bad := [int(i) for i in (~flags).nonzero().flatten()]:
                raise TrainingFailed(
                    f"{what} of sample {bad[0]} is not finite (samples {bad} of {len(flags)})",
                    hint='lower optimizer.lr, or set model.decode_dtype = "float32" if only the decoder\'s output is '
                    "at fault",
                )
        return self._images


def finite(x: Tensor) -> Tensor:
    """Which samples (dimension 0) hold finite numbers alone: bool [B]."""
    return torch.isfinite(x).flatten(1).all(dim=1)


def to_bytes(pixels: Tensor) -> Tensor:
    """[B, 3, T, H, W] in [-1, 1] -> uint8 [B, T, H, W, 3]; what lies outside is clamped, never wrapped."""
    levels = (pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5
    return levels.round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


class PixelDecoder:
    """For bases whose latents are pixels scaled to [-1, 1]."""

    def begin(self, x0: Tensor) -> Decoded:
        return Decoded(to_bytes(x0), [(finite(x0), "the final latent")])

    def decode(self, x0: Tensor) -> Tensor:
        return self.begin(x0).wait()


class VaeDecoder(ABC):
    """A frozen VAE of diffusers behind its own scaling of latents."""

    vae_class: ClassVar[Any]

    def __init__(self, vae: Any, *, fused: bool = False) -> None:
        """`fused` lets a decoder compile what lies between its convolutions."""
        self.vae = vae.eval().requires_grad_(False)

    @classmethod
    def load(cls, folder: Path, model: Model, device: torch.device) -> Self:
        """Load the VAE from a local folder, with the precision, slicing and tiling that the profile asks for."""
        vae = load_vae(cls.vae_class, folder, getattr(torch, model.decode_dtype), device)
        deterministic = torch.are_deterministic_algorithms_enabled()
        decoder = cls(vae, fused=compiled.wanted(model, device=device, deterministic=deterministic))
        _refuse_missing_modes(model, decoder.vae)
        if model.decode_slicing:
            decoder.vae.enable_slicing()
        if model.decode_tiling:
            decoder.vae.enable_tiling()
        return decoder

    @property
    @abstractmethod
    def channels(self) -> int:
        """Latent channels."""

    @property
    @abstractmethod
    def scale(self) -> int:
        """Pixels per latent, along height and width."""

    @abstractmethod
    def pixels(self, x0: Tensor) -> Tensor:
        """Latents [B, C, T, h, w] in the VAE's precision -> [B, 3, T, H, W], about in [-1, 1]."""

    @torch.no_grad()
    def begin(self, x0: Tensor) -> Decoded:
        pixels = self.pixels(x0.to(self.vae.device, self.vae.dtype))
        return Decoded(to_bytes(pixels), [(finite(x0), "the final latent"), (finite(pixels), "the decoded image")])

    def decode(self, x0: Tensor) -> Tensor:
        return self.begin(x0).wait()


class WanDecoder(VaeDecoder):
    """Wan VAE. Latents are normalised per channel: z = x0 * std + mean, as the Cosmos3 pipeline does."""

    vae_class = AutoencoderKLWan

    def __init__(self, vae: Any, *, fused: bool = False) -> None:
        super().__init__(vae)
        shape = (1, -1, 1, 1, 1)
        self.mean = torch.tensor(vae.config.latents_mean, dtype=vae.dtype, device=vae.device).view(shape)
        self.inverse_std = 1.0 / torch.tensor(vae.config.latents_std, dtype=vae.dtype, device=vae.device).view(shape)
        self._still = StillDecoder(vae, fused=fused)

    @property
    def channels(self) -> int:
        return int(self.vae.config.z_dim)

    @property
    def scale(self) -> int:
        return int(self.vae.config.scale_factor_spatial)

    def pixels(self, x0: Tensor) -> Tensor:
        z = x0 / self.inverse_std + self.mean
        if z.shape[2] == 1 and not self.vae.use_tiling:
            return self._still(z)
        pixels: Tensor = self.vae.decode(z).sample
        return pixels


class KlDecoder(VaeDecoder):
    """VAE of the Stable Diffusion line, for single images: z = x0 / scaling_factor + shift_factor."""

    vae_class = AutoencoderKL

    @property
    def channels(self) -> int:
        return int(self.vae.config.latent_channels)

    @property
    def scale(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    def pixels(self, x0: Tensor) -> Tensor:
        config = self.vae.config
        z = x0.squeeze(2) / config.scaling_factor + (config.shift_factor or 0.0)
        pixels: Tensor = self.vae.decode(z).sample
        return pixels.unsqueeze(2)


def load_vae(vae_class: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a VAE of this class from a local folder; CheckpointUnusable when it is incomplete or another class."""
    vae = load_component(vae_class, folder, torch_dtype=dtype)
    return vae.to(device)


def pixel_decoder(model: Model) -> PixelDecoder:
    """The decoder of a base whose latents are pixels."""
    _refuse_missing_modes(model, None)
    return PixelDecoder()


def _refuse_missing_modes(model: Model, vae: Any) -> None:
    what = "latents that are pixels" if vae is None else f"a {type(vae).__name__}"
    findings = [
        Finding("decode-mode", f"model.decode_{mode}", f"{what} cannot be decoded by {mode}", help="remove the key")
        for mode, asked in (("slicing", model.decode_slicing), ("tiling", model.decode_tiling))
        if asked and not hasattr(vae, f"use_{mode}")
    ]
    if findings:
        raise ProfileRefused(findings)
