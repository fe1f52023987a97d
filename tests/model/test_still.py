"""Single frames through the Wan decoder: the stock decoder's pixels, in two dimensions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import nn

from nftctl.model import still

PLAIN: dict[str, Any] = {"base_dim": 4, "num_res_blocks": 1, "z_dim": 6}
RESIDUAL = {**PLAIN, "decoder_base_dim": 6, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
RESIDUAL |= {"scale_factor_spatial": 16}


def build(changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    width = {"latents_mean": [0.0] * 6, "latents_std": [1.0] * 6}
    vae = AutoencoderKLWan(**changes, **width).eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            # Random everything: a scale or a bias that is left out must show.
            parameter.add_(torch.randn(parameter.shape) * (0.3 if "gamma" in name else 0.02))
    return vae


@pytest.mark.parametrize("changes", [PLAIN, RESIDUAL], ids=["plain", "residual"])
@torch.no_grad()
def test_one_frame_has_the_stock_pixels(changes: dict[str, Any]) -> None:
    vae = build(changes)
    z = torch.randn(2, 6, 1, 4, 3)
    exact = copy.deepcopy(vae).double().decode(z.double()).sample
    still.prepare(vae)
    got = still.decode(vae, z)
    assert got.shape == exact.shape
    assert exact.std() > 1e-3
    assert float((got - exact).abs().max()) < 1e-5


@torch.no_grad()
def test_no_product_is_made_with_the_frames_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = build(PLAIN)
    still.prepare(vae)
    seen = []
    forward = nn.Conv3d._conv_forward
    monkeypatch.setattr(
        nn.Conv3d, "_conv_forward", lambda self, *given: seen.append(self.kernel_size) or forward(self, *given)
    )
    still.decode(vae, torch.randn(1, 6, 1, 4, 4))
    assert seen == [vae.post_quant_conv.kernel_size] == [(1, 1, 1)]


@torch.no_grad()
def test_more_frames_and_tiles_take_the_stock_way() -> None:
    stock, vae = build(PLAIN), build(PLAIN)
    still.prepare(vae)
    z = torch.randn(1, 6, 3, 4, 4)
    assert float((vae.decode(z).sample - stock.decode(z).sample).abs().max()) < 1e-5


@torch.no_grad()
def test_slices_decode_image_by_image() -> None:
    vae = build(PLAIN)
    still.prepare(vae)
    z, rows = torch.randn(3, 6, 1, 4, 4), []
    whole = still.decode(vae, z)
    vae.decoder.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[0]))
    vae.enable_slicing()
    assert float((still.decode(vae, z) - whole).abs().max()) < 1e-5
    assert rows == [1, 1, 1]
