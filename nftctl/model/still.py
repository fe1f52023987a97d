"""The Wan decoder for single frames, by the part of its causal convolutions that a single frame reaches.

A causal convolution pads the past with zeros, so of one frame only its last slice in time sees anything: a third of the
products, in two dimensions. Nothing is kept for a next frame either, where the stock decoder copies every activation.
The same sums as the stock decoder's, in another order. Refuses nothing; more frames take the stock way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm, unpatchify
from torch import Tensor, nn


class StillConv(WanCausalConv3d):  # type: ignore[misc]
    """A causal convolution that knows its last slice [out, in, h, w]."""

    last: Tensor

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if x.shape[2] != 1 or cache_x is not None:
            stock: Tensor = super().forward(x, cache_x)
            return stock
        # Along the width, the width, the height, the height, the past and the future.
        beside: Any = self._padding
        return F.conv2d(x[:, :, 0], self.last, self.bias, padding=(beside[2], beside[0])).unsqueeze(2)


class ChannelNorm(WanRMS_norm):  # type: ignore[misc]
    """x / |x| * sqrt(channels) * gamma over the channels, as one kernel where they lie side by side."""

    def forward(self, x: Tensor) -> Tensor:
        channels = x.movedim(1, -1)
        return F.rms_norm(channels, channels.shape[-1:], self.gamma.flatten(), eps=1e-12).movedim(-1, 1)


def prepare(vae: Any) -> None:
    """Let the decoder of an `AutoencoderKLWan` compute single frames in two dimensions. Its weights are to be final."""
    for module in vae.decoder.modules():
        if isinstance(module, WanCausalConv3d) and module.stride == (1, 1, 1):
            last = module.weight.detach()[:, :, -1].contiguous(memory_format=torch.channels_last)
            module.__class__ = StillConv
            module.register_buffer("last", last, persistent=False)
        elif isinstance(module, WanRMS_norm) and module.channel_first and not isinstance(module.bias, nn.Parameter):
            module.__class__ = ChannelNorm
        elif isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def decode(vae: Any, z: Tensor) -> Tensor:
    """z [B, C, 1, h, w] -> [B, 3, 1, H, W] in [-1, 1], as `vae.decode` without tiles."""
    parts = z.split(1) if vae.use_slicing else (z,)
    return torch.cat([_decode(vae, part) for part in parts])


def _decode(vae: Any, z: Tensor) -> Tensor:
    pixels: Tensor = vae.decoder(vae.post_quant_conv(z), first_chunk=True)
    if vae.config.patch_size is not None:
        pixels = unpatchify(pixels, patch_size=vae.config.patch_size)
    return pixels.clamp(-1.0, 1.0)
