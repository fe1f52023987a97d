"""Gradient checkpointing: the same gradients to the bit, less kept, and nothing counted or gathered twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointError

from nftctl.model import adapters, shard
from nftctl.model.copies import copies_of
from nftctl.model.cosmos3 import split
from nftctl.model.family import Denoiser
from nftctl.model.registry import load_family
from nftctl.model.sd3_denoiser import Sd3Denoiser
from nftctl.model.sd3_encoder import PromptEmbeds
from nftctl.profile.schema import Lora, Model

from .bases import build_transformer
from .sd3_bases import SD35, build_sd3, write_sd3_base
from .world import read_result, run_world, write_result

PROMPTS = [[5, 9, 250, 3], [4], [299, 0, 13]]
TARGETS = {
    "cosmos3": ["add_q_proj", "to_add_out", "mlp_moe_gen.up_proj"],
    "sd3": ["attn.to_q", "ff.net.2", "to_add_out"],
}
KINDS = [(family, train) for family in TARGETS for train in ("lora", "full")]
WORLD = 2
POLICIES = ("gather-once", "reshard")


def build(family: str, train: str, dtype: torch.dtype = torch.float32) -> tuple[Denoiser, Any]:
    """A denoiser with something to train, whose adapters already do something, and the prompts of a batch."""
    denoiser: Denoiser
    if family == "cosmos3":
        tower, denoiser = split(build_transformer(dtype=dtype))
        cache: Any = tower.requires_grad_(False).run(PROMPTS)
    else:
        denoiser = Sd3Denoiser(build_sd3(dtype=dtype, **SD35))
        generator = torch.Generator().manual_seed(1)
        parts = torch.randn(3, 9, 32, generator=generator), torch.randn(3, 20, generator=generator)
        cache = PromptEmbeds(*parts)
    if train == "full":
        denoiser.requires_grad_(True)
        return denoiser, cache
    adapters.add_adapters(denoiser, Lora(rank=2, alpha=4.0, targets=TARGETS[family]), seed=1)
    generator = torch.Generator().manual_seed(2)
    for which in (adapters.policy_parameters, adapters.old_parameters):
        for name, parameter in which(denoiser).items():
            if name.endswith("lora_B"):
                parameter.data.normal_(std=0.05, generator=generator)
    return denoiser, cache


def batch(family: str, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    channels = 3 if family == "cosmos3" else 4
    return torch.randn(3, channels, 1, 6, 4, generator=generator), torch.tensor([0.9, 0.5, 0.1])


def gradients(denoiser: Denoiser, cache: Any, family: str, rank: int = 0) -> dict[str, Tensor]:
    """Two accumulated backwards as a step makes them: each inside the policy, a forward of old between the two."""
    copies = copies_of(denoiser)
    shard.release(denoiser)
    # While they are gathered, the parameters of a sharded denoiser are others: the gradients come to the shards.
    trained = {n: p for n, p in denoiser.named_parameters() if p.requires_grad}
    shard.gather(denoiser)
    for _ in range(2):
        with copies.use("policy"):
            denoiser(*batch(family, rank), cache).square().mean().backward()
        if denoiser.copies is None:
            with torch.no_grad(), copies.use("old"):
                denoiser(*batch(family, rank), cache)
    return {n: _whole(p.grad) for n, p in trained.items() if p.grad is not None}


def _whole(grad: Any) -> Tensor:
    whole: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "train"), KINDS)
def test_gradients_and_counts_are_the_same_to_the_bit(family: str, train: str, dtype: torch.dtype) -> None:
    seen = []
    for on in (False, True):
        denoiser, cache = build(family, train, dtype)
        denoiser.gradient_checkpointing = on
        runs: list[int] = []
        denoiser.shard_units()[-1].register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        seen.append((gradients(denoiser, cache, family), denoiser.forwards, len(runs)))
    (want, forwards, once), (got, counted, again) = seen
    assert got.keys() == want.keys()
    assert len(want) > 8
    assert all(torch.equal(got[name], grad) for name, grad in want.items())
    assert any(bool(grad.any()) for grad in want.values())
    # What the backward runs again is no forward of the plan; each of the two did run again.
    assert counted == forwards == 3 * once
    assert again == once + 2


@pytest.mark.parametrize("on", [False, True])
def test_both_families_are_loaded_as_the_profile_says(on: bool, pixel_base: Path, tmp_path: Path) -> None:
    for family, base in (("cosmos3", pixel_base), ("sd3", write_sd3_base(tmp_path))):
        model = Model(height=64, width=64, dtype="float32", gradient_checkpointing=on)
        assert load_family(model, str(base), family, torch.device("cpu")).denoiser.gradient_checkpointing is on


def kept(denoiser: Denoiser, cache: Any, family: str) -> tuple[int, int]:
    """How many tensors autograd keeps of one forward, and the bytes of their storages, each once."""
    held = {p.untyped_storage().data_ptr() for p in denoiser.parameters()}
    count, storages = 0, {}

    def note(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if tensor.untyped_storage().data_ptr() not in held:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        denoiser(*batch(family), cache)
    return count, sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize(("family", "train"), KINDS)
def test_each_layer_keeps_its_input_alone(family: str, train: str) -> None:
    denoiser, cache = build(family, train)
    many, more = kept(denoiser, cache, family)
    denoiser.gradient_checkpointing = True
    few, less = kept(denoiser, cache, family)
    assert few < many / 3
    assert less < more / 3


@pytest.mark.parametrize("family", TARGETS)
def test_without_gradients_nothing_is_kept_or_run_again(family: str) -> None:
    denoiser, cache = build(family, "lora")
    with torch.no_grad():
        want = denoiser(*batch(family), cache)
        denoiser.gradient_checkpointing = True
        assert torch.equal(denoiser(*batch(family), cache), want)
        assert kept(denoiser, cache, family)[0] == 0


def test_a_backward_outside_of_its_weights_fails_and_is_never_another_one_in_silence() -> None:
    """Why the policy role calls backward inside its copy: what is run again is run with the weights in use then."""
    denoiser, cache = build("cosmos3", "lora")
    denoiser.gradient_checkpointing = True
    with adapters.weights(denoiser, "old"):
        with adapters.weights(denoiser, "policy"):
            loss = denoiser(*batch("cosmos3"), cache).square().mean()
        with pytest.raises(CheckpointError, match="different number of tensors"):
            loss.backward()


def member(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for family, train in KINDS:
        for policy in POLICIES:
            for on in (False, True):
                denoiser, cache = build(family, train)
                denoiser.gradient_checkpointing = on
                full = train == "full"
                shard.shard_denoiser(denoiser, mesh, policy, compute=torch.float32 if full else None)
                result: dict[str, Any] = {"grads": gradients(denoiser, cache, family, rank)}
                result |= {"gathers": shard.gathers(denoiser), "forwards": denoiser.forwards}
                write_result(Path(folder), f"{family} {train} {policy} {on} {rank}", result)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpointing")
    run_world(member, WORLD, folder)
    return folder


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("family", "train"), KINDS)
def test_a_sharded_denoiser_recomputes_without_gathering_more(
    worlds: Path, family: str, train: str, policy: str
) -> None:
    for rank in range(WORLD):
        plain, saving = (read_result(worlds, f"{family} {train} {policy} {on} {rank}") for on in (False, True))
        assert plain["grads"].keys() == saving["grads"].keys()
        assert len(plain["grads"]) > 8
        assert all(torch.equal(saving["grads"][name], grad) for name, grad in plain["grads"].items())
        assert saving["forwards"] == plain["forwards"]
        assert saving["gathers"] == plain["gathers"] > 0
        if train == "lora":
            denoiser, cache = build(family, train)
            alone = gradients(denoiser, cache, family, rank)
            assert all(torch.equal(saving["grads"][name], grad) for name, grad in alone.items())
