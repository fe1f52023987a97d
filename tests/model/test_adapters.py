"""Policy, old and reference on one base: who is trained, who follows, and what a target may be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nftctl.errors import ProfileRefused
from nftctl.model import adapters
from nftctl.model.cosmos3 import split
from nftctl.model.cosmos3_denoiser import Cosmos3Denoiser
from nftctl.model.cosmos3_encoder import PromptCache
from nftctl.profile.schema import Lora

from .bases import build_transformer

LORA = Lora(rank=2, alpha=4.0)
ATTENTION = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]


def adapted(
    lora: Lora = LORA, seed: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Cosmos3Denoiser, PromptCache]:
    tower, denoiser = split(build_transformer(dtype=dtype))
    cache = tower.requires_grad_(False).run([[5, 9, 250, 3], [4]])
    adapters.add_adapters(denoiser, lora, seed=seed)
    return denoiser, cache


def velocity(denoiser: Cosmos3Denoiser, cache: PromptCache, which: adapters.Weights) -> Tensor:
    x = torch.randn(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    with adapters.weights(denoiser, which):
        return denoiser(x, torch.tensor([0.8, 0.2]), cache)


def trainable(denoiser: Cosmos3Denoiser) -> set[str]:
    return {name for name, parameter in denoiser.named_parameters() if parameter.requires_grad}


def move_policy(denoiser: Cosmos3Denoiser, by: float = 0.1) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(adapters.policy_parameters(denoiser).values()):
            parameter += by * (i + 1)


def test_all_three_are_the_base_at_the_start() -> None:
    tower, plain = split(build_transformer())
    cache = tower.run([[5, 9, 250, 3], [4]])
    denoiser, _ = adapted()
    x = torch.randn(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    base = plain(x, torch.tensor([0.8, 0.2]), cache)
    for which in ("policy", "old", "reference"):
        assert torch.equal(velocity(denoiser, cache, which), base)  # type: ignore[arg-type]


def test_names_are_the_same_for_both_and_those_of_diffusers() -> None:
    denoiser, _ = adapted()
    policy, old = adapters.policy_parameters(denoiser), adapters.old_parameters(denoiser)
    assert list(policy) == list(old) == sorted(policy)
    assert list(policy) == [f"layers.{i}.self_attn.{m}.lora_{s}" for i in range(3) for m in ATTENTION for s in "AB"]
    assert policy["layers.0.self_attn.add_k_proj.lora_A"].shape == (2, 30)
    assert policy["layers.0.self_attn.add_k_proj.lora_B"].shape == (24, 2)
    assert all(torch.equal(policy[n], old[n]) and policy[n] is not old[n] for n in policy)


def test_a_moved_policy_differs_from_old_and_from_the_reference() -> None:
    denoiser, cache = adapted()
    reference = velocity(denoiser, cache, "reference")
    move_policy(denoiser)
    assert not torch.allclose(velocity(denoiser, cache, "policy"), reference, atol=1e-4)
    assert torch.equal(velocity(denoiser, cache, "old"), reference)
    adapters.refresh_old(denoiser, 0.0)
    assert torch.equal(velocity(denoiser, cache, "old"), velocity(denoiser, cache, "policy"))
    move_policy(denoiser)
    seen = [velocity(denoiser, cache, which) for which in ("policy", "old", "reference")]  # type: ignore[arg-type]
    assert torch.equal(seen[2], reference)
    assert not any(torch.allclose(seen[i], seen[j], atol=1e-4) for i, j in ((0, 1), (0, 2), (1, 2)))


@given(st.lists(st.sampled_from(["policy", "old", "reference"]), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_no_switching_ever_changes_who_is_trained(order: list[adapters.Weights]) -> None:
    denoiser, _ = adapted()
    expected = {name for name, _ in denoiser.named_parameters() if ".policy." in name}
    assert len(expected) == 24

    def nest(rest: list[adapters.Weights]) -> None:
        assert trainable(denoiser) == expected
        if rest:
            with adapters.weights(denoiser, rest[0]):
                nest(rest[1:])
            assert trainable(denoiser) == expected

    nest(order)
    assert all(layer.active_adapters == ["policy"] for layer in adapters.lora_layers(denoiser).values())
    assert not any(layer.disable_adapters for layer in adapters.lora_layers(denoiser).values())


def test_an_error_inside_restores_what_was_active() -> None:
    denoiser, cache = adapted()
    move_policy(denoiser)
    before = velocity(denoiser, cache, "policy")
    with pytest.raises(KeyError), adapters.weights(denoiser, "reference"):
        raise KeyError
    x = torch.randn(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(denoiser(x, torch.tensor([0.8, 0.2]), cache), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_reach_b_of_every_layer_first_and_a_after_one_update(dtype: torch.dtype) -> None:
    denoiser, cache = adapted(dtype=dtype)
    policy = adapters.policy_parameters(denoiser)
    optimizer = torch.optim.AdamW(policy.values(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        loss = (velocity(denoiser, cache, "policy") - 1.0).square().mean()
        # Forwards of the others between forward and backward take nothing away.
        with torch.no_grad():
            velocity(denoiser, cache, "old")
            velocity(denoiser, cache, "reference")
        loss.backward()
        moved = {name for name, p in policy.items() if p.grad is not None and p.grad.abs().max() > 0}
        assert moved == {name for name in policy if step == 1 or name.endswith("lora_B")}
        optimizer.step()
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in policy.values())
    assert all(p.grad is None for name, p in denoiser.named_parameters() if ".policy." not in name)


def test_training_leaves_base_and_old_bit_for_bit() -> None:
    denoiser, cache = adapted()
    kept = {n: p.detach().clone() for n, p in denoiser.named_parameters() if ".policy." not in n}
    optimizer = torch.optim.AdamW([p for p in denoiser.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        velocity(denoiser, cache, "policy").square().mean().backward()
        optimizer.step()
    assert all(torch.equal(denoiser.get_parameter(n), value) for n, value in kept.items())


@pytest.mark.parametrize("eta", [0.0, 0.25, 0.999])
def test_old_keeps_its_share(eta: float) -> None:
    denoiser, _ = adapted()
    policy, old = adapters.policy_parameters(denoiser), adapters.old_parameters(denoiser)
    with torch.no_grad():
        for mine, other in zip(policy.values(), old.values(), strict=True):
            mine.fill_(0.3)
            other.fill_(-0.7)
    adapters.refresh_old(denoiser, eta)
    for mine, other in zip(policy.values(), old.values(), strict=True):
        torch.testing.assert_close(other, torch.full_like(other, eta * -0.7 + (1 - eta) * 0.3))
        assert eta > 0 or torch.equal(mine, other)
        assert mine.requires_grad
        assert not other.requires_grad


@pytest.mark.parametrize("eta", [-0.1, 1.0, float("nan")])
def test_a_share_outside_its_range_is_refused(eta: float) -> None:
    with pytest.raises(ValueError, match="kept share"):
        adapters.refresh_old(adapted()[0], eta)


def test_the_start_is_a_function_of_seed_and_name_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, again = adapted()[0], adapted(Lora(rank=2, alpha=4.0, targets=["add_q_proj"]))[0]
    other = adapted(seed=2)[0]
    assert torch.equal(torch.random.get_rng_state(), state)
    name = "layers.1.self_attn.add_q_proj.lora_A"
    a, b, c = (adapters.policy_parameters(d)[name] for d in (first, again, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, adapters.policy_parameters(first)["layers.0.self_attn.add_q_proj.lora_A"])


@pytest.mark.parametrize(("init", "spread"), [("gaussian", 1 / 64), ("kaiming", 30**-0.5 / 3**0.5)])
def test_the_two_starts_have_their_spread(init: str, spread: float) -> None:
    denoiser, _ = adapted(Lora(rank=64, alpha=32.0, init=init, targets=["add_q_proj"]))  # type: ignore[arg-type]
    parameters = adapters.policy_parameters(denoiser)
    values = torch.cat([p.detach().flatten() for name, p in parameters.items() if name.endswith("lora_A")])
    assert float(values.std()) == pytest.approx(spread, rel=0.05)
    assert all(not p.any() for name, p in parameters.items() if name.endswith("lora_B"))


def test_the_update_is_scaled_by_alpha_over_rank() -> None:
    denoiser, _ = adapted(Lora(rank=4, alpha=16.0, targets=["add_q_proj"]))
    layer = adapters.lora_layers(denoiser)["layers.0.self_attn.add_q_proj"]
    policy = adapters.policy_parameters(denoiser)
    a, b = (policy[f"layers.0.self_attn.add_q_proj.lora_{side}"] for side in "AB")
    with torch.no_grad():
        b.normal_()
    x = torch.randn(5, 30)
    want = x @ (layer.base_layer.weight + 4.0 * b @ a).T
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("targets", "code", "names"),
    [
        (["to_q"], "lora-touches-prompt-encoder", "to_q"),
        (["add_q_proj", "to_k", "nowhere"], "lora-touches-prompt-encoder", "to_k"),
        (["nowhere"], "lora-matches-nothing", "nowhere"),
        (["q_proj"], "lora-matches-nothing", "q_proj"),
        (["gate_proj"], "lora-touches-prompt-encoder", "layers.0.mlp.gate_proj"),
        (["/.*/"], "lora-touches-prompt-encoder", "layers.0.mlp.down_proj"),
        ([r"/layers\.1\..*_proj/"], "lora-touches-prompt-encoder", "layers.1.mlp.down_proj"),
        (["/add_q_proj/"], "lora-matches-nothing", "/add_q_proj/"),
        ([r"/layers\.3\..*add_q_proj/"], "lora-matches-nothing", "layers"),
        (["/(/"], "lora-pattern", "unterminated"),
        (["/proj_in"], "lora-pattern", "end with another"),
        ([], "lora-matches-nothing", "no targets"),
    ],
)
def test_targets_that_bind_nothing_are_refused_with_the_names_that_exist(
    targets: list[str], code: str, names: str
) -> None:
    with pytest.raises(ProfileRefused) as refusal:
        adapted(Lora(rank=2, alpha=4.0, targets=targets))
    assert refusal.value.findings[0].code == code
    assert names in refusal.value.findings[0].message
    assert "add_q_proj" in refusal.value.findings[0].help
    assert len(refusal.value.findings) == max(1, len([t for t in targets if t != "add_q_proj"]))


def test_longer_suffixes_and_other_modules_are_targets_too() -> None:
    denoiser, _ = adapted(Lora(rank=2, alpha=4.0, targets=["0.self_attn.add_q_proj", "mlp_moe_gen.up_proj", "proj_in"]))
    bound = sorted(adapters.lora_layers(denoiser))
    assert bound == [
        "layers.0.mlp_moe_gen.up_proj",
        "layers.0.self_attn.add_q_proj",
        "layers.1.mlp_moe_gen.up_proj",
        "layers.2.mlp_moe_gen.up_proj",
        "proj_in",
    ]


def test_a_regular_expression_selects_whole_names_and_every_target_is_counted() -> None:
    targets = [r"/layers\.[02]\.self_attn\.add_[qk]_proj/", "add_q_proj", "/proj_(in|out)/"]
    denoiser, cache = adapted(Lora(rank=2, alpha=4.0, targets=targets))
    assert sorted(adapters.lora_layers(denoiser)) == [
        "layers.0.self_attn.add_k_proj",
        "layers.0.self_attn.add_q_proj",
        "layers.1.self_attn.add_q_proj",
        "layers.2.self_attn.add_k_proj",
        "layers.2.self_attn.add_q_proj",
        "proj_in",
        "proj_out",
    ]
    assert adapters.adapted_modules(denoiser, targets) == {targets[0]: 4, targets[1]: 3, targets[2]: 2}
    # A module is adapted alike, whichever target selects it.
    plain = adapters.policy_parameters(adapted(Lora(rank=2, alpha=4.0))[0])
    name = "layers.2.self_attn.add_k_proj.lora_A"
    assert torch.equal(adapters.policy_parameters(denoiser)[name], plain[name])
    assert torch.equal(velocity(denoiser, cache, "policy"), velocity(denoiser, cache, "reference"))
    assert adapters.adapted_modules(split(build_transformer())[1], targets) == {}


def test_heads_of_other_modalities_are_no_part_of_the_prompt_encoder() -> None:
    """`audio_proj_in` is in the same checkpoint and in neither tower: a pattern may match it and selects it not."""
    _, denoiser = split(build_transformer(sound_gen=True, sound_dim=6))
    assert adapters.match_targets(denoiser, ["/.*proj_in/"]) == ["proj_in"]


def test_adapters_are_added_once() -> None:
    denoiser, _ = adapted()
    with pytest.raises(ValueError, match="already"):
        adapters.add_adapters(denoiser, LORA, seed=1)


@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_the_norm_of_an_update_is_that_of_the_product_which_is_never_formed(moved: float) -> None:
    """Modules of several shapes: the small base's keys and values are narrower than its queries."""
    denoiser, _ = adapted()
    if moved:
        move_policy(denoiser, moved)
    layers = adapters.lora_layers(denoiser).values()
    assert len({layer.base_layer.weight.shape for layer in layers}) > 1
    pairs = [(layer.lora_B["policy"].weight.detach(), layer.lora_A["policy"].weight.detach()) for layer in layers]
    wanted = sum(float((2.0 * b.double() @ a.double()).square().sum()) for b, a in pairs)
    assert adapters.squared_update(denoiser, "policy") == pytest.approx(wanted, rel=1e-6)
    assert (wanted > 0) is bool(moved)
    assert adapters.squared_update(denoiser, "old") == 0.0
