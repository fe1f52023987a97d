"""A denoiser that is sharded before it is read: each rank reads its own rows, and computes what a whole one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from nftctl.model import adapters, shard
from nftctl.model.registry import load_family
from nftctl.model.weights import Tensors
from nftctl.profile.schema import Lora, Model

from .bases import build_transformer, write_pixel_base
from .world import read_result, run_world, write_result

WORLD = 3
SKIPPED = "layers.1.mlp_moe_gen.up_proj"
MODEL = Model(height=8, width=8, system_prompt=False, resolution_template=False, dtype="bfloat16")
CPU = torch.device("cpu")


def velocity(family: Any) -> torch.Tensor:
    conditions = family.batch(family.encoder.encode(["one", "another one"]))
    x = torch.randn(2, *family.latent_shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), adapters.weights(family.denoiser, "policy"):
        result: torch.Tensor = family.denoiser(x, torch.tensor([0.3, 0.8]), conditions)
    return result


def load(base: Path, *, unread: bool) -> Any:
    family = load_family(MODEL, str(base), "cosmos3", CPU, skip_keys=[SKIPPED], seed=5, unread=unread)
    adapters.add_adapters(
        family.denoiser, Lora(rank=2, alpha=4.0, targets=["add_q_proj", "mlp_moe_gen.up_proj"]), seed=1
    )
    return family


def member(rank: int, folder: str) -> None:
    read = {"numbers": 0}
    plain = Tensors.read

    def counted(self: Tensors, name: str, rows: slice | None = None) -> torch.Tensor:
        value = plain(self, name, rows)
        read["numbers"] += value.numel()
        return value

    family = load(Path(folder) / "base", unread=True)
    Tensors.read = counted  # type: ignore[method-assign]
    before = {name: p.is_meta for name, p in family.denoiser.named_parameters() if "lora_" not in name}
    shard.shard_denoiser(family.denoiser, init_device_mesh("cpu", (WORLD,)), "auto")
    family.stored.fill(family.denoiser, CPU)
    local = {n: p.to_local() for n, p in family.denoiser.named_parameters() if "lora_" not in n}  # type: ignore[union-attr]
    result: dict[str, Any] = {"unread": all(before.values()), "read": read["numbers"]}
    result["local"] = {name.replace(".base_layer.", "."): value for name, value in local.items()}
    result["dtypes"] = {name: str(value.dtype) for name, value in local.items()}
    result["velocity"] = velocity(family)
    write_result(Path(folder), f"rank {rank}", result)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("loading")
    write_pixel_base(folder / "base", build_transformer(dtype=torch.bfloat16))
    run_world(member, WORLD, folder)
    return folder, [read_result(folder, f"rank {rank}") for rank in range(WORLD)]


def test_every_rank_holds_its_rows_of_the_file(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    stored = load_file(next((folder / "base" / "transformer").glob("*.safetensors")))
    assert all(result["unread"] for result in results)
    for name in results[0]["local"]:
        whole = torch.cat([result["local"][name] for result in results])
        if SKIPPED in name:
            assert whole.shape == stored[name].shape
            assert not torch.equal(whole, stored[name])
        else:
            assert torch.equal(whole, stored[name]), name
    assert {d for n, d in results[0]["dtypes"].items() if n.startswith("time_embedder")} == {"torch.float32"}


def test_nobody_reads_more_than_its_share(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = ranks
    held = [sum(v.numel() for n, v in result["local"].items() if SKIPPED not in n) for result in results]
    assert [result["read"] for result in results] == held
    assert held[0] < 0.4 * sum(held)


def test_it_computes_what_a_whole_one_does(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    expected = velocity(load(folder / "base", unread=False))
    for result in results:
        torch.testing.assert_close(result["velocity"], expected, rtol=0, atol=0)
