"""A prompt encoder that comes and goes on a GPU: the bits of one that stays, and none of its memory in between.

Cosmos3's is never there as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nftctl.model.registry import load_family
from nftctl.profile.schema import Model
from tests.model.bases import build_transformer, write_pixel_base
from tests.model.sd3_bases import write_sd3_base

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = ["a red cube on a table", "", "three white birds over a lake at dawn"]
# 32 layers of 2 MB: far more than what these prompts leave and what runs them holds, workspaces included.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "num_hidden_layers": 32,
    "rope_axes_dim": (12, 10, 10),
}
WRITE: dict[str, Callable[[Path], Path]] = {
    "cosmos3": lambda folder: write_pixel_base(folder, build_transformer(dtype=torch.bfloat16, **WIDE)),
    "sd3": write_sd3_base,
}


@pytest.mark.parametrize("name", WRITE)
def test_it_leaves_nothing_on_the_device_and_changes_nothing(tmp_path: Path, name: str) -> None:
    base, device = WRITE[name](tmp_path / "base"), torch.device("cuda")
    bits: dict[str, list[torch.Tensor]] = {}
    for home in ("resident", "offload", "per-step"):
        model = Model(
            height=64,
            width=96,
            prompt_encoder=home,  # type: ignore[arg-type]
            system_prompt=False,
            resolution_template=False,
        )
        encoder: Any = load_family(model, str(base), name, device).encoder
        modules = [encoder.tower] if name == "cosmos3" else encoder.parts.encoders()
        parameters = [p for module in modules for p in module.parameters()]
        size = sum(p.nbytes for p in parameters)
        bits[home] = []
        for number, prompts in enumerate((PROMPTS[:2], PROMPTS), 1):
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            with encoder.visit():
                encoder.encode(prompts, negative=True)
                found = encoder.encode(prompts)
                during = torch.cuda.memory_allocated(device) - before
            peak = torch.cuda.max_memory_allocated(device) - before
            after = torch.cuda.memory_allocated(device) - before
            if home == "resident":
                assert during == after
            elif name == "cosmos3":
                assert during == after
                assert peak < size
            else:
                assert during - after >= size
            assert encoder.visits == number
            names = ("keys", "values", "embeds", "pooled")
            bits[home] += [getattr(one, key) for one in found for key in names if hasattr(one, key)]
        assert all(tensor.is_cuda for tensor in bits[home])
        where = {"resident": lambda p: p.is_cuda, "offload": lambda p: p.is_pinned(), "per-step": lambda p: p.is_meta}
        assert all(where[home](p) for module in modules for p in module.parameters())
    for home in ("offload", "per-step"):
        assert len(bits[home]) == len(bits["resident"]) == 10
        assert all(torch.equal(a, b) for a, b in zip(bits[home], bits["resident"], strict=True))
