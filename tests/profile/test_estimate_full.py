"""The estimate where all weights are trained, where an average is kept, and where the prompt encoder comes and goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from nftctl.model import adapters
from nftctl.model.registry import load_family
from nftctl.profile import estimate, estimate_cosmos3, estimate_sd3
from nftctl.profile.artifacts import inspect_base, read_weights
from nftctl.profile.load import Resolved
from nftctl.profile.rules.rule import Facts
from nftctl.roles.build import _prepare_copies
from tests.model.sd3_bases import write_sd3_base
from tests.model.world import read_result, run_world, write_result

from .test_estimate import SHAPES, parts_of, saved_bytes, sd3, tiny

CPU = torch.device("cpu")
WORLD = 2
FULL = ('model.train="full"', "rl.group_size=2", 'model.dtype="bfloat16"', "rl.kl_beta=0.1", "rl.ema_decay=0.9")
COPIES = ["policy", "old", "reference", "EMA"]
PROMPTS = ["a red one", "a blue two"]


def resolved(name: str, folder: str, *sets: str) -> Resolved:
    return tiny(*FULL, *sets) if name == "cosmos3" else sd3(Path(folder) / "base", *FULL, *sets)


def member(rank: int, folder: str) -> None:
    """Bytes of one rank's tensors after an optimizer step, by part."""
    result: dict[str, int] = {}
    for name, base in (("cosmos3", "embedded"), ("sd3", f"{folder}/base")):
        profile = resolved(name, folder).profile
        family: Any = load_family(profile.model, base, name, CPU, unread=True)
        _prepare_copies(family, profile, init_device_mesh("cpu", (WORLD,)), CPU)
        copies = family.denoiser.copies
        optimizer = torch.optim.AdamW(list(copies.parameters.values()))
        x, prompt = torch.randn(family.noise_shape(2)), family.batch(family.encoder.encode(PROMPTS))
        family.denoiser(x, torch.tensor([0.3, 0.6]), prompt).square().mean().backward()
        copies.reduce_and_clip(1.0)
        optimizer.step()
        copies.stepped()
        moments = [v for state in optimizer.state.values() for key, v in state.items() if key != "step"]
        held = {
            "policy": [p.to_local() for p in copies.parameters.values()],
            "old": copies._beside["old"].values(),
            "reference": copies._beside["reference"].values(),
            "EMA": copies._beside["ema"].values(),
            "gradients": [p.grad.to_local() for p in copies.parameters.values()],
            "optimizer": [moment.to_local() for moment in moments],
        }
        result |= {f"{name} {part}": sum(t.nbytes for t in tensors) for part, tensors in held.items()}
        result[f"{name} tensors"] = sum(len(tensors) for tensors in held.values())
        result[f"{name} whole"] = sum(p.numel() for p in copies.parameters.values())
        fp32 = [p for unit in family.denoiser.fp32_modules for p in family.denoiser.get_submodule(unit).parameters()]
        result[f"{name} whole in float32"] = sum(p.numel() for p in fp32)
    write_result(Path(folder), f"rank {rank}", result)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("full")
    write_sd3_base(folder / "base")
    run_world(member, WORLD, folder)
    return str(folder), [read_result(folder, f"rank {rank}") for rank in range(WORLD)]


@pytest.mark.parametrize("name", ["cosmos3", "sd3"])
def test_every_copy_gradient_and_moment_is_counted_as_it_is_held(
    ranks: tuple[str, list[dict[str, Any]]], name: str
) -> None:
    folder, (first, second) = ranks
    parts = parts_of(resolved(name, folder))
    for part in (*COPIES, "gradients", "optimizer"):
        # Uneven tensors leave the first rank more than the last, and no rank more than was said.
        assert parts[part].bytes == first[f"{name} {part}"], part
        assert second[f"{name} {part}"] <= first[f"{name} {part}"]
        assert not parts[part].rough
    assert first[f"{name} tensors"] == 7 * len(read_names(name, folder))
    assert parts["gathered base"].bytes == 2 * (first[f"{name} whole"] + first[f"{name} whole in float32"])
    assert not {"LoRA", "base shard"} & parts.keys()


def read_names(name: str, folder: str) -> list[str]:
    if name == "cosmos3":
        return [n for n in SHAPES if estimate_cosmos3.in_denoiser(n)]
    return [n for n in read_weights(Path(folder) / "base" / "transformer").shapes if n != "pos_embed.pos_embed"]


@pytest.mark.parametrize(
    ("sets", "missing"),
    [
        (("rl.kl_beta=0",), {"reference"}),
        (("rl.ema_decay=0",), {"EMA"}),
        (("rl.old.build_old=false",), {"old"}),
    ],
)
def test_a_copy_that_is_not_kept_is_not_counted(sets: tuple[str, ...], missing: set[str]) -> None:
    assert set(COPIES) - parts_of(tiny(*FULL, *sets)).keys() == missing


def test_the_largest_unit_is_whole_while_its_gradient_is_reduced() -> None:
    family = load_family(tiny().profile.model, "embedded", "cosmos3", CPU)
    layer = sum(p.numel() for p in family.denoiser.layers[0].parameters())  # type: ignore[index, union-attr]
    assert parts_of(tiny(*FULL))["reduction"].bytes == layer * (2 + 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_of_a_full_backward_are_what_autograd_saves(dtype: str) -> None:
    profile = tiny(f'model.dtype="{dtype}"').profile
    family: Any = load_family(profile.model, "embedded", "cosmos3", CPU)
    family.denoiser.requires_grad_(True)
    prompt = family.batch(family.encoder.encode(["a red seven"] * 3))
    measured = saved_bytes(family, torch.randn(3, 3, 1, 8, 8), prompt, [prompt.keys, prompt.values])
    size = estimate_cosmos3.geometry(SHAPES, inspect_base("embedded").transformer_config(), profile.model, 1)
    assert size is not None
    item = 2 if dtype == "bfloat16" else 4
    assert 3 * estimate_cosmos3.saved_activations(size, None, 16, item, prompt.lengths[0]) == measured


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["sd3", "sd35"])
def test_activations_of_a_full_backward_of_blocks(tmp_path: Path, variant: str, dtype: str) -> None:
    folder = write_sd3_base(tmp_path, variant)
    profile = sd3(folder, f'model.dtype="{dtype}"').profile
    family: Any = load_family(profile.model, str(folder), "sd3", CPU)
    family.denoiser.requires_grad_(True)
    prompt = family.batch(family.encoder.encode(["a", "bb", "c"]))
    measured = saved_bytes(family, torch.randn(family.noise_shape(3)), prompt, [prompt.embeds, prompt.pooled])
    base, shapes = inspect_base(str(folder)), read_weights(folder / "transformer").shapes
    size = estimate_sd3.geometry(shapes, base.transformer_config(), profile.model, 8, estimate_sd3.clip_tokens(base))
    assert size is not None
    claimed = 3 * estimate_sd3.saved_activations(size, None, 32, 2 if dtype == "bfloat16" else 4)
    assert 0.98 * measured <= claimed <= 1.02 * measured


def test_a_full_backward_keeps_more_than_an_adapter_s() -> None:
    adapter, full = parts_of(tiny()), parts_of(tiny('model.train="full"'))
    assert full["activations"].bytes > adapter["activations"].bytes
    assert full["prompt encoder"] == adapter["prompt encoder"]


def test_an_average_is_a_third_adapter() -> None:
    profile = tiny("rl.ema_decay=0.9").profile
    family = load_family(profile.model, "embedded", "cosmos3", CPU)
    adapters.add_adapters(family.denoiser, profile.model.lora, seed=0, ema=True)
    held = sum(p.nbytes for name, p in family.denoiser.named_parameters() if "lora_" in name)
    part, two = parts_of(tiny("rl.ema_decay=0.9"))["LoRA"], parts_of(tiny())["LoRA"]
    assert part.bytes == held
    assert 2 * part.bytes == 3 * two.bytes
    assert part.how.startswith("policy, old and EMA, ")
    assert two.how.startswith("policy and old, ")


# -- a prompt encoder that comes and goes ---------------------------------------------------------------------------


def memory(*sets: str) -> estimate.Memory:
    facts = Facts(tiny(*sets))
    assert facts.contract is not None
    found = estimate.estimate(facts.profile, facts.base, facts.weights, facts.contract, ["a"])
    assert found is not None
    return found


@pytest.mark.parametrize("home", ["offload", "per-step"])
def test_a_tower_that_comes_unit_by_unit_takes_the_room_of_the_largest(home: str) -> None:
    resident, away = memory(), memory(f'model.prompt_encoder="{home}"', 'grid.device="auto"')
    before, after = ({part.name: part for part in found.parts} for found in (resident, away))
    tower: Any = load_family(tiny().profile.model, "embedded", "cosmos3", CPU).encoder
    units = [sum(p.nbytes for p in unit.parameters()) for unit in tower.tower.units]
    assert before["prompt encoder"].bytes == sum(units)
    assert after["prompt encoder"].bytes == max(units) < sum(units)
    assert "one layer or the embedding at a time" in after["prompt encoder"].how
    assert after["prompt encoder"].when == "encoding"
    assert after["gathered base"].when == "always"
    others = before.keys() - {"prompt encoder"}
    assert {name: before[name].bytes for name in others} == {name: after[name].bytes for name in others}
    assert away.always == resident.always - sum(units)
    assert away.peak == resident.peak - sum(units)  # of this base training is the fullest phase by far


@pytest.mark.parametrize(("vocabulary", "largest"), [(3, 2 * 16), (100, 100 * 4)])
def test_the_largest_unit_of_a_tower_is_a_layer_or_the_embedding(vocabulary: int, largest: int) -> None:
    shapes = {
        "embed_tokens.weight": (vocabulary, 4),
        "layers.0.self_attn.to_q.weight": (4, 4),
        "layers.0.self_attn.to_k.weight": (4, 4),
        "layers.0.self_attn.add_q_proj.weight": (99, 99),
        "layers.1.self_attn.to_q.weight": (99, 99),  # the last layer leaves keys and values alone
        "layers.1.self_attn.to_k.weight": (4, 4),
        "lm_head.weight": (99, 99),
    }
    assert estimate_cosmos3.largest_encoder_unit(shapes, "bfloat16") == 2 * largest
    assert estimate_cosmos3.largest_encoder_unit(shapes, "float32") == 4 * largest


@pytest.mark.parametrize("home", ["offload", "per-step"])
def test_encoders_that_come_whole_share_their_room_with_the_gathered_base(tmp_path: Path, home: str) -> None:
    base = write_sd3_base(tmp_path)
    before = parts_of(sd3(base))["prompt encoder"]
    after = parts_of(sd3(base, f'model.prompt_encoder="{home}"', 'grid.device="auto"'))["prompt encoder"]
    assert (after.bytes, after.when, before.when) == (before.bytes, "encoding", "always")
    assert after.how.startswith("whole on each rank, ")


def test_an_encoder_that_is_larger_than_all_that_follows_is_the_peak() -> None:
    parts = (
        estimate.Part("prompt encoder", 100, "encoding", ""),
        estimate.Part("gathered base", 40, "rollout and training", ""),
        estimate.Part("decode", 10, "rollout", ""),
        estimate.Part("activations", 30, "training", ""),
        estimate.Part("base shard", 5, "always", ""),
    )
    assert estimate.Memory(parts).peak == 105
    assert estimate.Memory(parts[1:]).peak == 75
    assert estimate.Memory(parts[1:3]).peak == 50


def test_where_ranks_compute_in_host_memory_offloading_frees_none() -> None:
    offload = memory('model.prompt_encoder="offload"', 'grid.device="cpu"')
    assert offload.peak == memory().peak
    (encoder,) = (part for part in offload.parts if part.name == "prompt encoder")
    assert (encoder.when, encoder.how) == ("always", "whole on each rank, float32; otherwise in host memory")
    assert memory('model.prompt_encoder="per-step"', 'grid.device="cpu"').peak < offload.peak
