"""Where floats become bytes: clamped, rounded, laid out, and never a NaN turned black."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Cosmos3OmniPipeline
from hypothesis import given
from hypothesis import strategies as st

from nftctl.errors import CheckpointUnusable, ProfileRefused, TrainingFailed
from nftctl.model.decoder import PixelDecoder, WanDecoder, load_vae, pixel_decoder, to_bytes
from nftctl.model.registry import load_family
from nftctl.profile.schema import Model

CPU = torch.device("cpu")


def colour(*rgb: float) -> torch.Tensor:
    return torch.tensor(rgb).view(1, 3, 1, 1, 1).expand(1, 3, 1, 2, 5)


@pytest.mark.parametrize(
    ("rgb", "want"),
    [((1, 1, 1), [255] * 3), ((-1, -1, -1), [0] * 3), ((1, -1, -1), [255, 0, 0]), ((0, 0.5, -0.5), [128, 191, 64])],
)
def test_known_colours(rgb: tuple[float, ...], want: list[int]) -> None:
    image = PixelDecoder().decode(colour(*rgb))
    assert image.dtype == torch.uint8
    assert image.shape == (1, 1, 2, 5, 3)
    assert image.reshape(-1, 3).unique(dim=0).tolist() == [want]


@given(st.floats(-1e4, 1e4, width=32))
def test_every_value_is_clamped_then_rounded(value: float) -> None:
    got = int(to_bytes(torch.full((1, 3, 1, 1, 1), value))[0, 0, 0, 0, 0])
    exact = (min(max(value, -1.0), 1.0) + 1.0) * 127.5
    assert abs(got - exact) <= 0.5 + 1e-4


def test_pixels_keep_their_places() -> None:
    x = torch.randn(2, 3, 1, 4, 6).clamp(-1, 1)
    image = PixelDecoder().decode(x)
    assert int(image[1, 0, 3, 2, 1]) == round((float(x[1, 1, 0, 3, 2]) + 1) * 127.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_latent_that_is_not_finite_is_refused_by_sample(bad: float) -> None:
    x = torch.zeros(4, 3, 1, 2, 2)
    x[2, 1, 0, 1, 1] = bad
    with pytest.raises(TrainingFailed, match=r"sample 2 is not finite"):
        PixelDecoder().decode(x)


@pytest.fixture(scope="module")
def wan(vae_base: Path) -> WanDecoder:
    return WanDecoder.load(vae_base / "vae", Model(), CPU)


def test_wan_decodes_as_the_pipeline_does(wan: WanDecoder, vae_base: Path) -> None:
    x0 = torch.randn(2, 16, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    pipeline = Cosmos3OmniPipeline.from_pretrained(vae_base)
    mean, inverse = pipeline._vae_latents_mean, pipeline._vae_latents_inv_std
    with torch.no_grad():
        z = x0 / inverse.view(1, -1, 1, 1, 1) + mean.view(1, -1, 1, 1, 1)
        decoded = [pipeline.vae.decode(row[None]).sample for row in z]
    frames = [pipeline.video_processor.postprocess_video(d, output_type="pt")[0] for d in decoded]
    want = torch.stack([(f * 255).round().to(torch.uint8).permute(0, 2, 3, 1) for f in frames])
    got = wan.decode(x0)
    assert got.shape == (2, 1, 16, 24, 3)
    assert (got.int() - want.int()).abs().max() <= 1
    assert got.unique().numel() > 1


def test_a_decoder_output_that_is_not_finite_is_refused_by_sample(wan: WanDecoder) -> None:
    x0 = torch.randn(3, 16, 1, 2, 2)
    x0[1] = 3e38
    with pytest.raises(TrainingFailed, match=r"sample 1 is not finite"):
        wan.decode(x0)


def test_the_decoder_is_frozen_and_has_the_precision_that_was_asked_for(vae_base: Path) -> None:
    half = WanDecoder.load(vae_base / "vae", Model(decode_dtype="bfloat16"), CPU)
    assert {p.dtype for p in half.vae.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in half.vae.parameters())
    assert half.decode(torch.zeros(1, 16, 1, 2, 2)).shape == (1, 1, 16, 16, 3)


def test_a_folder_that_holds_no_vae_is_refused(tmp_path: Path, vae_base: Path) -> None:
    for folder in (tmp_path, vae_base / "tokenizer"):
        with pytest.raises(CheckpointUnusable, match="no AutoencoderKLWan"):
            WanDecoder.load(folder, Model(), CPU)


def test_the_family_takes_decoder_and_shape_from_the_base(
    vae_base: Path, pixel_base: Path, make_model: Callable[..., Model]
) -> None:
    pixel = load_family(make_model(), str(pixel_base), "cosmos3", CPU)
    assert (pixel.latent_shape, pixel.clamp_x0) == ((3, 1, 8, 12), True)
    assert isinstance(pixel.decoder, PixelDecoder)
    wan = load_family(make_model(height=32, width=48), str(vae_base), "cosmos3", CPU)
    assert (wan.latent_shape, wan.clamp_x0) == ((16, 1, 4, 6), False)
    assert wan.noise_shape(2) == (2, 16, 1, 4, 6)
    x = torch.zeros(wan.noise_shape(2))
    batch = wan.batch(wan.encoder.encode(["a", "bb"]))
    assert wan.denoiser(x, torch.tensor([0.5, 0.1]), batch).shape == x.shape
    assert wan.decoder.decode(x).shape == (2, 1, 32, 48, 3)


def test_slicing_and_tiling_are_what_the_wan_vae_is_told(vae_base: Path) -> None:
    """One image at a time; a tile of 256 pixels is an image here, so tiling has to change nothing."""
    x0 = torch.randn(3, 16, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    plain = WanDecoder.load(vae_base / "vae", Model(), CPU)
    both = WanDecoder.load(vae_base / "vae", Model(decode_slicing=True, decode_tiling=True), CPU)
    assert (plain.vae.use_slicing, plain.vae.use_tiling) == (False, False)
    assert (both.vae.use_slicing, both.vae.use_tiling) == (True, True)
    rows: list[int] = []
    both.vae.decoder.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[0]))
    assert (both.decode(x0).int() - plain.decode(x0).int()).abs().max() <= 1
    assert rows == [1, 1, 1]


@pytest.mark.parametrize("mode", ["decode_slicing", "decode_tiling"])
def test_modes_that_a_decoder_has_not_are_refused(
    pixel_base: Path, vae_base: Path, make_model: Callable[..., Model], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProfileRefused) as refusal:
        load_family(make_model(**{mode: True}), str(pixel_base), "cosmos3", CPU)
    (finding,) = refusal.value.findings
    assert (finding.code, finding.key) == ("decode-mode", f"model.{mode}")
    assert "latents that are pixels" in finding.message
    with pytest.raises(ProfileRefused):
        pixel_decoder(Model(**{mode: True}))

    def without_modes(*arguments: Any) -> Any:
        vae = load_vae(*arguments)
        del vae.use_slicing, vae.use_tiling
        return vae

    monkeypatch.setattr("nftctl.model.decoder.load_vae", without_modes)
    assert WanDecoder.load(vae_base / "vae", Model(), CPU).channels == 16
    with pytest.raises(ProfileRefused, match="1 error"):
        WanDecoder.load(vae_base / "vae", Model(**{mode: True}), CPU)
