"""The stock forward behind `bench --compare naive`: it is upstream's, it is ours to the last digits, it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from nftctl.errors import UsageRefused
from nftctl.model import naive
from nftctl.model.adapters import add_adapters
from nftctl.model.copies import copies_of
from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.profile.schema import Lora, Model

from .sd3_bases import write_sd3_base
from .world import read_result, run_world, write_result

CPU = torch.device("cpu")
SIGMA = 0.37


@pytest.fixture(scope="module")
def sd3_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd3_base(tmp_path_factory.mktemp("sd3") / "base")


def loaded(family: str, pixel_base: Path, sd3_base: Path) -> tuple[Family, naive.Stock]:
    base = pixel_base if family == "cosmos3" else sd3_base
    targets = ["add_q_proj", "to_add_out"] if family == "cosmos3" else ["attn.to_q", "attn.to_out.0"]
    size = (8, 12) if family == "cosmos3" else (32, 48)
    model = Model(height=size[0], width=size[1], dtype="float32", lora=Lora(rank=2, alpha=4.0, targets=targets))
    made = load_family(model, str(base), family, CPU)
    add_adapters(made.denoiser, model.lora, seed=0)
    return made, naive.stock_of(family).load(naive.Loading(base, torch.float32, CPU))


def work_of(family: Family, stock: naive.Stock) -> naive.Work:
    x = torch.randn(1, *family.latent_shape, generator=torch.Generator().manual_seed(3))
    prompts = [stock.prompt(family, "", True), stock.prompt(family, "a red seven", False)]
    return naive.Work(x, SIGMA, tuple(prompts))


@torch.no_grad()
def ours(family: Family, work: naive.Work) -> Tensor:
    conditions = family.encoder.encode([""], negative=True) + family.encoder.encode(["a red seven"])
    x, sigma = work.x.expand(2, -1, -1, -1, -1), torch.full((2,), SIGMA)
    velocity: Tensor = family.denoiser(x, sigma, family.batch(conditions))
    return velocity


@pytest.mark.parametrize("name", ["cosmos3", "sd3"])
def test_stock_and_ours_give_the_same_velocity(name: str, pixel_base: Path, sd3_base: Path) -> None:
    family, stock = loaded(name, pixel_base, sd3_base)
    work = work_of(family, stock)
    theirs = naive.velocities_of(stock, work)
    assert theirs.shape == (2, *family.latent_shape)
    assert naive.relative_error(ours(family, work), theirs) <= 1e-5
    assert naive.relative_error(theirs[:1], theirs[1:]) > 1e-3  # the branches are two


@pytest.mark.parametrize("name", ["cosmos3", "sd3"])
def test_it_trains_what_a_run_trains(name: str, pixel_base: Path, sd3_base: Path) -> None:
    family, stock = loaded(name, pixel_base, sd3_base)
    work = work_of(family, stock)
    before = naive.velocities_of(stock, work)
    parameters = stock.train(list(copies_of(family.denoiser).parameters), 2, 4.0)
    mine = copies_of(family.denoiser).parameters
    assert sorted(tuple(p.shape) for p in parameters) == sorted(tuple(p.shape) for p in mine.values())
    torch.testing.assert_close(naive.velocities_of(stock, work), before)  # a new adapter adds nothing
    seen: list[int] = []
    watched: Any = parameters[0]
    watched.register_hook(lambda grad: seen.append(grad.numel()))
    assert len(naive.time_training(stock, work, parameters, repeats=2, warm=1)) == 2
    assert seen == [parameters[0].numel()] * 3
    assert all(p.grad is None for p in parameters)


def test_all_weights_train_where_the_run_trains_all(pixel_base: Path, sd3_base: Path) -> None:
    _, stock = loaded("cosmos3", pixel_base, sd3_base)
    names = ["proj_in.weight", "layers.1.mlp_moe_gen.up_proj.weight"]
    trained = stock.train(names, 2, 4.0)
    assert {id(p) for p in trained} == {id(stock.module.get_parameter(name)) for name in names}


def test_forwards_are_timed_by_the_row(pixel_base: Path, sd3_base: Path) -> None:
    family, stock = loaded("cosmos3", pixel_base, sd3_base)
    calls: list[Any] = []
    stock.module.register_forward_hook(lambda *given: calls.append(given))
    took = naive.time_sampling(stock, work_of(family, stock), repeats=3, warm=1)
    assert len(took) == 3
    assert len(calls) == 2 * (3 + 1)  # both branches of a sample, one call each


def test_parts_that_make_no_image_are_left_out(pixel_base: Path) -> None:
    stock = naive.stock_of("cosmos3").load(naive.Loading(pixel_base, torch.bfloat16, CPU))
    assert not hasattr(stock.module, "lm_head")
    dtypes = {name.partition(".")[0]: p.dtype for name, p in stock.module.named_parameters()}
    assert dtypes["time_embedder"] == torch.float32
    assert dtypes["layers"] == torch.bfloat16


def test_the_relative_error_is_that_of_the_worst_branch() -> None:
    exact = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert naive.relative_error(torch.tensor([[3.0, 4.5], [1.0, 0.2]]), exact) == pytest.approx(0.2)


def shard_two(rank: int, folder: str) -> None:
    """One rank of two: the stock transformer sharded, its gathers counted, what it computes and trains."""
    where = Path(folder)
    stock = naive.stock_of("cosmos3").load(naive.Loading(where / "base", torch.float32, CPU))
    counted = stock.shard(init_device_mesh("cpu", (2,)))
    work = naive.Work(torch.ones(1, 3, 1, 4, 4), SIGMA, ([5, 9, 250], [4, 7]))
    calls, velocities = [], naive.velocities_of(stock, work)
    for _ in range(2):
        before = counted.calls
        naive.time_sampling(stock, work, repeats=1, warm=0)
        calls.append(counted.calls - before)
    trained = stock.train(["layers.0.self_attn.add_q_proj.lora_A"], 2, 4.0)
    before = counted.calls
    naive.time_training(stock, work, trained, repeats=1, warm=0)
    facts = {"calls": calls, "training": counted.calls - before, "trained": len(trained), "units": len(stock.units())}
    write_result(where, f"rank{rank}", {**facts, "velocities": velocities})


def test_on_two_ranks_every_layer_is_gathered_for_every_forward(pixel_base: Path, tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(pixel_base)
    run_world(shard_two, 2, tmp_path)
    whole = naive.stock_of("cosmos3").load(naive.Loading(pixel_base, torch.float32, CPU))
    work = naive.Work(torch.ones(1, 3, 1, 4, 4), SIGMA, ([5, 9, 250], [4, 7]))
    for rank in (0, 1):
        found = read_result(tmp_path, f"rank{rank}")
        assert found["units"] == 4  # three layers and the timestep's embedder
        assert found["calls"] == [2 * 4, 2 * 4]  # both branches, the second time as much as the first
        assert found["training"] == 2 * 4  # once for the forward, once for the backward
        assert found["trained"] == 2
        assert naive.relative_error(found["velocities"], naive.velocities_of(whole, work)) <= 1e-5


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UsageRefused, match="does not know the family"):
        naive.stock_of("other")
