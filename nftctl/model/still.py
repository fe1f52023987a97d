"""The Wan decoder for single frames: of its causal convolutions the part that a single frame reaches.

A causal convolution pads the past with zeros, so of one frame only its last slice in time sees anything: a third of the
products, in two dimensions. Nothing is kept for a next frame either, where the stock decoder copies every activation.
Pictures are not enlarged before a convolution: of nine taps that read a picture of doubled pixels, four read pixels of
their own, so each of the four pixels that come of one has a convolution of two by two. On a GPU what lies between two
convolutions is one kernel, biases included. The same sums as the stock decoder's, in another order. Refuses nothing;
more frames take the stock way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor, nn

from nftctl.model import compiled

PARITIES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row and column of the four pixels that come of one."""
EPSILON = 1e-12
ACTIVATED_ROWS: dict[tuple[int, ...], int] = {(0,): 0}
SPREAD_ROWS: dict[tuple[int, ...], int] = {(0, 0): 0, (0, 1): 0, (0, 2): 0, (0, 3): 0, (2,): 0}
"""Dimensions, of which arguments, that make no kernel of their own: pixels, and pictures."""


class StillDecoder:
    """Decodes single frames with an `AutoencoderKLWan`'s weights, which are to be final.

    Activations are [B, C, H, W], their channels side by side in memory. With `fused`, biases are not added behind their
    convolution but carried along, [C], to the next kernel that reads all pixels anyway; `pending` is such a bias.
    """

    def __init__(self, vae: Any, *, fused: bool = False) -> None:
        decoder = vae.decoder
        self._vae = vae
        self._entry = _Convolution(vae.post_quant_conv, fused), _Convolution(decoder.conv_in, fused)
        middle = decoder.mid_block
        self._middle = [_Residual(block, fused) for block in middle.resnets]
        self._attentions = list(middle.attentions)
        self._ups = [_Up(block, fused) for block in decoder.up_blocks]
        self._scale, self._exit = decoder.norm_out.gamma.flatten(), _Convolution(decoder.conv_out, fused)

    def __call__(self, z: Tensor) -> Tensor:
        """z [B, C, 1, h, w] -> [B, 3, 1, H, W] in [-1, 1], as `vae.decode` without tiles."""
        parts = z.split(1) if self._vae.use_slicing else (z,)
        return torch.cat([self._decode(part) for part in parts])

    def _decode(self, z: Tensor) -> Tensor:
        x, pending = z[:, :, 0].contiguous(memory_format=torch.channels_last), None
        for convolution in self._entry:
            x, pending = convolution(_with(x, pending)), convolution.late
        x, pending = self._middle[0](x, pending)
        for attention, residual in zip(self._attentions, self._middle[1:], strict=True):
            if attention is not None:
                x, pending = attention(_with(x, pending).unsqueeze(2)).squeeze(2), None
            x, pending = residual(x, pending)
        for up in self._ups:
            x, pending = up(x, pending)
        x = _with(self._exit(self._exit.between(x, pending, self._scale)), self._exit.late).unsqueeze(2)
        if self._vae.config.patch_size is not None:
            x = unpatchify(x, patch_size=self._vae.config.patch_size)
        return x.clamp(-1.0, 1.0)


class _Convolution:
    """A convolution of a single frame, and what lies before it: norm and activation.

    late   its bias [C], where that is left to what follows
    """

    def __init__(self, stock: WanCausalConv3d, fused: bool) -> None:
        # It keeps its padding to itself: along the width, the width, the height, the height, the past and the future.
        beside: Any = stock._padding
        self._padding = beside[2], beside[0]
        self.weight = stock.weight.detach()[:, :, -1].contiguous(memory_format=torch.channels_last)
        self._bias = None if stock.bias is None else stock.bias.detach()
        self.late = self._bias if fused else None
        self._activated = compiled.function(activated, ACTIVATED_ROWS) if fused else activated

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, None if self.late is self._bias else self._bias, padding=self._padding)

    def between(self, x: Tensor, pending: Tensor | None, scale: Tensor) -> Tensor:
        """What this convolution reads of x + pending: normalised over the channels, scaled [C], activated."""
        batch, channels, height, width = x.shape
        pixels = x.permute(0, 2, 3, 1).reshape(-1, channels)
        return self._activated(pixels, pending, scale).view(batch, height, width, channels).permute(0, 3, 1, 2)


class _Residual:
    """Two convolutions beside a shortcut."""

    def __init__(self, stock: Any, fused: bool) -> None:
        self._scales = [norm.gamma.flatten() for norm in (stock.norm1, stock.norm2)]
        self._first, self._second = _Convolution(stock.conv1, fused), _Convolution(stock.conv2, fused)
        changes = isinstance(stock.conv_shortcut, WanCausalConv3d)
        self._shortcut = _Convolution(stock.conv_shortcut, fused) if changes else None

    def __call__(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = self._first(self._first.between(x, pending, self._scales[0]))
        y = self._second(self._second.between(y, self._first.late, self._scales[1]))
        if self._shortcut is not None:
            x = self._shortcut(x)
            # Of one pixel each, so what is pending goes through it alone.
            through = None if pending is None else F.linear(pending, self._shortcut.weight.flatten(1))
            pending = _sum(through, self._shortcut.late)
        return y.add_(x), _sum(pending, self._second.late)


class _Up:
    """Some residual blocks, and where pictures grow, a convolution that reads doubled pixels beside a shortcut."""

    def __init__(self, stock: Any, fused: bool) -> None:
        self._residuals = [_Residual(block, fused) for block in stock.resnets]
        plain = getattr(stock, "upsamplers", None)
        resample = plain[0] if plain else getattr(stock, "upsampler", None)
        self._doubled = None if resample is None else _Doubled(resample.resample[1], fused)
        beside = getattr(stock, "avg_shortcut", None)
        self._beside = beside is not None
        self._channels = None if beside is None else _channels(beside, stock.resnets[0].conv1.weight.device)

    def __call__(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self._doubled is None:
            return self._through(x, pending)
        if self._beside:
            x, pending = _with(x, pending), None
        y, left = self._through(x, pending)
        # Beyond the border, which what is doubled has, there is no bias either: it cannot be carried along.
        return self._doubled(_with(y, left), x if self._beside else None, self._channels), None

    def _through(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for residual in self._residuals:
            x, pending = residual(x, pending)
        return x, pending


class _Doubled:
    """A convolution of three by three behind a doubling of every pixel, as four of two by two behind none."""

    def __init__(self, stock: nn.Conv2d, fused: bool) -> None:
        weight = stock.weight.detach().float()
        self._weights = [
            _merged(_merged(weight, 2, row), 3, column)
            .to(stock.weight.dtype)
            .contiguous(memory_format=torch.channels_last)
            for row, column in PARITIES
        ]
        self._bias = None if stock.bias is None else stock.bias.detach()
        self._spread = compiled.function(spread, SPREAD_ROWS) if fused else spread

    def __call__(self, x: Tensor, source: Tensor | None, channels: Tensor | None) -> Tensor:
        parts = [F.conv2d(x, weight, None, padding=1) for weight in self._weights]
        return self._spread(parts, self._bias, source, channels)


def _merged(weight: Tensor, dim: int, parity: int) -> Tensor:
    """Three taps along `dim` -> the two that are left when a pixel's neighbours are its doubles."""
    before, here, behind = weight.unbind(dim)
    return torch.stack((before, here + behind) if parity == 0 else (before + here, behind), dim)


def spread(parts: list[Tensor], bias: Tensor | None, source: Tensor | None, channels: Tensor | None) -> Tensor:
    """Four pictures [B, C, H + 1, W + 1] of one parity each -> [B, C, 2 H, 2 W], plus bias and a doubled `source`.

    `channels` [4, C] says for each parity which channel of `source` [B, c, H, W] is added; None: each its own.
    """
    pixels = []
    for parity, (row, column) in enumerate(PARITIES):
        height, width = parts[parity].shape[2] - 1, parts[parity].shape[3] - 1
        pixel = parts[parity][:, :, row : row + height, column : column + width].permute(0, 2, 3, 1)
        if bias is not None:
            pixel = pixel + bias
        if source is not None:
            chosen = source if channels is None else source.index_select(1, channels[parity])
            pixel = pixel + chosen.permute(0, 2, 3, 1)
        pixels.append(pixel)
    rows = [torch.stack(pixels[start : start + 2], dim=3) for start in (0, 2)]
    return torch.stack(rows, dim=2).flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)


def _channels(stock: Any, device: torch.device) -> Tensor | None:
    """Of which channel of its input a stock shortcut makes each parity's pixel: int64 [4, C]; None if of its own.

    The stock repeats channels and deals them out to frames, rows and columns; a single frame is the last of its frames.
    """
    size = int(stock.factor_s)
    own = torch.arange(stock.out_channels, device=device)
    first = own * stock.factor + (stock.factor_t - 1) * size**2
    chosen = torch.stack([(first + row * size + column) // stock.repeats for row, column in PARITIES])
    return None if torch.equal(chosen, own.expand_as(chosen)) else chosen


def activated(pixels: Tensor, pending: Tensor | None, scale: Tensor) -> Tensor:
    """silu(x / |x| * sqrt(channels) * scale) of x = pixels + pending, over the channels; pixels [n, C]."""
    x = pixels if pending is None else pixels + pending
    return F.silu(F.rms_norm(x, x.shape[-1:], scale, eps=EPSILON))


def _with(x: Tensor, pending: Tensor | None) -> Tensor:
    return x if pending is None else x + pending[:, None, None]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
