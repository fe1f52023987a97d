"""Runs a function in a world of gloo processes on this machine; results travel as safetensors and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

HEAVY = ["nftctl.model.adapters", "nftctl.model.cosmos3", "nftctl.model.sd3", "nftctl.model.shard", "torch.profiler"]


def run_world(function: Callable[[int, str], None], size: int, folder: Path) -> None:
    """Call `function(rank, folder)` in `size` processes and wait for all of them."""
    # One server imports the heavy modules and each rank is a fork of it: a second for a world, not ten for each rank.
    mp.get_context("forkserver").set_forkserver_preload(HEAVY)
    mp.start_processes(_member, args=(function, size, str(folder)), nprocs=size, join=True, start_method="forkserver")


def _member(rank: int, function: Callable[[int, str], None], size: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    function(rank, folder)
    dist.destroy_process_group()


def write_result(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Tensors and dicts of tensors as safetensors, the rest as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for key, value in result.items():
        items = value.items() if isinstance(value, dict) else [("", value)]
        if all(isinstance(v, torch.Tensor) for _, v in items):
            tensors |= {f"{key}/{inner}": v.contiguous() for inner, v in items}
        else:
            facts[key] = value
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(facts))


def read_result(folder: Path, name: str) -> dict[str, Any]:
    """Inverse of `write_result`."""
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    for key, tensor in load_file(folder / f"{name}.safetensors").items():
        owner, _, inner = key.partition("/")
        if inner:
            result.setdefault(owner, {})[inner] = tensor
        else:
            result[owner] = tensor
    return result
