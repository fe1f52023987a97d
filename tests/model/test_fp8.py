"""FP8 rollouts: what is rounded, how far it moves a velocity, and that nothing but a rollout ever sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nftctl.errors import ProfileRefused
from nftctl.model import adapters, fp8, rows, shard
from nftctl.model.cosmos3 import split
from nftctl.profile.schema import Lora
from nftctl.roles.build import _lowered

from .bases import build_transformer

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WIDE |= {"rope_axes_dim": [4, 2, 2]}
PROMPTS = [[5, 6, 7], [8, 9]]


def e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest number with 3 bits behind the point, ties to even, exponents from -6, as the format is defined."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6)
    step = 2.0 ** (exponent - 3)
    return np.round(x / step) * step


def test_rows_are_scaled_to_the_largest_number_and_rounded_to_e4m3() -> None:
    x = np.random.default_rng(0).normal(size=(7, 32)) * 10.0 ** np.arange(-3, 4)[:, None]
    rounded, scale = fp8.quantise(torch.tensor(x, dtype=torch.float32))
    expected = np.abs(x).max(axis=1, keepdims=True) / 448
    np.testing.assert_allclose(scale.numpy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(rounded.float().numpy(), e4m3((x.astype("f4") / scale.numpy()).astype("f8")))


def test_a_row_of_zeros_stays_zeros() -> None:
    rounded, scale = fp8.quantise(torch.zeros(2, 16))
    assert not rounded.float().any()
    assert torch.isfinite(scale).all()


def test_the_product_is_that_of_the_rounded_factors() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 64, generator=generator), torch.randn(32, 64, generator=generator)
    (a, sa), (b, sb) = fp8.quantise(x.flatten(0, 1)), fp8.quantise(weight)
    exact = (a.double() * sa.double()) @ (b.double() * sb.double()).T
    torch.testing.assert_close(
        fp8.product(rows.rounded(x), b, sb, x.dtype).double().flatten(0, 1), exact, rtol=1e-5, atol=1e-4
    )


def test_a_rollout_sees_it_and_nothing_else_does() -> None:
    tower, denoiser = split(build_transformer(**WIDE))
    adapters.add_adapters(denoiser, Lora(targets=["add_q_proj", "to_add_out"]), seed=0)
    lowered = fp8.Fp8Rollout(denoiser, torch.device("cpu"))
    assert lowered.modules == 3 * 7  # q, k, v, out, gate, up and down of three layers; neither embedder nor head
    x, sigma, cache = torch.randn(2, 3, 1, 4, 4), torch.tensor([0.3, 0.8]), tower.run(PROMPTS)
    with torch.no_grad():
        before = denoiser(x, sigma, cache)
        with lowered.use():
            inside = denoiser(x, sigma, cache)
        after = denoiser(x, sigma, cache)
    assert torch.equal(before, after)
    error = float((inside - before).norm() / before.norm())
    assert 1e-3 < error < 0.1


def test_what_the_quantised_weights_take_is_known_before_they_are_there() -> None:
    _, denoiser = split(build_transformer(**WIDE))
    expected = fp8.copy_bytes(denoiser)
    lowered = fp8.Fp8Rollout(denoiser, torch.device("cpu"))
    with lowered.use():
        assert expected == sum(part.nbytes for pair in lowered._weights for part in pair)


def test_adapters_keep_their_say_in_fp8() -> None:
    tower, denoiser = split(build_transformer(**WIDE))
    adapters.add_adapters(denoiser, Lora(targets=["add_q_proj", "add_v_proj", "to_add_out"]), seed=0)
    with torch.no_grad():
        for name, parameter in adapters.policy_parameters(denoiser).items():
            if name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.3)
    lowered = fp8.Fp8Rollout(denoiser, torch.device("cpu"))
    x, sigma, cache = torch.randn(2, 3, 1, 4, 4), torch.tensor([0.3, 0.8]), tower.run(PROMPTS)

    def moved() -> torch.Tensor:
        found = []
        for which in ("policy", "reference"):
            with adapters.weights(denoiser, which):  # type: ignore[arg-type]
                found.append(denoiser(x, sigma, cache))
        return found[0] - found[1]

    with torch.no_grad():
        exact = moved()
        with lowered.use():
            rounded = moved()
    similarity = torch.nn.functional.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0)
    assert exact.norm() > 0
    assert similarity > 0.9


def test_weights_that_move_are_quantised_anew_and_frozen_ones_once() -> None:
    tower, denoiser = split(build_transformer(**WIDE))
    lowered, cache = fp8.Fp8Rollout(denoiser, torch.device("cpu")), tower.run(PROMPTS)
    x, sigma = torch.randn(2, 3, 1, 4, 4), torch.tensor([0.3, 0.8])

    def velocity() -> torch.Tensor:
        with torch.no_grad(), lowered.use():
            return denoiser(x, sigma, cache)

    first = velocity()
    with torch.no_grad():
        denoiser.get_parameter("layers.0.self_attn.to_add_out.weight").mul_(2)
    assert not torch.equal(first, velocity())
    denoiser.sharding = shard.Sharding("replicate-base", [], shard.CountedAllGather(), frozen=True, whole=True)
    second = velocity()
    with torch.no_grad():
        denoiser.get_parameter("layers.0.self_attn.to_add_out.weight").mul_(2)
    assert torch.equal(second, velocity())


@pytest.mark.parametrize("name", ["norm1.linear", "norm1_context.linear"])
def test_modulation_stays_in_the_precision_of_the_base(name: str) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = torch.nn.Linear(32, 32)
            self.odd = torch.nn.Linear(32, 24)
            outer = torch.nn.Module()
            outer.linear = torch.nn.Linear(32, 64)
            self.add_module(name.split(".")[0], outer)

    block = Block()

    class Whole:
        def compile_units(self) -> list[torch.nn.Module]:
            return [block]

    assert fp8.eligible(Whole()) == [block.attn]  # type: ignore[arg-type]


def test_a_base_without_anything_to_multiply_is_refused() -> None:
    _, denoiser = split(build_transformer())  # widths of 24 and 40
    with pytest.raises(ProfileRefused) as caught:
        _lowered(denoiser, torch.device("cpu"))
    assert "multiples of 16" in caught.value.findings[0].message


def test_auto_that_finds_no_room_is_refused() -> None:
    _, denoiser = split(build_transformer(**WIDE))
    denoiser.sharding = shard.Sharding("reshard", [], shard.CountedAllGather(), frozen=True)
    with pytest.raises(ProfileRefused) as caught:
        _lowered(denoiser, torch.device("cpu"))
    assert "found no room" in caught.value.findings[0].message
