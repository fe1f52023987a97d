"""Bases of random weights: whole diffusers folders that the family and diffusers itself load strictly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model import rehearsal
from nftctl.model.registry import load_family
from nftctl.model.rehearsal import write_base
from nftctl.model.shapes import REHEARSAL_SHAPES, SHAPES
from nftctl.profile.schema import Model


def parameters(config: dict[str, object]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Cosmos3OmniTransformer(**config).parameters())


def test_shapes_have_the_sizes_that_they_are_named_for() -> None:
    assert parameters(SHAPES["cosmos3-nano"].transformer) == 15_156_222_144
    assert 2.0e9 < parameters(SHAPES["cosmos3-2b"].transformer) < 2.5e9
    with torch.device("meta"):
        vae = AutoencoderKLWan(**SHAPES["cosmos3-nano"].vae)
    assert sum(p.numel() for p in vae.parameters()) == 704_688_668


def test_stable_diffusion_3_5_medium_is_as_large_as_published() -> None:
    shape = SHAPES["sd35-medium-t5"]
    with torch.device("meta"):
        transformer: Any = SD3Transformer2DModel(**shape.transformer)
        vae: Any = AutoencoderKL(**shape.vae)
        clips = [CLIPTextModelWithProjection(CLIPTextConfig(**config)) for config in shape.text[:2]]
        t5 = T5EncoderModel(T5Config(**shape.text[2]))
    sizes = [sum(p.numel() for p in part.parameters()) for part in (transformer, vae, *clips, t5)]
    assert sizes == [2_243_171_520, 83_819_683, 123_650_304, 694_659_840, 4_762_310_656]
    # The published file, 4.94 GB, holds the table of positions too.
    assert 2 * (sizes[0] + transformer.pos_embed.pos_embed.numel()) == pytest.approx(4.94e9, rel=1e-3)
    assert SHAPES["sd35-medium"].text == shape.text[:2]


def test_a_base_loads_here_and_in_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "FILE_BYTES", 100_000)
    base = write_base("cosmos3-tiny", tmp_path / "base")
    assert len(list((base / "transformer").glob("*.safetensors"))) > 2
    family = load_family(Model(height=64, width=32), str(base), "cosmos3", torch.device("cpu"))
    assert family.latent_shape == (48, 1, 8, 4)
    assert family.report.loaded == family.report.expected
    conditions = family.batch(family.encoder.encode(["two red cubes"]))
    velocity = family.denoiser(torch.randn(1, *family.latent_shape), torch.tensor([0.5]), conditions)
    assert velocity.isfinite().all()
    assert 0.01 < velocity.std() < 100
    pipeline = Cosmos3OmniPipeline.from_pretrained(base, enable_safety_checker=False)
    assert type(pipeline.transformer) is Cosmos3OmniTransformer


def test_a_stable_diffusion_3_base_loads_here_and_in_diffusers(tmp_path: Path) -> None:
    base = write_base("sd3-tiny", tmp_path / "base", dtype=torch.float32)
    family = load_family(Model(height=128, width=64, dtype="float32"), str(base), "sd3", torch.device("cpu"))
    assert family.latent_shape == (16, 1, 16, 8)
    assert family.report.loaded == family.report.expected
    # Longer than CLIP reads, and of signs that it has no words for.
    prompts = family.batch(family.encoder.encode(["two red cubes", "\u4e24\u4e2a \U0001f600" * 40]))
    x, sigma = torch.randn(2, *family.latent_shape), torch.tensor([0.5, 0.9])
    with torch.no_grad():
        velocity = family.denoiser(x, sigma, prompts)
        assert velocity.isfinite().all()
        assert 0.01 < velocity.std() < 100
        assert family.decoder.decode(x).float().std() > 1
        kind: Any = StableDiffusion3Pipeline
        pipeline = kind.from_pretrained(base, text_encoder_3=None, tokenizer_3=None)
        embeds, pooled = prompts.embeds, prompts.pooled  # type: ignore[attr-defined]
        theirs = pipeline.transformer(x[:, :, 0], embeds, pooled, sigma * 1000, return_dict=False)[0]
    torch.testing.assert_close(velocity[:, :, 0], theirs, rtol=1e-4, atol=1e-4)


def test_shapes_are_known_by_name_without_torch() -> None:
    program = (
        "import sys; from nftctl.model.shapes import REHEARSAL_SHAPES as names; print(*names, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == [*REHEARSAL_SHAPES, "False"]
    assert "sd35-medium" in REHEARSAL_SHAPES


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_base("cosmos3-tiny", tmp_path / name, seed=seed)
    file = Path("transformer", rehearsal.STEM)
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageRefused, match="no shape 'huge'"):
        write_base("huge", tmp_path / "base")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointUnusable, match="not empty"):
        write_base("cosmos3-tiny", tmp_path / "full")
