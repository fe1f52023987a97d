"""FSDP2 over the denoiser in real gloo worlds: what is sharded, what is gathered, and that nothing else changes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from nftctl.model import adapters, shard
from nftctl.model.cosmos3 import split
from nftctl.model.cosmos3_denoiser import Cosmos3Denoiser
from nftctl.model.cosmos3_encoder import PromptCache
from nftctl.profile.schema import Lora

from .bases import build_transformer
from .world import read_result, run_world, write_result

LORA = Lora(rank=2, alpha=4.0)
TARGETS = 3 * 4
UNITS = 5  # time embedder, three layers, root
WORLD = 4
CASES = {
    "one": (1, "auto", "float32"),
    "one in half": (1, "auto", "bfloat16"),
    "two": (2, "auto", "bfloat16"),
    "two resharding": (2, "reshard", "float32"),
    "four": (4, "gather-once", "float32"),
    "four resharding": (4, "reshard", "bfloat16"),
    "two by two": (4, "gather-once", "float32"),
    "two by two resharding": (4, "reshard", "bfloat16"),
}
GROUPED = {"two by two": 2, "two by two resharding": 2}
"""Cases whose ranks shard in groups of so many."""
PROMPTS = [[5, 9, 250, 3], [4], [299, 0, 13]]


def fresh(dtype: torch.dtype) -> tuple[Cosmos3Denoiser, PromptCache]:
    """An adapted denoiser whose old already differs from its policy, and the prompts of a batch."""
    tower, denoiser = split(build_transformer(dtype=dtype))
    cache = tower.requires_grad_(False).run(PROMPTS)
    adapters.add_adapters(denoiser, LORA, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapters.policy_parameters(denoiser).items():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.05, generator=generator)
    return denoiser, cache


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(3, 3, 1, 6, 4, generator=generator), torch.tensor([0.9, 0.5, 0.1])


def rollout(denoiser: Cosmos3Denoiser, cache: PromptCache, rank: int) -> Tensor:
    """Two forwards of the old weights and one of the reference, without gradients."""
    outputs = []
    with torch.no_grad():
        for which in ("old", "old", "reference"):
            with adapters.weights(denoiser, which):  # type: ignore[arg-type]
                outputs.append(denoiser(*batch(rank), cache))
    return torch.stack(outputs)


def train(denoiser: Cosmos3Denoiser, cache: PromptCache, rank: int) -> dict[str, Tensor]:
    """Two accumulated backwards, with a forward of old between forward and backward; gradients by name."""
    for _ in range(2):
        with adapters.weights(denoiser, "policy"):
            velocity = denoiser(*batch(rank), cache)
        with torch.no_grad(), adapters.weights(denoiser, "old"):
            target = denoiser(*batch(rank), cache)
        (velocity - target - 1.0).square().mean().backward()
    return {n: p.grad.clone() for n, p in adapters.policy_parameters(denoiser).items() if p.grad is not None}


def collectives(recorded: profile) -> Counter[str]:
    """torch's own record of collectives, by kind."""
    kinds: Counter[str] = Counter()
    # The raw events: the parsed ones cost four times the whole case.
    for event in recorded.profiler.kineto_results.events():
        name = event.name().replace("allgather", "all_gather")
        for kind in ("all_gather", "all_reduce", "reduce_scatter"):
            kinds[kind] += name.startswith("gloo:") and kind in name
    return kinds


def member(rank: int, folder: str) -> None:
    """Every case in turn, each in the part of this world that has its size; results go to `folder`."""
    for name, (size, policy, dtype) in CASES.items():
        mesh = init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("apart", "together"))["together"]
        if name in GROUPED:
            mesh = shard.make_mesh("cpu", WORLD, GROUPED[name])
        write_result(Path(folder), f"{name} {rank}", run_case(mesh, policy, getattr(torch, dtype)))


def run_case(mesh: DeviceMesh, policy: str, dtype: torch.dtype) -> dict[str, Any]:
    rank = dist.get_rank() if mesh.ndim > 1 else mesh.get_local_rank()
    denoiser, cache = fresh(dtype)
    shard.shard_denoiser(denoiser, mesh, policy)
    result: dict[str, Any] = {"policy": denoiser.sharding.policy if denoiser.sharding else ""}
    result["local"] = {n: p.to_local().numel() for n, p in denoiser.named_parameters() if isinstance(p, DTensor)}
    result["replicated"] = {n: str(p.dtype) for n, p in denoiser.named_parameters() if not isinstance(p, DTensor)}
    counts = [shard.gathers(denoiser)]
    policy_parameters = adapters.policy_parameters(denoiser)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        shard.gather(denoiser)
        shard.gather(denoiser)
        counts.append(shard.gathers(denoiser))
        result["rollout"] = rollout(denoiser, cache, rank)
        counts.append(shard.gathers(denoiser))
        result["own_grads"] = train(denoiser, cache, rank)
        counts.append(shard.gathers(denoiser))
        shard.reduce_gradients(policy_parameters.values(), None if mesh.ndim > 1 else mesh.get_group())
    result["recorded"] = dict(collectives(recorded))
    result["mean_grads"] = {n: p.grad.clone() for n, p in policy_parameters.items() if p.grad is not None}
    torch.optim.SGD(policy_parameters.values(), lr=0.1).step()
    with torch.no_grad():
        result["after_step"] = denoiser(*batch(rank), cache)
    counts.append(shard.gathers(denoiser))
    shard.release(denoiser)
    result["sharded_again"] = all(isinstance(p, DTensor) for n, p in denoiser.named_parameters() if "lora_" not in n)
    result["counts"] = counts
    result["received"] = shard.received(denoiser)
    return result


def alone(size: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """What each rank has to see, from a denoiser that was never sharded."""
    results = []
    for rank in range(size):
        denoiser, cache = fresh(dtype)
        results.append({"rollout": rollout(denoiser, cache, rank), "own_grads": train(denoiser, cache, rank)})
    mean = {n: torch.stack([r["own_grads"][n] for r in results]).mean(0) for n in results[0]["own_grads"]}
    for rank, result in enumerate(results):
        denoiser, cache = fresh(dtype)
        with torch.no_grad():
            for name, parameter in adapters.policy_parameters(denoiser).items():
                parameter -= 0.1 * mean[name]
            result["after_step"] = denoiser(*batch(rank), cache)
        result["mean_grads"] = mean
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("world")
    run_world(member, WORLD, folder)
    return {name: [read_result(folder, f"{name} {rank}") for rank in range(WORLD)] for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_denoiser_is_the_whole_one(results: dict[str, list[dict[str, Any]]], case: str) -> None:
    size, _, dtype = CASES[case]
    want = alone(size, getattr(torch, dtype))
    for rank, seen in enumerate(results[case]):
        mine = want[rank % size]
        assert torch.equal(seen["rollout"], mine["rollout"])
        assert len(seen["own_grads"]) == 2 * TARGETS
        for name, grad in mine["own_grads"].items():
            assert grad.dtype == torch.float32
            assert grad.abs().max() > 0
            assert torch.equal(seen["own_grads"][name], grad)
            torch.testing.assert_close(seen["mean_grads"][name], mine["mean_grads"][name], rtol=1e-6, atol=1e-8)
            assert torch.equal(seen["mean_grads"][name], results[case][0]["mean_grads"][name])
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        torch.testing.assert_close(seen["after_step"], mine["after_step"], rtol=tolerance, atol=tolerance)
        assert not torch.equal(seen["after_step"], seen["rollout"][0])
        assert seen["sharded_again"]


@pytest.mark.parametrize("case", CASES)
def test_the_base_is_sharded_whole_and_the_adapters_are_replicated(
    results: dict[str, list[dict[str, Any]]], case: str
) -> None:
    size = GROUPED.get(case, CASES[case][0])
    denoiser, _ = fresh(torch.float32)
    base = {n: p.numel() for n, p in denoiser.named_parameters() if "lora_" not in n}
    for seen in results[case]:
        assert seen["local"].keys() == base.keys()
        assert len(seen["replicated"]) == 2 * 2 * TARGETS
        assert set(seen["replicated"].values()) == {"torch.float32"}
    for name, whole in base.items():
        for first in range(0, len(results[case]), size):
            assert sum(seen["local"][name] for seen in results[case][first : first + size]) == whole


def test_uneven_sizes_leave_a_shorter_last_shard(results: dict[str, list[dict[str, Any]]]) -> None:
    # 30 rows over 4 ranks.
    assert [seen["local"]["norm_moe_gen.weight"] for seen in results["four"]] == [8, 8, 8, 6]


@pytest.mark.parametrize("case", CASES)
def test_all_gathers_are_counted_as_torch_records_them(results: dict[str, list[dict[str, Any]]], case: str) -> None:
    size, policy, _ = CASES[case]
    for seen in results[case]:
        start, gathered, rolled, trained, stepped = seen["counts"]
        assert start == 0
        assert seen["recorded"]["all_gather"] == trained
        assert seen["recorded"]["reduce_scatter"] == 0
        assert seen["recorded"]["all_reduce"] == 1
        assert seen["policy"] == ("reshard" if policy == "reshard" else "gather-once")
        if size == 1:
            assert stepped == 0
        elif policy != "reshard":
            assert (gathered, rolled, trained, stepped) == (UNITS,) * 4
        else:
            # Three forwards; then four more and, backwards, at least every layer twice.
            assert (gathered, rolled) == (0, 3 * UNITS)
            assert trained >= rolled + 4 * UNITS + 2 * 3


@pytest.mark.parametrize(("case", "size"), [("four", 4), ("two by two", 2)])
def test_what_is_gathered_comes_from_the_shard_group_alone(
    results: dict[str, list[dict[str, Any]]], case: str, size: int
) -> None:
    denoiser, _ = fresh(torch.float32)
    base = [tuple(p.shape) for n, p in denoiser.named_parameters() if "lora_" not in n]
    rows = [-(-shape[0] // size) * math.prod(shape[1:]) for shape in base]  # of each other rank, filled up
    assert {seen["received"] for seen in results[case]} == {(size - 1) * 4 * sum(rows)}


def test_shard_groups_change_no_bit(results: dict[str, list[dict[str, Any]]]) -> None:
    for grouped, plain in (("two by two", "four"), ("two by two resharding", "four resharding")):
        for mine, theirs in zip(results[grouped], results[plain], strict=True):
            for what in ("rollout", "own_grads", "mean_grads", "after_step"):
                pairs = [(mine[what], theirs[what])]
                if isinstance(mine[what], dict):
                    pairs = [(mine[what][name], theirs[what][name]) for name in theirs[what]]
                assert all(torch.equal(one, other) for one, other in pairs)


def test_ranks_that_are_no_whole_number_of_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="4 ranks are no whole number of shard groups of 3"):
        shard.make_mesh("cpu", 4, 3)


def test_an_unsharded_denoiser_gathers_nothing() -> None:
    denoiser, _ = fresh(torch.float32)
    shard.gather(denoiser)
    shard.release(denoiser)
    assert shard.gathers(denoiser) == 0


def test_an_unknown_memory_policy_is_refused() -> None:
    denoiser, _ = fresh(torch.float32)
    with pytest.raises(ValueError, match="auto, gather-once, reshard or replicate-base"):
        shard.shard_denoiser(denoiser, None, "replicate")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "beside", "expected"),
    [(20, 0, "gather-once"), (19, 0, "reshard"), (22, 2, "gather-once"), (21, 2, "reshard")],
)
def test_auto_gathers_where_half_of_what_is_free_holds_the_base(
    monkeypatch: pytest.MonkeyPatch, free: int, beside: int, expected: str
) -> None:
    """In tenths of the base: of half of the free memory, less what lies there beside it, all ten have to fit."""

    class Mesh:
        device_type, ndim = "cuda", 0

    layer = torch.nn.Linear(100, 10, bias=False)
    tenth = layer.weight.nbytes // 10
    monkeypatch.setattr(shard, "GATHERED_SHARE", 0.5)
    monkeypatch.setattr(shard, "_device", lambda mesh: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * tenth, 100 * tenth))
    chosen = shard.choose_policy(layer, Mesh(), "auto", beside=beside * tenth)  # type: ignore[arg-type]
    assert chosen == expected
    assert shard.choose_policy(layer, Mesh(), "reshard") == "reshard"  # type: ignore[arg-type]
