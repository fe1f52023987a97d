"""Single frames through the Wan decoder: the stock decoder's pixels, in two dimensions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import nn

from nftctl.model import still
from nftctl.model.still import StillDecoder

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("changes", [PLAIN, RESIDUAL], ids=["plain", "residual"])
@torch.no_grad()
def test_one_frame_has_the_stock_pixels(changes: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where biases are carried along to the next kernel; what compiles these is not part of this."""
    monkeypatch.setattr(still.compiled, "function", lambda work, open_dims: work)
    vae = build(changes)
    z = torch.randn(2, 6, 1, 4, 3)
    exact = copy.deepcopy(vae).double().decode(z.double()).sample
    got = StillDecoder(vae, fused=fused)(z)
    assert got.shape == exact.shape
    assert exact.std() > 1e-3
    assert float((got - exact).abs().max()) < 1e-5


@torch.no_grad()
def test_no_product_is_made_with_frames_or_pixels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in time nor with the doubles of a pixel; a convolution of two by two sees one row and column more."""
    vae, seen = build(PLAIN), []
    convolve = torch.nn.functional.conv2d

    def counted(x: Any, weight: Any, *given: Any, **more: Any) -> Any:
        y = convolve(x, weight, *given, **more)
        seen.append((tuple(x.shape[-2:]), tuple(weight.shape[-2:])))
        return y

    monkeypatch.setattr(torch.nn.functional, "conv2d", counted)
    monkeypatch.setattr(nn.Conv3d, "_conv_forward", lambda self, *given: pytest.fail("a convolution in time"))
    StillDecoder(vae)(torch.randn(1, 6, 1, 4, 4))
    doubled = [side for side, kernel in seen if kernel == (2, 2)]
    assert doubled == [(side, side) for side in (4, 8, 16) for _ in range(4)]
    assert {kernel for _, kernel in seen} == {(1, 1), (2, 2), (3, 3)}


@torch.no_grad()
def test_more_frames_take_the_stock_way() -> None:
    stock, vae = build(PLAIN), build(PLAIN)
    StillDecoder(vae, fused=True)
    z = torch.randn(1, 6, 3, 4, 4)
    assert torch.equal(vae.decode(z).sample, stock.decode(z).sample)


@torch.no_grad()
def test_slices_decode_image_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = build(PLAIN)
    decode, rows = StillDecoder(vae), []
    z = torch.randn(3, 6, 1, 4, 4)
    whole = decode(z)
    one = StillDecoder._decode
    monkeypatch.setattr(StillDecoder, "_decode", lambda self, z: rows.append(z.shape[0]) or one(self, z))
    vae.enable_slicing()
    assert float((decode(z) - whole).abs().max()) < 1e-5
    assert rows == [1, 1, 1]


@torch.no_grad()
def test_what_lies_between_convolutions_is_one_graph_for_any_number_of_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured whole, as on a GPU; what would make kernels of it is left out."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, **how: compile_(work, **how, backend="eager"))
    vae = build(RESIDUAL)
    torch._dynamo.reset()
    decode, plain, z = StillDecoder(vae, fused=True), StillDecoder(vae), torch.randn(4, 6, 1, 4, 3)
    before, graphs = still.compiled.graphs(), []
    for rows in (2, 3, 4):
        assert float((decode(z[:rows]) - plain(z[:rows])).abs().max()) < 1e-5
        graphs.append(still.compiled.graphs() - before)
    assert graphs[0] == graphs[-1] > 3
