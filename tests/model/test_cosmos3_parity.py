"""Both towers together against diffusers' own transformer, sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import Cosmos3OmniTransformer
from hypothesis import given, settings
from hypothesis import strategies as st

from nftctl.model import cosmos3_denoiser
from nftctl.model.cosmos3 import split
from nftctl.model.cosmos3_denoiser import patchify, unpatchify
from nftctl.model.cosmos3_encoder import PromptCache

from .bases import build_transformer, stock_velocity

RAGGED = [[5, 9, 250, 3, 77, 8, 1], [4], [299, 0, 13]]
EQUAL = [[5, 9, 250], [4, 4, 1], [299, 0, 13]]
SIGMAS = [0.999999, 0.37, 0.001]


def relative_errors(
    stock: Cosmos3OmniTransformer,
    prompts: list[list[int]],
    size: tuple[int, int],
    frames: int = 1,
    fps: float = 24.0,
    compression: int = 4,
) -> list[float]:
    tower, denoiser = split(stock)
    denoiser.fps = fps
    x = torch.randn(len(prompts), 3, frames, *size, generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor(SIGMAS[: len(prompts)])
    with torch.no_grad():
        ours = denoiser(x, sigma, tower.run(prompts))
        theirs = [
            stock_velocity(stock, ids, row[None], float(s) * 1000, fps, compression)
            for ids, row, s in zip(prompts, x, sigma, strict=True)
        ]
    assert ours.dtype == torch.float32
    assert ours.shape == x.shape
    return [float((a - b[0]).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("prompts", [RAGGED, EQUAL, RAGGED[:1]], ids=["ragged", "equal", "single"])
@pytest.mark.parametrize("size", [(8, 8), (4, 10), (5, 7)], ids=str)
def test_velocity_equals_diffusers(prompts: list[list[int]], size: tuple[int, int]) -> None:
    assert max(relative_errors(build_transformer(), prompts, size)) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True},
        {"attention_bias": True, "unified_3d_mrope_reset_spatial_ids": False, "timestep_scale": 1.0},
        {"latent_patch_size": 1, "patch_latent_dim": 3, "num_hidden_layers": 1},
    ],
    ids=["nemotron", "bias", "patch1"],
)
def test_every_variant_of_the_config_equals_diffusers(changes: dict[str, Any]) -> None:
    assert max(relative_errors(build_transformer(**changes), RAGGED, (4, 6))) <= 1e-5


@pytest.mark.parametrize("prompts", [RAGGED, EQUAL[:2], RAGGED[:1]], ids=["ragged", "equal", "single"])
@pytest.mark.parametrize(("frames", "size"), [(2, (8, 8)), (3, (4, 10)), (5, (5, 7))], ids=str)
def test_several_frames_equal_diffusers(prompts: list[list[int]], frames: int, size: tuple[int, int]) -> None:
    assert max(relative_errors(build_transformer(), prompts, size, frames)) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"base_fps": 16},
        {"enable_fps_modulation": False},
        {"unified_3d_mrope_reset_spatial_ids": False},
        {"enable_fps_modulation": False, "unified_3d_mrope_reset_spatial_ids": False},
        {"unified_3d_mrope_temporal_modality_margin": 15000},
    ],
    ids=str,
)
@pytest.mark.parametrize(("fps", "compression"), [(24.0, 4), (10.0, 4), (30.0, 8)])
def test_frames_are_placed_in_time_as_upstream_places_them(
    changes: dict[str, Any], fps: float, compression: int
) -> None:
    assert max(relative_errors(build_transformer(**changes), RAGGED, (4, 6), 3, fps, compression)) <= 1e-5


def test_the_frame_rate_counts_where_the_base_says_so_and_never_for_one_frame() -> None:
    for modulated, frames, moves in ((True, 3, True), (False, 3, False), (True, 1, False)):
        tower, denoiser = split(build_transformer(enable_fps_modulation=modulated))
        x, seen = torch.randn(2, 3, frames, 4, 6, generator=torch.Generator().manual_seed(1)), []
        for denoiser.fps in (24.0, 12.0):
            with torch.no_grad():
                seen.append(denoiser(x, torch.tensor(SIGMAS[:2]), tower.run(EQUAL[:2])))
        assert torch.equal(*seen) is not moves


def test_one_batch_of_prompts_serves_latents_of_every_shape() -> None:
    """What is remembered of a batch is by shape: one frame, then several, then one again."""
    stock = build_transformer()
    tower, denoiser = split(stock)
    cache = tower.run(RAGGED)
    for frames, size in ((1, (4, 6)), (3, (4, 6)), (1, (4, 6)), (2, (6, 4)), (3, (4, 6))):
        x = torch.randn(3, 3, frames, *size)
        with torch.no_grad():
            ours = denoiser(x, torch.tensor(SIGMAS), cache)
            theirs = [stock_velocity(stock, RAGGED[i], x[i : i + 1], SIGMAS[i] * 1000) for i in range(3)]
        assert max(float((a - b[0]).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)) <= 1e-5
    assert len(cache.memo) == 3


def test_bfloat16_equals_diffusers_within_its_precision() -> None:
    stock = build_transformer(dtype=torch.bfloat16)
    assert stock.time_embedder.linear_1.weight.dtype == torch.float32
    assert max(relative_errors(stock, RAGGED, (6, 8))) <= 2e-2
    assert max(relative_errors(stock, RAGGED, (6, 8), 3)) <= 2e-2


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    tower, denoiser = split(build_transformer())
    x, sigma = torch.randn(3, 3, 1, 4, 4), torch.tensor(SIGMAS)
    caches = [tower.run([ids]) for ids in RAGGED]
    with torch.no_grad():
        together = denoiser(x, sigma, type(caches[0]).batch(caches))
        alone = torch.cat([denoiser(x[i : i + 1], sigma[i : i + 1], caches[i]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert denoiser.forwards == 6


def test_the_mask_exists_only_where_lengths_differ_and_hides_exactly_the_padding() -> None:
    tower, _ = split(build_transformer())
    assert tower.run(EQUAL).attention_mask(4) is None
    mask = tower.run(RAGGED).attention_mask(2)
    assert mask is not None
    assert mask[:, 0, 0].int().tolist() == [[1] * 7 + [1, 1], [1] + [0] * 6 + [1, 1], [1] * 3 + [0] * 4 + [1, 1]]


def row_by_row(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor,
    longest_q: int, longest_k: int, **_: Any
) -> torch.Tensor:  # fmt: skip
    """What the packed kernel computes, one row after the other."""
    rows = []
    for i in range(len(starts) - 1):
        q, k, v = queries[starts[i] : starts[i + 1]], keys[ends[i] : ends[i + 1]], values[ends[i] : ends[i + 1]]
        assert len(q) <= longest_q
        assert len(k) <= longest_k
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        shares = torch.einsum("qhd,khd->hqk", q, k).mul(q.shape[-1] ** -0.5).softmax(dim=-1)
        rows.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(rows)


def test_packed_rows_equal_masked_rows_forwards_and_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, denoiser = split(build_transformer())
    x, weight = torch.randn(3, 3, 1, 4, 6), torch.randn(3, 3, 1, 4, 6)
    name, seen = "layers.1.self_attn.add_k_proj.weight", []
    with torch.no_grad():
        caches = [tower.run([ids]) for ids in RAGGED]
    monkeypatch.setattr(cosmos3_denoiser, "varlen_attn", row_by_row)
    monkeypatch.setattr(cosmos3_denoiser, "fills", lambda keys: False)
    for packed in (False, True):
        monkeypatch.setattr(cosmos3_denoiser, "packs", lambda keys, head_dim, packed=packed: packed)
        denoiser.zero_grad()
        v = denoiser(x, torch.tensor(SIGMAS), PromptCache.batch(caches))
        (v * weight).sum().backward()
        grad = denoiser.get_parameter(name).grad
        assert grad is not None
        seen.append((v.detach(), grad.clone()))
    torch.testing.assert_close(seen[1][0], seen[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[1][1], seen[0][1], rtol=1e-4, atol=1e-5)


def dense(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the dense kernel computes: heads share keys in groups, and every key is read. Its generator is not asked."""
    logits, values = grouped_logits(queries, keys), of_heads(values, queries)
    state = torch.zeros(()), torch.zeros(())
    return (logits.softmax(-1) @ values).to(queries.dtype), logits.float().logsumexp(-1), *state


def dense_backward(
    grad: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *left: Any
) -> tuple[torch.Tensor, ...]:
    """What its backward computes: shares from logits and the denominator it is told, never from the other keys."""
    out, normaliser, _ = left
    scale, groups = queries.shape[-1] ** -0.5, keys.shape[1]
    shares = torch.exp(grouped_logits(queries, keys) - normaliser[..., None])
    worth = grad @ of_heads(values, queries).mT - (grad * out).sum(-1, keepdim=True)
    of_logits = shares * worth
    of_keys, of_values = of_logits.mT @ queries * scale, shares.mT @ grad
    together = [part.unflatten(1, (groups, -1)).sum(2) for part in (of_keys, of_values)]
    return of_logits @ of_heads(keys, queries) * scale, *together


def of_heads(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    return keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)


def grouped_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return queries @ of_heads(keys, queries).mT * queries.shape[-1] ** -0.5


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.integers(0, 1000))
def test_filled_prompts_equal_masked_ones_forwards_and_backwards(lengths: list[int], data: int) -> None:
    tower, denoiser = split(build_transformer())
    draw = torch.Generator().manual_seed(data)
    x, weight = (torch.randn(len(lengths), 3, 1, 4, 6, generator=draw) for _ in range(2))
    sigma = torch.rand(len(lengths), generator=draw)
    with torch.no_grad():
        caches = [tower.run([torch.randint(3, 200, (length,), generator=draw).tolist()]) for length in lengths]
    watched = [p for name, p in denoiser.named_parameters() if "add_" in name and name.endswith("proj.weight")]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cosmos3_denoiser, "_dense", dense)
        patch.setattr(cosmos3_denoiser, "_dense_backward", dense_backward)
        for filled in (False, True):
            patch.setattr(cosmos3_denoiser, "fills", lambda keys, filled=filled: filled)
            batch = PromptCache.batch(caches)
            reading = denoiser.reading(x, batch)
            v = denoiser(x, sigma, batch)
            seen.append((v.detach(), *torch.autograd.grad((v * weight).sum(), watched)))
    assert reading is not None
    assert reading[0].shape[-2] == 128
    assert reading[5].flatten().tolist() == [128 - length for length in lengths]
    for masked, other in zip(*seen, strict=True):
        assert float((other - masked).norm() / masked.norm()) < 1e-4


def test_a_deterministic_run_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it ask the device, which a CPU's keys would not survive."""
    monkeypatch.setattr(cosmos3_denoiser, "packs", lambda keys, head_dim: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda given: True)
    assert cosmos3_denoiser.fills(torch.zeros(1, 2, 8, 16))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not cosmos3_denoiser.fills(torch.zeros(1, 2, 8, 16))


@pytest.mark.parametrize("shift", [-60.0, -5.0, 0.0, 5.0, 60.0])
@pytest.mark.parametrize("last", [-20.0, 0.0, 20.0])
def test_what_repeats_add_is_taken_off_whatever_the_logits_are(shift: float, last: float) -> None:
    """Also where every true key is far below zero, and where the repeated key is the one that is read most."""
    draw = torch.Generator().manual_seed(0)
    queries, keys = torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 7, 16)
    queries[..., 0], values = 4.0, torch.randn(1, 2, 7, 16, generator=draw)
    keys[..., 0] = torch.randn(1, 2, 7, generator=draw) + shift
    keys[:, :, 3, 0] += last
    weight = torch.randn(1, 4, 5, 16, generator=draw)
    prompt, worth, none = keys[:, :, :4], values[:, :, :4], torch.zeros(1, 2, 100, 16)
    filled = torch.cat((prompt, prompt[:, :, -1:].expand(1, 2, 100, 16)), dim=2)
    own = [part.clone().requires_grad_() for part in (queries, keys[:, :, 4:], values[:, :, 4:])]
    true = [part.detach().double().requires_grad_() for part in own]
    whole = (torch.cat((prompt.double(), true[1]), dim=2), torch.cat((worth.double(), true[2]), dim=2))
    exact, *_ = dense(true[0], *whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cosmos3_denoiser, "_dense", dense)
        patch.setattr(cosmos3_denoiser, "_dense_backward", dense_backward)
        repeats, values = torch.full((1, 1, 1), 100.0), torch.cat((worth, none), dim=2)
        seen = cosmos3_denoiser._filled(*own, filled, values, repeats, keeps=True, rounds=False).unflatten(2, (4, -1))
        grads = torch.autograd.grad((seen.transpose(1, 2) * weight).sum(), own)
    torch.testing.assert_close(seen.transpose(1, 2).double(), exact, rtol=2e-3, atol=1e-5)
    # Rounding the result to bfloat16 alone would move gradients by more.
    normaliser = grouped_logits(true[0], whole[0]).logsumexp(-1)
    rounded = dense_backward(weight.double(), true[0], *whole, exact.bfloat16().double(), normaliser, ())
    for mine, right, coarse in zip(grads, torch.autograd.grad((exact * weight).sum(), true), rounded, strict=True):
        bound = (coarse.detach()[:, :, -right.shape[2] :] - right).norm() + 1e-4 * right.norm()
        assert float((mine - right).norm()) <= float(bound)


def test_a_packing_takes_every_true_key_once_and_no_padding() -> None:
    packing = cosmos3_denoiser.pack((2, 1, 3), 2, torch.device("cpu"))
    # Six keys of the images come first, then three prompts padded to three.
    assert packing.order.tolist() == [6, 7, 0, 1, 9, 2, 3, 12, 13, 14, 4, 5]
    assert packing.own.tolist() == [2, 3, 5, 6, 10, 11]
    assert packing.queries.tolist() == [0, 2, 4, 6]
    assert packing.keys.tolist() == [0, 4, 7, 12]
    assert packing.longest == 256


def test_packings_of_one_padded_length_are_of_one_shape() -> None:
    seen = [cosmos3_denoiser.pack(lengths, 2, torch.device("cpu"), padded=4) for lengths in ((2, 1, 3), (4, 4, 4))]
    assert seen[0].order.tolist() == [6, 7, 0, 1, 10, 2, 3, 14, 15, 16, 4, 5, *[0] * 6]
    assert seen[0].own.tolist() == [2, 3, 5, 6, 10, 11]
    # No query reads beyond its row's last key, so what fills the order up is never read.
    assert seen[0].keys.tolist() == [0, 4, 7, 12]
    assert seen[1].order.tolist() == [6, 7, 8, 9, 0, 1, 10, 11, 12, 13, 2, 3, 14, 15, 16, 17, 4, 5]
    for one, other in zip(*seen, strict=True):
        assert (one.shape if isinstance(one, torch.Tensor) else one) == (
            other.shape if isinstance(other, torch.Tensor) else other
        )


def test_gradients_reach_both_towers_and_equal_those_of_diffusers() -> None:
    stock = build_transformer()
    tower, denoiser = split(stock)
    x, weight = torch.randn(1, 3, 1, 4, 6), torch.randn(1, 3, 1, 4, 6)
    watched = ["embed_tokens.weight", "layers.0.self_attn.to_k.weight", "layers.2.self_attn.add_q_proj.weight"]
    grads = []
    for velocity in (
        denoiser(x, torch.tensor([0.4]), tower.run(RAGGED[:1])),
        stock_velocity(stock, RAGGED[0], x, 400.0),
    ):
        stock.zero_grad()
        (velocity * weight).sum().backward()
        grads.append({name: stock.get_parameter(name).grad.clone() for name in watched})
    for name in watched:
        assert grads[1][name].abs().max() > 0
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-5)


def test_module_and_parameter_names_are_those_of_diffusers() -> None:
    stock = build_transformer()
    tower, denoiser = split(stock)
    theirs = dict(stock.named_parameters())
    mine = dict(denoiser.named_parameters())
    assert mine
    assert all(theirs[name] is parameter for name, parameter in mine.items())
    assert not mine.keys() & dict(tower.named_parameters()).keys()
    assert "layers.2.self_attn.to_q" in denoiser.encoder_modules
    assert not any(".add_" in name or "moe_gen" in name for name in denoiser.encoder_modules)


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize(("height", "width", "patch"), [(8, 4, 2), (5, 7, 2), (3, 3, 1), (9, 6, 3)])
def test_unpatchify_inverts_patchify(height: int, width: int, patch: int, frames: int) -> None:
    x = torch.randn(2, 3, frames, height, width)
    tokens = patchify(x, patch)
    assert tokens.shape == (2, frames * -(-height // patch) * -(-width // patch), patch * patch * 3)
    assert torch.equal(unpatchify(tokens, patch, x.shape), x)


@pytest.mark.parametrize(
    ("x", "sigma"),
    [((2, 3, 1, 4, 4), (1,)), ((1, 3, 1, 4, 4), (1,)), ((2, 4, 1, 4, 4), (2,)), ((2, 3, 0, 4, 4), (2,))],
    ids=["sigma", "rows", "channels", "frames"],
)
def test_shapes_that_do_not_belong_together_are_refused(x: tuple[int, ...], sigma: tuple[int, ...]) -> None:
    tower, denoiser = split(build_transformer())
    with pytest.raises(ValueError, match=r"x (must be|has)"):
        denoiser(torch.zeros(x), torch.zeros(sigma), tower.run(EQUAL[:2]))
