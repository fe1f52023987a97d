"""The estimate against the model itself: parameters counted, and activations weighed while autograd saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from nftctl.model import adapters, cosmos3_encoder
from nftctl.model.registry import load_family
from nftctl.profile import estimate, estimate_cosmos3, estimate_sd3
from nftctl.profile.adapter import adapted, adapter_numbers, denoiser_modules
from nftctl.profile.artifacts import inspect_base, read_weights
from nftctl.profile.load import Resolved, bundled_profiles, load_profile
from nftctl.profile.rules.rule import Facts
from nftctl.profile.t2i import COSMOS3_LORA, SD3_LORA, T2I_PROFILES

from .conftest import HEADS, HIDDEN, INNER

TINY = T2I_PROFILES["tiny_t2i_cpu"]
SHAPES = read_weights(inspect_base("embedded").folder / "transformer").shapes


def tiny(*sets: str) -> Resolved:
    return load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, env={})


def parts_of(resolved: Resolved, prompts: list[str] | None = None) -> dict[str, estimate.Part]:
    facts = Facts(resolved)
    assert facts.contract is not None
    found = estimate.estimate(resolved.profile, facts.base, facts.weights, facts.contract, prompts or ["a b"])
    assert found is not None
    return {part.name: part for part in found.parts}


@pytest.fixture(scope="module")
def family() -> Any:
    return load_family(tiny().profile.model, "embedded", "cosmos3", torch.device("cpu"))


def test_the_towers_are_split_by_name_as_the_model_splits_them(family: Any) -> None:
    denoiser = {name for name, _ in family.denoiser.named_parameters()}
    tower = {name for name, _ in family.encoder.tower.named_parameters()}
    assert {name for name in SHAPES if estimate_cosmos3.in_denoiser(name)} == denoiser
    assert {name for name in SHAPES if estimate_cosmos3.in_prompt_encoder(name, 4)} == tower
    linear = {n for n, m in family.denoiser.named_modules() if isinstance(m, torch.nn.Linear)}
    assert set(denoiser_modules(SHAPES, COSMOS3_LORA)) == linear


def test_weights_are_counted_as_they_are_held(family: Any) -> None:
    parts = parts_of(tiny())
    whole = sum(p.nbytes for p in family.denoiser.parameters())
    assert parts["gathered base"].bytes == whole
    assert parts["prompt encoder"].bytes == sum(p.nbytes for p in family.encoder.tower.parameters())
    # Four ranks: every tensor is cut along its first dimension, the last shard padded.
    assert whole / 4 <= parts["base shard"].bytes <= whole / 4 * 1.02
    # 16 x (in + out) of four modules in four layers, twice
    assert parts["LoRA"].bytes == 2 * 4 * 4 * 16 * (2 * (96 + 96) + 2 * (96 + 48))
    assert parts["optimizer"].bytes == parts["gradients"].bytes == parts["LoRA"].bytes
    assert parts["decoder"].bytes == 0


def test_a_bfloat16_base_keeps_its_time_embedder_in_float32(family: Any) -> None:
    full = sum(p.numel() for p in family.denoiser.parameters())
    embedder = sum(p.numel() for p in family.denoiser.time_embedder.parameters())
    assert parts_of(tiny('model.dtype="bfloat16"'))["gathered base"].bytes == 2 * full + 2 * embedder


def test_layer_by_layer_holds_two_units(family: Any) -> None:
    layer = sum(p.nbytes for p in family.denoiser.layers[0].parameters())
    assert parts_of(tiny('model.shard="reshard"'))["gathered base"].bytes == 2 * layer


def saved_bytes(family: Any, x: torch.Tensor, prompt: Any, given: list[torch.Tensor]) -> int:
    """What autograd keeps of one forward beside the weights and what was given: storages, each once."""
    held = {tensor.untyped_storage().data_ptr() for tensor in [*family.denoiser.parameters(), *given]}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        family.denoiser(x, torch.rand(len(x)), prompt)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "targets",
    [
        ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"],
        ["add_v_proj"],
        ["to_add_out", "mlp_moe_gen.up_proj", "mlp_moe_gen.gate_proj", "mlp_moe_gen.down_proj"],
    ],
)
def test_saved_activations_are_what_autograd_saves(dtype: str, targets: list[str]) -> None:
    profile = tiny(f'model.dtype="{dtype}"', f"model.lora.targets={json.dumps(targets)}").profile
    family = load_family(profile.model, "embedded", "cosmos3", torch.device("cpu"))
    adapters.add_adapters(family.denoiser, profile.model.lora, seed=0)
    samples = 3
    prompt = family.batch(family.encoder.encode(["a red seven"] * samples))
    given = torch.randn(samples, 3, 1, 8, 8), prompt, [prompt.keys, prompt.values]
    measured = saved_bytes(family, *given)
    family.denoiser.gradient_checkpointing = True
    inputs = saved_bytes(family, *given)
    size = estimate_cosmos3.geometry(SHAPES, inspect_base("embedded").transformer_config(), profile.model, 1)
    assert size is not None
    modules = adapted(targets, denoiser_modules(SHAPES, COSMOS3_LORA))
    item = 2 if dtype == "bfloat16" else 4
    asked = size, modules, 16, item, prompt.lengths[0]
    # An adapter is cast to the base's precision once a batch, whatever its size.
    cast = 2 * adapter_numbers(modules, 16) if item == 2 else 0
    claimed = samples * estimate_cosmos3.saved_activations(*asked) + cast
    # What layers before the first adapter keep is not needed by any backward, and is counted all the same.
    assert 0.98 * measured <= claimed <= 1.1 * measured
    # Inputs of all layers, and what one of the four keeps while it runs again.
    claimed = samples * estimate_cosmos3.saved_activations(*asked, checkpointing=True) + cast // 4
    ends = inputs - samples * 4 * size.tokens * size.hidden * item
    held = inputs + (measured - ends) / 4
    assert 0.98 * held <= claimed <= 1.1 * held


def test_micro_batches_guidance_and_images_move_what_they_should() -> None:
    whole, small = parts_of(tiny()), parts_of(tiny("model.train_micro_batch=1", "model.rollout_micro_batch=1"))
    pairs = tiny().profile.data.rows_per_step * tiny().profile.rl.timesteps_per_sample
    assert whole["activations"].bytes == pairs * small["activations"].bytes
    rows = tiny().profile.data.rows_per_step
    assert whole["decode"].bytes == rows * small["decode"].bytes
    both, one = (parts_of(tiny(f"rl.guidance={g}", "model.train_micro_batch=1"))["prompt cache"].bytes for g in (3, 1))
    assert both > one
    assert {name for name, part in whole.items() if part.bytes != small[name].bytes} == {
        "activations", "decode", "latents", "prompt cache",
    }  # fmt: skip
    saving = parts_of(tiny("model.gradient_checkpointing=true"))
    assert {name for name, part in whole.items() if part.bytes != saving[name].bytes} == {"activations"}
    assert saving["activations"].bytes < whole["activations"].bytes / 2
    assert "run again" in saving["activations"].how


def test_the_peak_is_the_fuller_phase() -> None:
    facts = Facts(tiny())
    found = estimate.estimate(facts.profile, facts.base, facts.weights, TINY, ["a"])
    assert found is not None
    by = {when: sum(p.bytes for p in found.parts if p.when == when) for when in ("always", "rollout", "training")}
    assert found.always == by["always"]
    assert found.peak == by["always"] + max(by["rollout"], by["training"])
    assert by["training"] > by["rollout"] > 0


def test_the_prompt_cache_stops_where_the_encoder_stops() -> None:
    assert estimate.PROMPT_CACHE_BYTES == cosmos3_encoder.CACHE_BYTES
    long = ["x" * 3_000_000 + str(n) for n in range(6)]
    held = parts_of(tiny(), long)["prompt cache"].bytes
    per_token = 2 * 4 * 48 * 4
    batch = tiny().profile.data.rows_per_step * tiny().profile.rl.timesteps_per_sample
    assert held == estimate.PROMPT_CACHE_BYTES + batch * per_token * (1_000_001 + 2)
    assert parts_of(tiny(), ["abc", "abc"])["prompt cache"].bytes == (1 + batch) * per_token * 3


def test_a_base_with_a_vae(load: Callable[..., Resolved]) -> None:
    """By hand: two layers, 512 x 512, a VAE of 16 pixels per latent whose last layers have 20 channels at half size."""
    config = {"scale_factor_spatial": 16, "base_dim": 10, "decoder_base_dim": 20, "patch_size": 2}
    Path("base/vae/config.json").write_text(json.dumps(config))
    parts = parts_of(load({"model.decode_dtype": "bfloat16"}))
    assert parts["activations"].how.startswith("4 x 256 tokens")
    latent = 16 * 32 * 32
    assert parts["latents"].bytes == 4 * latent * (4 + 4 * (1 + 4) + (20 + 4) * 4)
    assert parts["decode"].bytes == 4 * 512 * 512 * (4 * 20 // 4 * 2 + 3 * (2 + 4 + 4 + 1))
    denoiser = 2 * (2 * HIDDEN * HIDDEN + 2 * HEADS * HIDDEN + 4 + 3 * INNER * HIDDEN) + 2 * prod((64, HIDDEN))
    assert parts["gathered base"].bytes == 2 * denoiser


@pytest.mark.parametrize("config", ["{}", '{"latent_channel": "many", "latent_patch_size": 2}', "["])
def test_without_a_geometry_nothing_is_guessed(load: Callable[..., Resolved], config: str) -> None:
    resolved = load()
    Path("base/transformer/config.json").write_text(config)
    facts = Facts(resolved)
    assert estimate.estimate(facts.profile, facts.base, facts.weights, TINY, []) is None


# -- the other family ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sd3", "sd35"])
def sd3_base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.model.sd3_bases import write_sd3_base

    return write_sd3_base(tmp_path_factory.mktemp(request.param), request.param)


def sd3(base: Path, *sets: str) -> Resolved:
    own = ("rl.group_size=2", f'rl.init_from="{base}"', "model.height=64", "model.width=96", 'model.dtype="float32"')
    return load_profile(bundled_profiles()["sd35m_nft_paper"], sets=[*own, *sets], env={})


def test_parts_of_a_stable_diffusion_base_are_counted_as_they_are_held(sd3_base: Path) -> None:
    resolved = sd3(sd3_base)
    family: Any = load_family(resolved.profile.model, str(sd3_base), "sd3", torch.device("cpu"))
    parts = parts_of(resolved, ["a", "bb", "a"])
    whole = sum(p.nbytes for p in family.denoiser.parameters())
    assert parts["gathered base"].bytes == whole
    assert whole / 2 <= parts["base shard"].bytes <= whole / 2 * 1.02
    encoders = [p for encoder in family.encoder.parts.encoders() for p in encoder.parameters()]
    assert parts["prompt encoder"].bytes == sum(p.nbytes for p in encoders)
    one = family.encoder.encode(["a"])[0].nbytes
    # Two prompts are remembered, and the 48 rows are batched by 16 without guidance and train by 9.
    assert parts["prompt cache"].bytes == (2 + 16) * one
    assert parts["decoder"].bytes == sum(p.nbytes for p in family.decoder.vae.parameters())
    assert parts["latents"].bytes == 4 * 4 * 8 * 12 * (48 + 48 * 9 * (1 + 4) + (10 + 4) * 16)
    # Two at a time: the block before the last leaves four maps of 4 channels at full size.
    assert parts["decode"].bytes == 16 * 64 * 96 * (4 * 4 * 4 + 3 * (4 + 4 + 4 + 1))
    two = parts_of(sd3(sd3_base, 'model.shard="reshard"'))["gathered base"].bytes
    assert two == 2 * sum(p.nbytes for p in family.denoiser.transformer_blocks[0].parameters())
    adapters.add_adapters(family.denoiser, resolved.profile.model.lora, seed=0)
    lora = sum(p.nbytes for name, p in family.denoiser.named_parameters() if "lora_" in name)
    assert parts["LoRA"].bytes == lora


def test_without_t5_its_encoder_is_not_counted(sd3_base: Path) -> None:
    whole, without = parts_of(sd3(sd3_base)), parts_of(sd3(sd3_base, "model.t5=false"))
    t5 = read_weights(sd3_base / "text_encoder_3", "model.safetensors").shapes
    assert whole["prompt encoder"].bytes - without["prompt encoder"].bytes == 4 * sum(map(prod, t5.values()))
    assert {name for name, part in whole.items() if part.bytes != without[name].bytes} == {"prompt encoder"}


JOINT = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


# Blocks keep less before the first adapter than is counted, and here a block is a third of all.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("targets", "most"),
    [
        ([f"attn.{name}" for name in JOINT], 1.1),
        (["to_v"], 1.25),
        (["attn.to_q", "ff.net.0.proj", "ff_context.net.2"], 1.15),
    ],
    ids=["paper", "values", "mlp"],
)
def test_saved_activations_of_blocks_are_what_autograd_saves(
    sd3_base: Path, dtype: str, targets: list[str], most: float
) -> None:
    profile = sd3(sd3_base, f'model.dtype="{dtype}"', f"model.lora.targets={json.dumps(targets)}").profile
    family = load_family(profile.model, str(sd3_base), "sd3", torch.device("cpu"))
    adapters.add_adapters(family.denoiser, profile.model.lora, seed=0)
    prompt: Any = family.batch(family.encoder.encode(["a", "bb", "c"]))
    given = torch.randn(family.noise_shape(3)), prompt, [prompt.embeds, prompt.pooled]
    measured = saved_bytes(family, *given)
    family.denoiser.gradient_checkpointing = True
    inputs = saved_bytes(family, *given)
    base, shapes = inspect_base(str(sd3_base)), read_weights(sd3_base / "transformer").shapes
    size = estimate_sd3.geometry(shapes, base.transformer_config(), profile.model, 8, estimate_sd3.clip_tokens(base))
    assert size is not None
    assert size.prompt == prompt.embeds.shape[1]
    modules = adapted(targets, denoiser_modules(shapes, SD3_LORA))
    item = 2 if dtype == "bfloat16" else 4
    claimed = 3 * estimate_sd3.saved_activations(size, modules, 32, item)
    assert 0.98 * measured <= claimed <= most * measured
    claimed = 3 * estimate_sd3.saved_activations(size, modules, 32, item, checkpointing=True)
    ends = inputs - 3 * size.layers * (size.image + size.prompt) * size.hidden * item
    held = inputs + (measured - ends) / size.layers
    assert 0.98 * held <= claimed <= most * held


def test_slicing_and_tiling_bound_what_is_decoded(sd3_base: Path) -> None:
    plain, sliced = parts_of(sd3(sd3_base)), parts_of(sd3(sd3_base, "model.decode_slicing=true"))
    images = 16 * 64 * 96 * 3 * (4 + 4 + 4 + 1)
    assert plain["decode"].bytes - images == 16 * (sliced["decode"].bytes - images)
    # A tile is 64 pixels a side, an image here 64 x 96.
    tiled = parts_of(sd3(sd3_base, "model.decode_tiling=true"))
    assert 3 * (tiled["decode"].bytes - images) == 2 * (plain["decode"].bytes - images)


def test_both_sides_know_how_many_tokens_t5_makes() -> None:
    from nftctl.model import sd3_encoder

    assert estimate_sd3.T5_TOKENS == sd3_encoder.T5_TOKENS


def test_another_geometry_that_is_not_told_is_not_guessed(sd3_base: Path, tmp_path: Path) -> None:
    import shutil

    base = Path(shutil.copytree(sd3_base, tmp_path / "base"))
    (base / "transformer" / "config.json").write_text('{"_class_name": "SD3Transformer2DModel", "patch_size": 2}')
    facts = Facts(sd3(base))
    assert facts.contract is not None
    assert estimate.estimate(facts.profile, facts.base, facts.weights, facts.contract, []) is None
