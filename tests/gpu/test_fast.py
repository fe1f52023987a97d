"""Kernels that only a GPU has: packed and filled attention and FP8 products, each against what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nftctl.model import adapters, compiled, cosmos3_denoiser, fp8, recorded, rows, shard
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
    denoiser.zero_grad()
    v = velocity_alone(denoiser, caches)
    (v * torch.linspace(-1, 1, v.numel(), device=v.device).view_as(v)).sum().backward()
    grad = adapters.policy_parameters(denoiser)["layers.1.self_attn.add_k_proj.lora_B"].grad
    assert grad is not None
    return v.detach(), grad.clone()


def velocity_alone(denoiser: Any, caches: list[PromptCache]) -> torch.Tensor:
    x = torch.randn(3, 3, 1, 24, 32, generator=torch.Generator().manual_seed(2)).cuda()
    v: torch.Tensor = denoiser(x, torch.tensor([0.1, 0.5, 0.9]).cuda(), PromptCache.batch(caches))
    return v


def error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    return float((seen.float() - exact.float()).norm() / exact.float().norm())


def test_packed_rows_are_the_masked_ones_in_the_precision_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = velocity(*parts(torch.float32))
    denoiser, caches = parts(torch.bfloat16)
    assert cosmos3_denoiser.packs(caches[0].keys, 64)
    monkeypatch.setattr(cosmos3_denoiser, "fills", lambda keys: False)
    packed = velocity(denoiser, caches)
    monkeypatch.setattr(cosmos3_denoiser, "packs", lambda keys, head_dim: False)
    masked = velocity(denoiser, caches)
    errors = [[error(seen, right) for seen, right in zip(pair, exact, strict=True)] for pair in (packed, masked)]
    print("velocity and gradient against float32: packed", errors[0], "masked", errors[1])
    for one, other in zip(*errors, strict=True):
        assert one < 3e-2
        assert one < 1.5 * other


@torch.no_grad()
def test_filled_prompts_are_the_masked_ones_in_the_precision_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played and computed alike, compiled and not."""
    x, sigma = torch.randn(3, 3, 1, 24, 32).cuda(), torch.tensor([0.1, 0.5, 0.9]).cuda()
    denoiser, caches = parts(torch.float32)
    exact = denoiser(x, sigma, PromptCache.batch(caches))
    denoiser, caches = parts(torch.bfloat16)
    assert cosmos3_denoiser.fills(caches[0].keys)
    with monkeypatch.context() as patch:
        patch.setattr(cosmos3_denoiser, "fills", lambda keys: False)
        packed = denoiser(x, sigma, PromptCache.batch(caches))
    for compiles in (False, True):
        if compiles:
            compiled.compile_layers(denoiser)
        recorder, batch = whole(denoiser), PromptCache.batch(caches)
        denoiser.recorder = None
        computed = denoiser(x, sigma, batch)
        denoiser.recorder = recorder
        played = [denoiser(x, sigma, batch) for _ in range(3)]
        denoiser.recorder = None
        print("against float32: filled", error(computed, exact), "packed", error(packed, exact))
        assert recorder.recordings == 1
        assert all(torch.equal(v, computed) for v in played)
        assert error(computed, exact) < 1.5 * error(packed, exact)
        assert not torch.equal(computed, packed)


@pytest.mark.parametrize("compiles", [False, True])
def test_filled_prompts_have_the_gradients_of_packed_ones(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    exact = velocity(*parts(torch.float32))
    denoiser, caches = parts(torch.bfloat16)
    if compiles:
        compiled.compile_layers(denoiser)
    filled = velocity(denoiser, caches)
    with torch.no_grad():
        without = velocity_alone(denoiser, caches)
    monkeypatch.setattr(cosmos3_denoiser, "fills", lambda keys: False)
    packed = velocity(denoiser, caches)
    errors = [[error(seen, right) for seen, right in zip(pair, exact, strict=True)] for pair in (filled, packed)]
    print("velocity and gradient against float32: filled", errors[0], "packed", errors[1])
    assert all(one < 1.5 * other for one, other in zip(*errors, strict=True))
    assert not torch.equal(filled[0], packed[0])
    # What is set against one another comes from one attention, whichever kernel ends it.
    assert error(without, filled[0]) < 1e-2


def test_a_deterministic_run_reads_packed_rows() -> None:
    denoiser, caches = parts(torch.bfloat16)
    x, batch = torch.randn(3, 3, 1, 24, 32).cuda(), PromptCache.batch(caches)
    filled = denoiser.reading(x, batch)
    torch.use_deterministic_algorithms(True)
    try:
        packed = denoiser.reading(x, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [len(filled), len(packed)] == [6, 11]


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
    here = fp8.product(
        rows.rounded(x.bfloat16().cuda()), *(part.cuda() for part in fp8.quantise(weight)), torch.bfloat16
    )
    emulated = fp8.product(rows.rounded(x.bfloat16().float()), *fp8.quantise(weight), torch.float32)
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


def same_rows(here: rows.Rounded, plain: rows.Rounded) -> None:
    """As good as equal: sums are taken in another order, and quotients at the edge of two numbers fall otherwise."""
    assert here.shape == plain.shape
    scales = here.scales.cpu()
    torch.testing.assert_close(scales, plain.scales.float(), rtol=1e-2, atol=0)
    there = (plain.values.float() * plain.scales.float()).cpu()
    assert error(here.values.float().cpu() * scales, there) < 0.01
    assert here.exact is None or error(here.exact.cpu().flatten(0, -2), plain.exact.flatten(0, -2)) < 5e-3  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [96, 4096, 12288])
@pytest.mark.parametrize("keeps", [False, True])
def test_rows_in_one_kernel_are_those_of_plain_sums(width: int, keeps: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(2, 33, width, generator=draw).bfloat16() for _ in range(3))
    norm = torch.nn.RMSNorm(width, eps=1e-6)
    norm.weight.data = torch.rand(width, generator=draw) + 0.5
    plain = rows.normed(x.float(), norm, keeps=keeps), rows.gated(gate.float(), up.float(), keeps=keeps)
    norm.cuda()
    assert rows.has_kernels(x.cuda())
    here = rows.normed(x.cuda(), norm, keeps=keeps), rows.gated(gate.cuda(), up.cuda(), keeps=keeps)
    for one, other in zip(here, plain, strict=True):
        assert (one.exact is not None) == keeps
        same_rows(one, other)


@pytest.mark.parametrize("heads", [(32, 8, 128), (12, 4, 64), (3, 1, 48)])
def test_the_end_of_attention_in_one_kernel_is_that_of_plain_sums(heads: tuple[int, int, int]) -> None:
    many, few, size = heads
    draw = torch.Generator().manual_seed(0)
    queries, out = (torch.randn(3, 7, many, size, generator=draw).bfloat16().transpose(1, 2) for _ in range(2))
    keys = torch.randn(3, few, 11, size, generator=draw).bfloat16()
    repeats = torch.tensor([0.0, 5.0, 100.0])[:, None, None]
    grouped = queries.unflatten(1, (few, -1)).float() @ keys[:, :, None].float().mT * size**-0.5
    true, last = grouped.logsumexp(-1).flatten(1, 2), grouped[..., -1].flatten(1, 2)
    normaliser = torch.logaddexp(true, last + repeats.log())
    given = out, normaliser, queries, keys, repeats
    plain = out.float() * torch.exp(normaliser - true)[..., None]  # the shares that true keys have without the repeats
    for rounds in (False, True):
        here: Any = rows.finished(*(part.cuda() for part in given), keeps=True, rounds=rounds)
        expected = plain.transpose(1, 2).flatten(2)
        assert error((here.exact if rounds else here).cpu(), expected) < 5e-3
        if rounds:
            same_rows(here, rows.rounded(expected))


def test_rows_that_do_not_lie_end_to_end_are_read_where_they_lie() -> None:
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16().cuda()

    x, (gate, up) = numbers(5, 192)[:, ::2], numbers(5, 192).chunk(2, dim=-1)
    norm = torch.nn.RMSNorm(96, eps=1e-6).cuda()
    out, queries, keys = numbers(3, 4, 7, 16), numbers(3, 4, 7, 16), numbers(3, 2, 11, 16)
    normaliser, repeats = torch.full((3, 4, 7), 9.0).cuda(), torch.tensor([0.0, 5.0, 100.0])[:, None, None].cuda()
    apart = [part.mT.contiguous().mT for part in (out, normaliser, queries, keys)]
    repeated = torch.stack((repeats, -repeats), dim=-1)[..., 0]
    how: Any = {"keeps": True, "rounds": True}
    pairs: list[Any] = [
        (rows.normed(x, norm, keeps=True), rows.normed(x.contiguous(), norm, keeps=True)),
        (rows.gated(gate, up, keeps=True), rows.gated(gate.contiguous(), up.contiguous(), keeps=True)),
        (rows.finished(*apart, repeated, **how), rows.finished(out, normaliser, queries, keys, repeats, **how)),
    ]
    for here, plain in pairs:
        assert torch.equal(here.exact, plain.exact)
        assert torch.equal(here.values.float() * here.scales, plain.values.float() * plain.scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_kernel_hides_no_number_that_is_not_finite(bad: float) -> None:
    x = torch.ones(2, 4096).bfloat16()
    x[1, 7] = bad
    norm = torch.nn.RMSNorm(4096, eps=1e-6).cuda()
    for row in (rows.normed(x.cuda(), norm, keeps=False), rows.gated(x.cuda(), x.cuda(), keeps=False)):
        finite = torch.isfinite(row.values.float() * row.scales)
        assert finite[0].all()
        assert not finite[1].all()


@pytest.mark.parametrize("compiles", [False, True])
def test_layers_with_kernels_between_products_are_those_without(
    monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """In FP8 and in bfloat16, against the same with every product rounding its own rows, and plain sums."""
    seen = {}
    x, sigma = torch.randn(3, 3, 1, 24, 32).cuda(), torch.tensor([0.1, 0.5, 0.9]).cuda()
    for kernels in (True, False):
        torch._dynamo.reset()
        if not kernels:
            monkeypatch.setattr(rows, "rowkernels", None)
        denoiser, caches = parts(torch.bfloat16)
        denoiser.sharding = shard.Sharding("replicate-base", [], shard.CountedAllGather(), frozen=True, whole=True)
        lowered = fp8.Fp8Rollout(denoiser, torch.device("cuda"))
        if compiles:
            compiled.compile_layers(denoiser)
        batch = PromptCache.batch(caches)
        with torch.no_grad(), adapters.weights(denoiser, "policy"):
            seen["base", kernels] = denoiser(x, sigma, batch)
            with lowered.use():
                for layer in denoiser.layers:
                    layer.lowered = kernels
                seen["fp8", kernels] = denoiser(x, sigma, batch)
    print(
        "rows in kernels against plain:", {kind: error(seen[kind, True], seen[kind, False]) for kind in ("base", "fp8")}
    )
    assert error(seen["base", True], seen["base", False]) < 0.01
    assert error(seen["fp8", True], seen["fp8", False]) < error(seen["fp8", True], seen["base", True])


def whole(denoiser: Any) -> recorded.Recorder:
    denoiser.sharding = shard.Sharding("replicate-base", [], shard.CountedAllGather(), frozen=True, whole=True)
    denoiser.recorder = recorded.Recorder(denoiser)
    return denoiser.recorder


@pytest.mark.parametrize("layer_by_layer", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_recorded_forward_and_backward_are_those_kernel_by_kernel(layer_by_layer: bool, recomputed: bool) -> None:
    denoiser, caches = parts(torch.bfloat16)
    denoiser.gradient_checkpointing = recomputed
    if layer_by_layer:
        compiled.compile_layers(denoiser)
    recorder = whole(denoiser)
    orders = [[0, 1, 2], [2, 1, 0], [0, 0, 0], [1, 1, 1]]
    chosen = [[caches[i] for i in order] for order in orders]
    denoiser.recorder = None
    expected = [velocity(denoiser, some) for some in chosen]
    denoiser.recorder = recorder
    velocity(denoiser, chosen[0])
    assert recorder.recordings == 0
    for order, some, (v, grad) in zip(orders, chosen, expected, strict=True):
        played = velocity(denoiser, some)
        print("recorded against not: velocity", error(played[0], v), "gradient", error(played[1], grad))
        # Rows of one length are not packed when they are not recorded: another kernel, which rounds otherwise.
        near = 2e-2 if len(set(order)) == 1 else 0.0
        assert error(played[0], v) <= near
        assert error(played[1], grad) <= near
    assert (recorder.recordings, recorder.played) == (1, 12)


def test_a_recording_follows_the_weights_of_its_copy_and_ends_when_they_move() -> None:
    denoiser, caches = parts(torch.bfloat16)
    recorder, batch = whole(denoiser), PromptCache.batch(caches)
    x, sigma = torch.randn(3, 3, 1, 24, 32).cuda(), torch.tensor([0.1, 0.5, 0.9]).cuda()

    def seen(which: Any) -> torch.Tensor:
        with torch.no_grad(), adapters.weights(denoiser, which):
            v: torch.Tensor = denoiser(x, sigma, batch)
        return v

    for which in ("old", "policy", "reference"):
        first = seen(which)
        assert torch.equal(seen(which), first)
        assert torch.equal(seen(which), first)
    assert recorder.recordings == 3
    policy, old = seen("policy"), seen("old")
    with torch.no_grad():
        for parameter in adapters.policy_parameters(denoiser).values():
            parameter.mul_(1.5)
    moved = seen("policy")
    assert error(moved, policy) > 1e-3
    assert torch.equal(seen("old"), old)
    adapters.refresh_old(denoiser, 0.0)
    assert torch.equal(seen("old"), moved)
    assert denoiser.sharding is not None
    denoiser.sharding.gathering += 1
    assert torch.equal(seen("old"), moved)
    assert recorder.recordings == 1


def test_a_backward_is_refused_when_its_forward_was_played_over() -> None:
    denoiser, caches = parts(torch.bfloat16)
    whole(denoiser)
    x, sigma = torch.randn(3, 3, 1, 24, 32).cuda(), torch.tensor([0.1, 0.5, 0.9]).cuda()
    batch = PromptCache.batch(caches)
    for _ in range(2):
        denoiser(x, sigma, batch).sum().backward()
    first, second = denoiser(x, sigma, batch), denoiser(x, sigma, batch)
    with pytest.raises(RuntimeError, match="played again since"):
        first.sum().backward()
    second.sum().backward()
