"""Rows between two products: what they are without kernels of their own, which the GPU's tests compare with these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nftctl.model import adapters, fp8, rows
from nftctl.model.cosmos3 import split
from nftctl.profile.schema import Lora

from .bases import build_transformer
from .test_fp8 import PROMPTS, WIDE

ATTENTION = ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def whole(row: rows.Rounded) -> np.ndarray:
    return (row.values.double() * row.scales.double()).numpy()


def test_norm_and_gate_are_those_of_the_formulas_and_are_rounded_once() -> None:
    draw = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(2, 3, 40, generator=draw) for _ in range(3))
    norm = nn.RMSNorm(40, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(40, generator=draw) + 0.5)
        rounded = {"norm": rows.normed(x, norm, keeps=True), "gate": rows.gated(gate, up, keeps=True)}
    a, g = x.double().numpy(), gate.double().numpy()
    exact = {
        "norm": a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-5) * norm.weight.detach().double().numpy(),
        "gate": g / (1 + np.exp(-g)) * up.double().numpy(),
    }
    for name, row in rounded.items():
        assert row.shape == (2, 3)
        assert row.values.shape == (6, 40)
        assert row.exact is not None
        np.testing.assert_allclose(row.exact.numpy(), exact[name], rtol=1e-5, atol=1e-6)
        flat = exact[name].reshape(6, 40)
        # Three bits behind the point: half a unit of the last is a sixteenth, or the smallest step near zero.
        bound = np.maximum(np.abs(flat) / 16, np.abs(flat).max(axis=1, keepdims=True) / 448 * 2**-10)
        assert (np.abs(whole(row) - flat) <= bound * (1 + 1e-4)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.ones(2, 16)
    x[1, 3] = bad
    row = rows.rounded(x)
    finite = torch.isfinite(row.values.float() * row.scales)
    assert finite[0].all()
    assert not finite[1].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_gpu_is_asked_for_a_product_that_it_has(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Of rows with scales of their own only GPUs of compute capability 9.0 make float32; all others refuse."""
    asked: list[torch.dtype] = []
    plain = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **how: (asked.append(how["out_dtype"]), plain(*a, **how))[1])
    with FakeTensorMode():
        x, weight = (torch.empty(n, 32, dtype=rows.E4M3, device="cuda") for n in (6, 48))
        scales, scale = (torch.empty(n, 1, device="cuda") for n in (6, 48))
        y = fp8.product(rows.Rounded(x, scales, None, (2, 3)), weight, scale, dtype)
    assert (y.shape, y.dtype) == ((2, 3, 48), dtype)
    assert asked == [torch.bfloat16]


RELU2 = {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}


def lowered(**sizes: Any) -> tuple[Any, fp8.Fp8Rollout, tuple[Any, ...]]:
    tower, denoiser = split(build_transformer(**(WIDE | sizes)))
    adapters.add_adapters(denoiser, Lora(targets=[*ATTENTION, "mlp_moe_gen.down_proj"]), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapters.policy_parameters(denoiser).items():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    inputs = torch.randn(2, 3, 1, 4, 4, generator=draw), torch.tensor([0.3, 0.8]), tower.run(PROMPTS)
    return denoiser, fp8.Fp8Rollout(denoiser, torch.device("cpu")), inputs


@pytest.mark.parametrize(("sizes", "products"), [({}, 7), (RELU2, 6)])
def test_rows_handed_on_rounded_are_those_that_every_product_would_round(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], products: int
) -> None:
    denoiser, rollout, inputs = lowered(**sizes)
    counted: list[int] = []
    plain = rows.quantise
    for module in (rows, fp8):
        monkeypatch.setattr(module, "quantise", lambda x: (counted.append(len(x)), plain(x))[1])
    with torch.no_grad(), rollout.use():
        counted.clear()  # the weights
        handed = denoiser(*inputs)
        assert len(counted) == 3 * 4  # once for each of four groups of products in three layers
        for layer in denoiser.layers:
            layer.lowered = False
        apart = denoiser(*inputs)
    assert len(counted) == 3 * (4 + products)  # and here once for each product
    assert torch.equal(handed, apart)


def test_a_layer_with_a_product_that_fp8_cannot_make_is_handed_no_rounded_rows() -> None:
    denoiser, rollout, inputs = lowered(intermediate_size=100)  # no multiple of 16
    with torch.no_grad(), rollout.use():
        assert not any(layer.lowered for layer in denoiser.layers)
        assert torch.isfinite(denoiser(*inputs)).all()


def test_outside_of_a_rollout_no_layer_is_handed_rounded_rows() -> None:
    denoiser, rollout, _ = lowered()
    with rollout.use():
        assert all(layer.lowered for layer in denoiser.layers)
    assert not any(layer.lowered for layer in denoiser.layers)


def test_rounded_rows_are_refused_where_nothing_can_read_them() -> None:
    row = rows.rounded(torch.ones(2, 64))._replace(exact=None)
    denoiser, rollout, _ = lowered()
    module = denoiser.layers[0].self_attn.add_q_proj
    with rollout.use(), pytest.raises(ValueError, match="only the rounded ones were kept"):
        module(row)
    with pytest.raises(ValueError, match="no quantised weight"):
        module.base_layer(row)


def bfloat16() -> Any:
    _, denoiser = split(build_transformer(dtype=torch.bfloat16, **WIDE))
    adapters.add_adapters(denoiser, Lora(targets=["add_q_proj", "add_v_proj"]), seed=0)
    with torch.no_grad():
        for parameter in adapters.policy_parameters(denoiser).values():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return denoiser


def test_adapters_of_one_input_read_it_once_where_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = bfloat16()
    attn = denoiser.layers[0].self_attn
    modules = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj  # the second has no adapter
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    read: list[int] = []
    plain = nn.functional.linear

    def linear(given: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        read.append(len(weight)) if given is x else None
        return plain(given, weight, *rest)

    monkeypatch.setattr(nn.functional, "linear", linear)
    rank = len(attn.add_q_proj.lora_A["policy"].weight)
    with torch.no_grad(), adapters.weights(denoiser, "policy"):
        one_by_one = [module(x) for module in modules]
        assert sorted(read) == sorted([64, 32, 32, rank, rank])
        read.clear()
        at_once = adapters.together(x, *modules)
        assert sorted(read) == sorted([64, 32, 32, 2 * rank])
    for one, other in zip(one_by_one, at_once, strict=True):
        torch.testing.assert_close(one, other)
    read.clear()
    with adapters.weights(denoiser, "policy"):  # gradients go through each adapter's own matrices
        trained = adapters.together(x, *modules)
    assert sorted(read) == sorted([64, 32, 32, rank, rank])
    assert trained[0].requires_grad
    with torch.no_grad(), adapters.weights(denoiser, "reference"):
        assert torch.equal(adapters.together(x, *modules)[0], attn.add_q_proj.base_layer(x))
