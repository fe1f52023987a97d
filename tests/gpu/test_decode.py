"""What decoding takes of a GPU: image by image, four take as much as one. The VAE of Cosmos3-Nano, random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from nftctl.model.decoder import WanDecoder
from nftctl.model.rehearsal import SHAPES, write_random
from nftctl.profile.schema import Model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    with torch.device("meta"):
        module = AutoencoderKLWan(**SHAPES["cosmos3-nano"].vae)
    module.save_config(folder)
    write_random(module, folder, seed=0, dtype=torch.float32)
    return folder


def peak(decoder: WanDecoder, images: int) -> int:
    """Bytes beyond what was held before."""
    device = torch.device("cuda")
    x0 = torch.randn(images, decoder.channels, 1, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    decoder.decode(x0[:1])  # libraries' own buffers
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    assert decoder.decode(x0).shape == (images, 1, 512, 512, 3)
    return int(torch.cuda.max_memory_allocated(device) - before)


@pytest.mark.parametrize("slicing", [True, False])
def test_four_images_one_by_one_take_what_one_takes(vae: Path, slicing: bool) -> None:
    decoder = WanDecoder.load(vae, Model(decode_slicing=slicing), torch.device("cuda"))
    one, four = peak(decoder, 1), peak(decoder, 4)
    print(f"slicing {slicing}: {one / 1e6:.0f} MB for one image, {four / 1e6:.0f} MB for four")
    assert four < 1.1 * one if slicing else four > 2 * one
