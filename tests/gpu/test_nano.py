"""Cosmos3-Nano's full shape with random weights, two GPUs: three steps of the public recipe, and where memory goes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.group import Group
from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.model.rehearsal import write_base
from nftctl.profile.estimate import Memory, estimate
from nftctl.profile.load import Resolved, load_profile
from nftctl.profile.preflight import refuse_if_wrong
from nftctl.profile.rules.rule import Facts
from tests.conftest import Quiet

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROMPTS = [
    "a red cube on a wooden table",
    "three white birds over a lake at dawn",
    "a market in the rain, seen from a balcony",
    "an old map of an island",
]
PROFILE = """
extends = "cosmos3_nft_t2i_public"
[rl]
group_size = 2
max_steps = 3
init_from = "{base}"
[model]
vae = "{base}/vae"
[data]
prompt_file = "{prompts}"
[[reward.providers]]
name = "brightness"
kind = "embedded"
scorer = "brightness"
[samples]
prompts = 0
[grid]
device = "cuda"
"""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    folder = tmp_path_factory.mktemp("nano")
    # A base that was written before may be used again: it takes half a minute and 32 GB.
    base = Path(os.environ.get("REHEARSAL_BASE", folder / "base"))
    if not base.exists():
        write_base("cosmos3-nano", base)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    profile = folder / "nano.toml"
    profile.write_text(PROFILE.format(base=base, prompts=folder / "prompts.txt"))
    flags = {"job.name": "nano", "job.run_dir": str(folder / "runs")}
    found = load_profile(profile, sets=[], flags=flags, env={})
    refuse_if_wrong(found)
    return found


@pytest.fixture(scope="module")
def after(resolved: Resolved) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, float]]]]:
    """Metric rows of three steps, and each rank's bytes by part afterwards."""
    started: list[Group] = []
    reporter = Quiet()
    try:
        group = Group.start(resolved.profile, Path(resolved.profile.job.run_dir).parent, started.append)
        run_job(plan_launch(resolved, argv=[]), reporter, group)
        print(reporter.notes)
        yield reporter.rows, group.call("apply", parts)
    finally:
        for group in started:
            group.shutdown()


def parts(worker: Any) -> dict[str, float]:
    """Bytes of this rank's tensors by part, counted on the tensors themselves."""
    import torch
    from torch.distributed.tensor import DTensor

    from nftctl.model import shard

    roles = worker.roles
    denoiser = roles.family.denoiser
    tensors = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in denoiser.named_parameters()}
    moments = [v for state in roles.policy.optimizer.state.values() for v in state.values()]
    before = torch.cuda.memory_allocated()
    shard.gather(denoiser)
    gathered = torch.cuda.memory_allocated() - before
    roles.release()
    return {
        "base shard": sum(t.nbytes for name, t in tensors.items() if "lora_" not in name),
        "gathered base": gathered,
        "prompt encoder": sum(p.nbytes for p in roles.family.encoder.tower.parameters()),
        "LoRA": sum(t.nbytes for name, t in tensors.items() if "lora_" in name),
        "optimizer": sum(t.nbytes for t in moments if t.is_cuda),
        "decoder": sum(p.nbytes for p in roles.family.decoder.vae.parameters()),
        "held between steps": before,
    }


def estimated(resolved: Resolved) -> Memory:
    facts = Facts(resolved)
    assert facts.contract is not None
    found = estimate(resolved.profile, facts.base, facts.weights, facts.contract, [*PROMPTS, ""])
    assert found is not None
    return found


def test_three_steps_are_finite(after: tuple[list[dict[str, Any]], list[dict[str, float]]]) -> None:
    rows, _ = after
    assert len(rows) == 3
    for row in rows:
        print(
            {k: round(v, 4) for k, v in row.items() if k.startswith(("train/loss", "train/grad", "timer/", "system/"))}
        )
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
        assert row["forwards/planned"] == row["forwards/executed"]
        assert row["train/grad_norm"] > 0


def test_memory_is_what_was_estimated(
    resolved: Resolved, after: tuple[list[dict[str, Any]], list[dict[str, float]]]
) -> None:
    rows, ranks = after
    memory = estimated(resolved)
    for part in memory.parts:
        seen = [round(rank[part.name] / 1e9, 3) if part.name in rank else None for rank in ranks]
        print(f"{part.name:16} estimated {part.bytes / 1e9:8.3f} GB, seen {seen}, {part.when}: {part.how}")
    peak = max(row["system/gpu_peak_sample_gb"] for row in rows), max(row["system/gpu_peak_train_gb"] for row in rows)
    print(f"peak estimated {memory.peak / 1e9:.2f} GB, seen in sampling and training {peak}, between {ranks[0]}")
    for part in memory.parts:
        if part.name in ranks[0]:
            assert ranks[0][part.name] == pytest.approx(part.bytes, rel=0.02), part.name
    assert max(peak) == pytest.approx(memory.peak / 1e9, rel=0.1)
