"""A prompt encoder that comes and goes on a GPU: the bits of one that stays, and none of its memory in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nftctl.model.registry import load_family
from nftctl.model.rehearsal import write_base
from nftctl.profile.schema import Model
from tests.model.sd3_bases import write_sd3_base

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = ["a red cube on a table", "", "three white birds over a lake at dawn"]
WRITE: dict[str, Callable[[Path], Path]] = {
    "cosmos3": lambda folder: write_base("cosmos3-tiny", folder),
    "sd3": write_sd3_base,
}


@pytest.mark.parametrize("name", WRITE)
def test_it_leaves_nothing_on_the_device_and_changes_nothing(tmp_path: Path, name: str) -> None:
    base, device = WRITE[name](tmp_path / "base"), torch.device("cuda")
    bits: dict[str, list[torch.Tensor]] = {}
    for home in ("resident", "offload", "per-step"):
        model = Model(height=64, width=96, prompt_encoder=home)  # type: ignore[arg-type]
        encoder: Any = load_family(model, str(base), name, device).encoder
        modules = [encoder.tower] if name == "cosmos3" else encoder.parts.encoders()
        parameters = [p for module in modules for p in module.parameters()]
        size = sum(p.nbytes for p in parameters)
        bits[home] = []
        for number, prompts in enumerate((PROMPTS[:2], PROMPTS), 1):
            before = torch.cuda.memory_allocated(device)
            with encoder.visit():
                encoder.encode(prompts, negative=True)
                found = encoder.encode(prompts)
                during = torch.cuda.memory_allocated(device) - before
            after = torch.cuda.memory_allocated(device) - before
            if home == "resident":
                assert during == after
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
