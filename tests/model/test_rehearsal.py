"""Bases of random weights: whole diffusers folders that the family and diffusers itself load strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model import rehearsal
from nftctl.model.registry import load_family
from nftctl.model.rehearsal import SHAPES, write_base
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
