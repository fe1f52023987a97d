"""All weights trained: copies that follow the policy, exchanged shard by shard, against an unsharded float32 twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from nftctl.model import adapters, shard
from nftctl.model.copies import FullCopies, copies_of
from nftctl.model.cosmos3 import split
from nftctl.profile.schema import Lora

from .bases import build_transformer
from .world import read_result, run_world, write_result

LORA = Lora(rank=2, alpha=4.0)
WORLD = 3  # no width of the small base is a multiple of it: shards are uneven
RATE = 0.05
PROMPTS = [[5, 9, 250, 3], [4], [299, 0, 13]]
POLICIES = ("gather-once", "reshard")


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x, target = (torch.randn(3, 3, 1, 6, 4, generator=generator) for _ in range(2))
    return x, torch.tensor([0.9, 0.5, 0.1]), target


def loss(denoiser: Any, cache: Any, rank: int) -> Tensor:
    x, sigma, target = batch(rank)
    result: Tensor = (denoiser(x, sigma, cache) - target).square().mean()
    return result


def look(denoiser: Any, cache: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = denoiser(*batch(0)[:2], cache)
    return result


def member(rank: int, folder: str) -> None:
    for policy in POLICIES:
        write_result(Path(folder), f"{policy} {rank}", train(rank, policy))
    drifts = {policy: adapted_drift(policy) for policy in ("gather-once", "reshard", "replicate-base")}
    write_result(Path(folder), f"adapters {rank}", drifts)


def adapted_drift(policy: str) -> tuple[float, float]:
    """This rank's part of an adapter's distance to its base, which is whole for now, in shards, or never cut."""
    _, denoiser = split(build_transformer())
    adapters.add_adapters(denoiser, LORA, seed=1)
    shard.shard_denoiser(denoiser, init_device_mesh("cpu", (WORLD,)), policy)
    shard.gather(denoiser)
    with torch.no_grad():
        for parameter in adapters.policy_parameters(denoiser).values():
            parameter += 0.1
    return copies_of(denoiser).drift() or (0.0, 0.0)


def train(rank: int, policy: str) -> dict[str, Any]:
    """Two steps of plain gradient descent in two micro-batches each, and what every copy then computes."""
    tower, denoiser = split(build_transformer())
    cache = tower.requires_grad_(False).run(PROMPTS)
    denoiser.requires_grad_(True)
    shard.shard_denoiser(denoiser, init_device_mesh("cpu", (WORLD,)), policy, compute=torch.float32)
    copies = denoiser.copies = FullCopies(denoiser, old=True, reference=True, ema=True)
    assert copies_of(denoiser) is copies
    optimizer = torch.optim.SGD(copies.parameters.values(), lr=RATE)
    result: dict[str, Any] = {"start": look(denoiser, cache), "norms": []}
    for step in (1, 2):
        for _ in range(2):
            (loss(denoiser, cache, rank) / 2).backward()
        result["norms"].append(copies.reduce_and_clip(1e9))
        optimizer.step()
        optimizer.zero_grad()
        copies.stepped()
        copies.average(0.25)
        if step == 1:
            copies.refresh_old(0.0)
            with copies.use("old"):
                result["old is policy"] = look(denoiser, cache)
            gathers = shard.gathers(denoiser)
            with copies.use("old"):
                look(denoiser, cache)
            result["gathers of a same old"] = shard.gathers(denoiser) - gathers
    result["policy"] = look(denoiser, cache)
    for which in ("old", "reference", "ema"):
        with copies.use(which):  # type: ignore[arg-type]
            result[which] = look(denoiser, cache)
    result["policy again"] = look(denoiser, cache)
    result["drift"] = copies.drift()
    copies.refresh_old(0.5)
    with copies.use("old"):
        result["blend"] = look(denoiser, cache)
    result["state"] = {name: tensor.full_tensor() for name, tensor in copies.state().items()}  # type: ignore[attr-defined]
    shard.release(denoiser)
    result["held"] = sum(p.to_local().numel() for p in denoiser.parameters())  # type: ignore[operator]
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("copies")
    run_world(member, WORLD, folder)
    kinds = (*POLICIES, "adapters")
    return {kind: [read_result(folder, f"{kind} {rank}") for rank in range(WORLD)] for kind in kinds}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same two steps on one whole denoiser, with the ranks' losses averaged by hand."""
    tower, denoiser = split(build_transformer())
    cache = tower.requires_grad_(False).run(PROMPTS)
    denoiser.requires_grad_(True)
    parameters = dict(denoiser.named_parameters())
    base = {name: p.detach().clone() for name, p in parameters.items()}
    weights, ema = [], base
    norms = []
    for _ in range(2):
        denoiser.zero_grad()
        (sum(loss(denoiser, cache, rank) for rank in range(WORLD)) / WORLD).backward()  # type: ignore[union-attr]
        norms.append(float(torch.stack([p.grad.norm() for p in parameters.values() if p.grad is not None]).norm()))
        with torch.no_grad():
            for p in parameters.values():
                p -= RATE * p.grad  # type: ignore[operator]
        weights.append({name: p.detach().clone() for name, p in parameters.items()})
        ema = {name: 0.25 * ema[name] + 0.75 * weights[-1][name] for name in ema}
    blend = {name: 0.5 * weights[0][name] + 0.5 * weights[1][name] for name in base}
    copies = {"reference": base, "old": weights[0], "policy": weights[1], "ema": ema, "blend": blend}
    outputs = {}
    for which, values in copies.items():
        denoiser.load_state_dict(values, strict=False)
        outputs[which] = look(denoiser, cache)
    return {"outputs": outputs, "copies": copies, "norms": norms}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_copy_computes_what_its_unsharded_twin_does(
    ranks: dict[str, list[dict[str, Any]]], alone: dict[str, Any], policy: str
) -> None:
    for result in ranks[policy]:
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for which, expected in alone["outputs"].items():
            torch.testing.assert_close(result[which], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["start"], alone["outputs"]["reference"], rtol=1e-5, atol=1e-6)
    outputs = alone["outputs"]
    assert all(
        float((outputs[a] - outputs[b]).abs().max()) > 1e-3
        for a, b in (("policy", "old"), ("old", "reference"), ("ema", "policy"), ("blend", "old"))
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_exchanging_copies_gives_the_policy_back_to_the_bit(
    ranks: dict[str, list[dict[str, Any]]], policy: str
) -> None:
    for result in ranks[policy]:
        assert torch.equal(result["policy"], result["policy again"])
        assert torch.equal(result["old"], result["old is policy"])


def test_an_old_that_is_the_policy_is_not_exchanged(ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert [result["gathers of a same old"] for result in ranks["gather-once"]] == [0] * WORLD


@pytest.mark.parametrize("policy", POLICIES)
def test_the_saved_state_is_the_copies_and_each_rank_holds_its_share(
    ranks: dict[str, list[dict[str, Any]]], alone: dict[str, Any], policy: str
) -> None:
    saved = ranks[policy][0]["state"]
    expected = {"policy": "policy", "old": "blend", "ema": "ema"}
    names = alone["copies"]["policy"]
    assert set(saved) == {f"{which}.{name}" for which in expected for name in names}
    for which, twin in expected.items():
        for name in names:
            torch.testing.assert_close(saved[f"{which}.{name}"], alone["copies"][twin][name], rtol=1e-4, atol=1e-6)
    total = sum(value.numel() for value in names.values())
    held = [result["held"] for result in ranks[policy]]
    assert sum(held) == total
    assert max(held) < 0.4 * total


@pytest.mark.parametrize("policy", POLICIES)
def test_the_drift_of_all_weights_adds_up_over_the_shards(
    ranks: dict[str, list[dict[str, Any]]], alone: dict[str, Any], policy: str
) -> None:
    moved, base = (sum(result["drift"][part] for result in ranks[policy]) for part in (0, 1))
    reference, trained = (alone["copies"][which] for which in ("reference", "policy"))
    gaps = [float((trained[name] - weight).double().square().sum()) for name, weight in reference.items()]
    assert moved == pytest.approx(sum(gaps), rel=1e-4)
    assert moved > 0
    assert base == pytest.approx(sum(float(w.double().square().sum()) for w in reference.values()), rel=1e-9)


def test_without_a_reference_there_is_no_drift() -> None:
    _, denoiser = split(build_transformer())
    assert FullCopies(denoiser, old=True, reference=False, ema=False).drift() is None


def test_the_drift_of_an_adapter_is_the_same_however_the_base_is_cut(ranks: dict[str, list[dict[str, Any]]]) -> None:
    _, denoiser = split(build_transformer())
    adapters.add_adapters(denoiser, LORA, seed=1)
    moved = base = 0.0
    for layer in adapters.lora_layers(denoiser).values():
        a, b = (side["policy"].weight.detach().double() + 0.1 for side in (layer.lora_A, layer.lora_B))
        moved += float((2.0 * b @ a).square().sum())
        base += float(layer.base_layer.weight.double().square().sum())
    for policy in ("gather-once", "reshard", "replicate-base"):
        parts = [rank[policy] for rank in ranks["adapters"]]
        assert sum(part[0] for part in parts) == pytest.approx(moved, rel=1e-5)
        assert sum(part[1] for part in parts) == pytest.approx(base, rel=1e-12)
