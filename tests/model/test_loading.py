"""A denoiser that is sharded before it is read: each rank reads its own rows, and computes what a whole one does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nftctl.model import adapters, shard
from nftctl.model.registry import load_family
from nftctl.model.weights import Tensors
from nftctl.profile.schema import Lora, Model
from nftctl.run.hashing import fingerprint_base, fingerprint_denoiser
from nftctl.tensorblocks import read_wholes, shard_files

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


def load(base: Path, *, unread: bool, tokenizer: str = "") -> Any:
    model = MODEL.model_copy(update={"tokenizer": tokenizer})
    family = load_family(model, str(base), "cosmos3", CPU, skip_keys=[SKIPPED], seed=5, unread=unread)
    adapters.add_adapters(
        family.denoiser, Lora(rank=2, alpha=4.0, targets=["add_q_proj", "mlp_moe_gen.up_proj"]), seed=1
    )
    return family


def save_cut(base: Path, folder: Path, mesh: DeviceMesh) -> None:
    """The transformer as a distributed checkpoint that all ranks write, every other matrix cut by columns."""
    tensors = load_file(next((base / "transformer").glob("*.safetensors")))
    cuts = {name: int(value.dim() > 1 and n % 2) for n, (name, value) in enumerate(sorted(tensors.items()))}
    state = {name: distribute_tensor(value, mesh, [Shard(cuts[name])]) for name, value in tensors.items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def member(rank: int, folder: str) -> None:
    read = {"numbers": 0}
    plain = Tensors.read

    def counted(self: Tensors, name: str, rows: slice | None = None) -> torch.Tensor:
        value = plain(self, name, rows)
        read["numbers"] += value.numel()
        return value

    base, shards, mesh = Path(folder) / "base", Path(folder) / "shards", init_device_mesh("cpu", (WORLD,))
    save_cut(base, shards, mesh)
    if rank == 0:
        shutil.copytree(base / "transformer", shards / "transformer", ignore=shutil.ignore_patterns("*.safetensors"))
    dist.barrier()
    for kind, place, tokenizer in (("base", base, ""), ("shards", shards, str(base / "tokenizer"))):
        family = load(place, unread=True, tokenizer=tokenizer)
        read["numbers"] = 0
        Tensors.read = counted  # type: ignore[method-assign]
        before = {name: p.is_meta for name, p in family.denoiser.named_parameters() if "lora_" not in name}
        shard.shard_denoiser(family.denoiser, mesh, "auto")
        family.stored.fill(family.denoiser, CPU)
        Tensors.read = plain  # type: ignore[method-assign]
        local = {n: p.to_local() for n, p in family.denoiser.named_parameters() if "lora_" not in n}  # type: ignore[union-attr]
        result: dict[str, Any] = {"unread": all(before.values()), "read": read["numbers"]}
        result["loaded"] = [family.report.loaded, family.report.expected]
        result["local"] = {name.replace(".base_layer.", "."): value for name, value in local.items()}
        result["dtypes"] = {name: str(value.dtype) for name, value in local.items()}
        result["velocity"] = velocity(family)
        write_result(Path(folder), f"{kind} {rank}", result)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading")
    write_pixel_base(folder / "base", build_transformer(dtype=torch.bfloat16))
    run_world(member, WORLD, folder)
    return folder


@pytest.fixture(params=["base", "shards"])
def ranks(request: pytest.FixtureRequest, world: Path) -> tuple[Path, list[dict[str, Any]]]:
    """What each rank has of the diffusers folder, and of the same as a distributed checkpoint cut three ways."""
    return world, [read_result(world, f"{request.param} {rank}") for rank in range(WORLD)]


def test_every_rank_holds_its_rows_of_the_file(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    stored = load_file(next((folder / "base" / "transformer").glob("*.safetensors")))
    assert all(result["unread"] for result in results)
    assert all(result["loaded"] == results[0]["loaded"] for result in results)
    assert results[0]["loaded"][0] == results[0]["loaded"][1] - 1
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


def test_the_checkpoint_is_cut_over_the_files_of_all_ranks(world: Path) -> None:
    wholes = read_wholes(shard_files(world / "shards"))
    assert {len(whole.blocks) for whole in wholes.values()} == {WORLD}
    assert {whole.is_cut_by_rows for whole in wholes.values()} == {True, False}
    assert fingerprint_base(world / "shards") == fingerprint_denoiser(world / "base")
