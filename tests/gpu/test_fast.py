"""Kernels that only a GPU has: packed attention and FP8 products, each against what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nftctl.model import adapters, compiled, cosmos3_denoiser, fp8, shard
from nftctl.model.cosmos3 import split
from nftctl.model.cosmos3_encoder import PromptCache
from nftctl.profile.schema import Lora
from tests.model.bases import build_transformer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
WIDE |= {"num_key_value_heads": 2, "rope_axes_dim": [16, 8, 8]}
PROMPTS = [list(range(3, 40)), [8, 9], list(range(100, 117))]
LORA = Lora(targets=["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"])


def parts(dtype: torch.dtype) -> tuple[Any, list[PromptCache]]:
    stock = build_transformer(dtype=dtype, **WIDE).cuda()
    tower, denoiser = split(stock)
    for buffers in (tower.rotary_emb, denoiser.rotary_emb):
        buffers.cuda()
    adapters.add_adapters(denoiser, LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapters.policy_parameters(denoiser).items():
            parameter.data = parameter.data.cuda()
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return denoiser, [tower.run([ids]) for ids in PROMPTS]


def velocity(denoiser: Any, caches: list[PromptCache]) -> tuple[torch.Tensor, torch.Tensor]:
    """One ragged batch, and the gradient of one adapter."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 3, 1, 24, 32, generator=generator).cuda()
    sigma = torch.tensor([0.1, 0.5, 0.9]).cuda()
    denoiser.zero_grad()
    v = denoiser(x, sigma, PromptCache.batch(caches))
    (v * torch.linspace(-1, 1, v.numel(), device=v.device).view_as(v)).sum().backward()
    grad = adapters.policy_parameters(denoiser)["layers.1.self_attn.add_k_proj.lora_B"].grad
    assert grad is not None
    return v.detach(), grad.clone()


def error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    return float((seen.float() - exact.float()).norm() / exact.float().norm())


def test_packed_rows_are_the_masked_ones_in_the_precision_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = velocity(*parts(torch.float32))
    denoiser, caches = parts(torch.bfloat16)
    assert cosmos3_denoiser.packs(caches[0].keys, 64)
    packed = velocity(denoiser, caches)
    monkeypatch.setattr(cosmos3_denoiser, "packs", lambda keys, head_dim: False)
    masked = velocity(denoiser, caches)
    errors = [[error(seen, right) for seen, right in zip(pair, exact, strict=True)] for pair in (packed, masked)]
    print("velocity and gradient against float32: packed", errors[0], "masked", errors[1])
    for one, other in zip(*errors, strict=True):
        assert one < 3e-2
        assert one < 1.5 * other


def test_prompts_of_many_lengths_share_their_graphs() -> None:
    denoiser, caches = parts(torch.bfloat16)
    compiled.compile_layers(denoiser)
    velocity(denoiser, caches)
    velocity(denoiser, caches[::-1])
    before = compiled.graphs()
    for chosen in ([0, 0, 2], [1, 2, 0], [2, 1, 1]):
        velocity(denoiser, [caches[i] for i in chosen])
    assert compiled.graphs() == before


def test_the_hardwares_fp8_product_is_the_emulated_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 64, 256, generator=generator), torch.randn(512, 256, generator=generator)
    here = fp8.product(x.bfloat16().cuda(), *(part.cuda() for part in fp8.quantise(weight)))
    emulated = fp8.product(x.bfloat16().float(), *fp8.quantise(weight))
    print("fp8 product, hardware against emulated:", error(here.cpu(), emulated))
    assert error(here.cpu(), emulated) < 5e-3


def test_an_fp8_rollout_compiles_and_moves_a_velocity_little() -> None:
    denoiser, caches = parts(torch.bfloat16)
    denoiser.sharding = shard.Sharding("replicate-base", [], shard.CountedAllGather(), frozen=True, whole=True)
    lowered = fp8.Fp8Rollout(denoiser, torch.device("cuda"))
    compiled.compile_layers(denoiser)
    x, sigma = torch.randn(3, 3, 1, 24, 32).cuda(), torch.tensor([0.1, 0.5, 0.9]).cuda()
    batch = PromptCache.batch(caches)
    with torch.no_grad(), adapters.weights(denoiser, "policy"):
        before = denoiser(x, sigma, batch)
        with lowered.use():
            inside = denoiser(x, sigma, batch)
        after = denoiser(x, sigma, batch)
    assert torch.equal(before, after)
    print("fp8 velocity against bf16:", error(inside, before))
    assert 1e-3 < error(inside, before) < 0.15
