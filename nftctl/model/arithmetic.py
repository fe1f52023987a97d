"""Floating-point operations that a forward of a denoiser cannot do without, from the shapes of diffusers' transformer.

Counts matrix products and attention, 2 operations per multiply-add; norms, activations and adapters are left out (all
of them together are below one percent at the shapes that matter). Builds the transformer on the meta device, so that
nothing here depends on how the denoiser is fused, sharded or compiled. Refuses families that it has no count for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nftctl.errors import UsageRefused
from nftctl.model import cosmos3, sd3
from nftctl.profile.artifacts import inspect_folder

LatentShape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Forward:
    """Operations of one row's forward as a function of its prompt: fixed + linear L + quadratic L^2 for L tokens.

    tokens   image tokens of a row
    """

    tokens: int
    fixed: int
    linear: int
    quadratic: int = 0

    def flops(self, prompt_tokens: int) -> int:
        """Operations of one row whose prompt has that many tokens."""
        return self.fixed + self.linear * prompt_tokens + self.quadratic * prompt_tokens**2


def count_forward(family: str, base: Path, latent: LatentShape) -> Forward:
    """Count the denoiser of a base folder for latents (C, T, H, W)."""
    if family not in COUNTS:
        raise UsageRefused(f"no count of operations for the family {family!r}", hint=f"there is {', '.join(COUNTS)}")
    return COUNTS[family](base, latent)


def _weights(module: nn.Module, wanted: Callable[[str], bool]) -> int:
    """Entries of the weight matrices of those linear modules whose names are wanted."""
    return sum(
        m.in_features * m.out_features
        for name, m in module.named_modules()
        if isinstance(m, nn.Linear) and wanted(name)
    )


GENERATION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "mlp_moe_gen", "proj_in", "proj_out")
"""Parts of a name that tell a linear module of Cosmos3's generation tower, which alone reads latents."""


def _cosmos3(base: Path, latent: LatentShape) -> Forward:
    """The generation tower: every linear module sees the N image tokens, attention N queries and L + N keys."""
    stock = cosmos3.empty_transformer(inspect_folder(base).config_folder)
    config: Any = stock.config
    patch = int(config.latent_patch_size)
    tokens = latent[1] * math.ceil(latent[2] / patch) * math.ceil(latent[3] / patch)

    def per_token(name: str) -> bool:
        return any(part in name.split(".") for part in GENERATION)

    def per_row(name: str) -> bool:
        return name.startswith("time_embedder.")

    heads = int(config.num_attention_heads) * int(config.head_dim)
    per_key = 4 * tokens * heads * int(config.num_hidden_layers)
    once = 2 * (_weights(stock, per_token) * tokens + _weights(stock, per_row))
    return Forward(tokens, fixed=once + per_key * tokens, linear=per_key)


def _sd3(base: Path, latent: LatentShape) -> Forward:
    """Joint attention over N image and L prompt tokens; image and prompt have linear modules of their own."""
    stock = sd3.empty_transformer(base / "transformer")
    config: Any = stock.config
    patch = int(config.patch_size)
    tokens = latent[1] * (latent[2] // patch) * (latent[3] // patch)
    width = int(config.num_attention_heads) * int(config.attention_head_dim)

    def modulates(name: str) -> bool:
        return name.startswith(("time_text_embed.", "norm_out.")) or ".norm1" in name

    def reads_prompt(name: str) -> bool:
        return any(part in name for part in ("context_embedder", ".attn.add_", ".attn.to_add_out", ".ff_context."))

    def reads_image(name: str) -> bool:
        return not modulates(name) and not reads_prompt(name)

    blocks: list[Any] = list(stock.transformer_blocks)
    joint = 4 * width * len(blocks)
    own = 4 * width * sum(block.attn2 is not None for block in blocks)
    embed = latent[0] * patch * patch * width
    image = 2 * (_weights(stock, reads_image) + embed) * tokens + (joint + own) * tokens**2
    return Forward(
        tokens,
        fixed=image + 2 * _weights(stock, modulates),
        linear=2 * _weights(stock, reads_prompt) + 2 * joint * tokens,
        quadratic=joint,
    )


COUNTS: dict[str, Callable[[Path, LatentShape], Forward]] = {"cosmos3": _cosmos3, "sd3": _sd3}


@torch.no_grad()
def matmul_rate(device: torch.device, dtype: torch.dtype, *, size: int = 0, repeats: int = 10) -> float:
    """Operations per second of a square matrix product on this device: the median of `repeats`, after three.

    A burst: the device rests before each product, so that its clocks are at their highest.
    """
    from nftctl.model.stopwatch import seconds_of

    side = size or (8192 if device.type == "cuda" else 768)
    a = torch.randn(side, side, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn(side, side, device=device, dtype=torch.float32).to(dtype)
    took = sorted(seconds_of(lambda: a @ b, device, repeats=repeats, warm=3))
    return 2 * side**3 / took[len(took) // 2]


@torch.no_grad()
def sustained_rate(device: torch.device, dtype: torch.dtype, *, size: int = 8192, seconds: float = 1.5) -> float:
    """The same for products without a pause, as in a rollout: the last third of `seconds`.

    A GPU at its power limit lowers its clocks within a fraction of a second.
    """
    from nftctl.model.stopwatch import seconds_of

    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))

    def products(count: int) -> None:
        for _ in range(count):
            a @ b

    (twenty,) = seconds_of(lambda: products(20), device, repeats=1, warm=1)
    third = max(1, round(20 * seconds / 3 / twenty))
    (took,) = seconds_of(lambda: products(third), device, repeats=1, warm=2)
    return third * 2 * size**3 / took
