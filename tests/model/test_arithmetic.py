"""Counted operations against torch's own counter over a real forward, and against the formula written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nftctl.errors import UsageRefused
from nftctl.model import naive
from nftctl.model.arithmetic import count_forward, matmul_rate, sustained_rate

from .bases import SMALL
from .sd3_bases import VARIANTS, write_sd3_base

CPU = torch.device("cpu")
PROMPT = [5, 9, 250, 3, 77]


def counted(stock: naive.Stock, prompt: object, shape: tuple[int, ...]) -> int:
    """Operations of one stock forward, by torch."""
    forward = stock.prepare([prompt], torch.Size(shape))
    # Attention by plain products: those of the fused kernel for CPUs are not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(torch.randn(shape), 0.5)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("latent", [(3, 1, 8, 8), (3, 1, 5, 6)], ids=str)
def test_cosmos3_counts_the_generation_tower_alone(pixel_base: Path, latent: tuple[int, int, int, int]) -> None:
    stock = naive.stock_of("cosmos3").load(naive.Loading(pixel_base, torch.float32, CPU))
    total = counted(stock, PROMPT, (1, *latent))
    forward = count_forward("cosmos3", pixel_base, latent)
    length, tokens = len(PROMPT), forward.tokens
    width, heads, layers = SMALL["hidden_size"], SMALL["num_attention_heads"] * SMALL["head_dim"], 3
    shared = SMALL["num_key_value_heads"] * SMALL["head_dim"]
    inner = SMALL["intermediate_size"]
    # What the stock forward does besides: the prompt's tower, and the timestep once per token and not once.
    prompt = length * (2 * width * (2 * heads + 2 * shared) + 2 * width * 3 * inner) * layers
    causal = 4 * length * length * heads * layers
    embedder: Any = stock.module.time_embedder
    embed = 2 * sum(p.numel() for name, p in embedder.named_parameters() if name.endswith("weight"))
    rotary = 2 * 3 * (SMALL["head_dim"] // 2) * (length + tokens)  # positions times frequencies are a product too
    assert total == forward.flops(length) + prompt + causal + embed * (tokens - 1) + rotary
    written_out = 2 * tokens * (
        layers * (2 * width * heads + 2 * width * shared + 3 * width * inner)
        + 2 * width * SMALL["patch_latent_dim"]
    ) + embed + 4 * layers * tokens * (length + tokens) * heads  # fmt: skip
    assert forward.flops(length) == written_out


@pytest.mark.parametrize("variant", VARIANTS)
def test_sd3_counts_what_its_forward_does(tmp_path: Path, variant: str) -> None:
    base = write_sd3_base(tmp_path / "base", variant)
    stock = naive.stock_of("sd3").load(naive.Loading(base, torch.float32, CPU))
    prompt = (torch.randn(1, 7, 32), torch.randn(1, 20))
    assert counted(stock, prompt, (1, 4, 1, 8, 6)) == count_forward("sd3", base, (4, 1, 8, 6)).flops(7)


def test_nano_needs_what_its_shape_says(tmp_path: Path) -> None:
    """The published geometry at 512 x 512: 256 tokens through 6.96e9 weights, and attention over all."""
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text('{"_class_name": "Cosmos3OmniTransformer"}')
    forward = count_forward("cosmos3", tmp_path, (48, 1, 32, 32))
    assert forward.tokens == 256
    attention = 4 * 36 * 256 * (128 + 256) * 4096
    assert forward.flops(128) - attention == pytest.approx(2 * 6.96e9 * 256, rel=5e-3)


def test_the_matmul_rate_is_a_rate() -> None:
    assert 1e7 < matmul_rate(CPU, torch.float32, size=64, repeats=3) < 1e15
    assert 1e7 < sustained_rate(CPU, torch.float32, size=64, seconds=0.01) < 1e15


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageRefused, match="no count of operations"):
        count_forward("other", tmp_path, (3, 1, 8, 8))
