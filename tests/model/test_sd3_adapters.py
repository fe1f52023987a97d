"""Adapters on Stable Diffusion 3: which modules, sharded gradients as if whole, and what upstream loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nftctl.errors import ProfileRefused
from nftctl.model import adapters, shard
from nftctl.model.registry import load_family
from nftctl.model.sd3_denoiser import Sd3Denoiser
from nftctl.model.sd3_encoder import PromptEmbeds
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.profile.schema import Lora, Model

from .sd3_bases import SD35, build_pipeline, build_sd3, write_sd3_base
from .world import read_result, run_world, write_result

PAPER = load_profile(bundled_profiles()["sd35m_nft_paper"], env={}).profile.model.lora.targets
LORA = Lora(rank=2, alpha=8.0, targets=PAPER)
IDLE = "transformer_blocks.2.attn.add_q_proj"
"""The last block's queries of the prompt: upstream drops what they attend to, so no gradient ever reaches them."""
CASES = {"gather-once": "float32", "reshard": "bfloat16"}


def adapted(dtype: torch.dtype = torch.float32) -> Sd3Denoiser:
    """A denoiser whose policy has left its old."""
    denoiser = Sd3Denoiser(build_sd3(dtype=dtype, **SD35))
    adapters.add_adapters(denoiser, LORA, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapters.policy_parameters(denoiser).items():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.05, generator=generator)
    return denoiser


def batch(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, PromptEmbeds]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(3, 4, 1, 6, 4, generator=generator)
    prompts = PromptEmbeds(torch.randn(3, 9, 32, generator=generator), torch.randn(3, 20, generator=generator))
    return x, torch.tensor([0.9, 0.5, 0.1]), PromptEmbeds(prompts.embeds.to(dtype), prompts.pooled.to(dtype))


def train(denoiser: Sd3Denoiser, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """Forwards of all three weights, and two accumulated backwards of the policy."""
    given = batch(rank, dtype)
    with torch.no_grad():
        rolled = []
        for which in ("old", "reference"):
            with adapters.weights(denoiser, which):  # type: ignore[arg-type]
                rolled.append(denoiser(*given))
    for _ in range(2):
        with adapters.weights(denoiser, "policy"):
            (denoiser(*given) - rolled[0] - 1.0).square().mean().backward()
    grads = {n: p.grad.clone() for n, p in adapters.policy_parameters(denoiser).items() if p.grad is not None}
    return {"rolled": torch.stack(rolled), "grads": grads}


def member(rank: int, folder: str) -> None:
    for policy, dtype in CASES.items():
        denoiser = adapted(getattr(torch, dtype))
        shard.shard_denoiser(denoiser, init_device_mesh("cpu", (2,)), policy)
        shard.gather(denoiser)
        result = train(denoiser, rank, getattr(torch, dtype))
        shard.release(denoiser)
        result["whole"] = [n for n, p in denoiser.named_parameters() if not isinstance(p, DTensor)]
        write_result(Path(folder), f"{policy} {rank}", result)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("world")
    run_world(member, 2, folder)
    return {case: [read_result(folder, f"{case} {rank}") for rank in range(2)] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_every_target_under_two_ranks_equal_the_unsharded(
    results: dict[str, list[dict[str, Any]]], case: str
) -> None:
    dtype = getattr(torch, CASES[case])
    for rank, seen in enumerate(results[case]):
        want = train(adapted(dtype), rank, dtype)
        assert torch.equal(seen["rolled"], want["rolled"])
        # Eight projections in two blocks; the last block has no output for the prompt.
        assert len(seen["grads"]) == 2 * (3 * 8 - 1)
        for name, grad in want["grads"].items():
            assert bool(grad.any()) is not name.startswith(IDLE)
            assert torch.equal(seen["grads"][name], grad)
        assert all("lora_" in name for name in seen["whole"])
        assert len(seen["whole"]) == 2 * 2 * (3 * 8 - 1)


def names(targets: list[str]) -> list[str]:
    return adapters.match_targets(Sd3Denoiser(build_sd3(**SD35)), targets)


def test_targets_match_by_suffix() -> None:
    assert names(["attn.to_q"]) == [f"transformer_blocks.{n}.attn.to_q" for n in range(3)]
    assert len(names(["to_q"])) == 3 + 2  # the second attention of two layers too
    assert names(["attn.to_out.0", "1.ff.net.2"]) == [
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.1.attn.to_out.0",
        "transformer_blocks.1.ff.net.2",
        "transformer_blocks.2.attn.to_out.0",
    ]
    assert names([r"/.*\.attn2\.to_[qk]/"]) == [
        f"transformer_blocks.{n}.attn2.{side}" for n in (0, 1) for side in ("to_q", "to_k")
    ]
    bound = names(PAPER)
    assert len(bound) == 23
    assert not any("attn2" in name for name in bound)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd3_base(tmp_path_factory.mktemp("sd3"))


def test_targets_in_the_text_encoders_are_refused(base: Path) -> None:
    family = load_family(Model(height=64, width=64, dtype="float32"), str(base), "sd3", torch.device("cpu"))
    for target, code in (
        ("self_attn.q_proj", "lora-touches-prompt-encoder"),
        ("SelfAttention.q", "lora-touches-prompt-encoder"),
        (r"/text_model\..*/", "lora-touches-prompt-encoder"),
        ("/.*q_proj/", "lora-touches-prompt-encoder"),
        ("/to_q/", "lora-matches-nothing"),
        ("pos_embed.proj", "lora-matches-nothing"),
        ("nowhere", "lora-matches-nothing"),
    ):
        with pytest.raises(ProfileRefused) as refusal:
            adapters.match_targets(family.denoiser, [target])
        assert [finding.code for finding in refusal.value.findings] == [code]


def test_an_exported_adapter_loads_in_diffusers(tmp_path: Path) -> None:
    """By `load_lora_weights` of the stock pipeline, alpha included: the policy's velocity, from stock modules."""
    pipeline = build_pipeline()
    denoiser = adapted()
    given = batch(0, torch.float32)
    with torch.no_grad(), adapters.weights(denoiser, "policy"):
        want = denoiser(*given)
    tensors, alpha = {}, {}
    for name, parameter in adapters.policy_parameters(denoiser).items():
        tensors[f"transformer.{name}.weight"] = parameter.detach().contiguous()
        alpha[name.rpartition(".")[0]] = LORA.alpha
    config = adapters.lora_config(LORA, sorted(alpha)).to_dict()
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    header = {f"transformer.{k}": v for k, v in config.items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(header, default=str)}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors", metadata=metadata)
    x, sigma, prompts = given

    def stock() -> Tensor:
        with torch.no_grad():
            return pipeline.transformer(x[:, :, 0], prompts.embeds, prompts.pooled, sigma * 1000, return_dict=False)[0]

    before = stock()
    pipeline.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors", use_safetensors=True)
    torch.testing.assert_close(stock()[:, :, None], want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, :, None], want, atol=1e-2)
