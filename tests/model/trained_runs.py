"""Runs with a checkpoint as the engine leaves them, made in one process from random adapters: nothing was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nftctl.engine.checkpoint import describe
from nftctl.engine.plan import plan_launch
from nftctl.model import adapters
from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.run.checkpoints import partial_folder, step_name
from nftctl.run.directory import RunDirectory
from nftctl.run.manifest import Manifest, commit, write_manifest
from nftctl.run.state import RunState

RANK, ALPHA = 4, 6.0
EVALUATIONS = [
    {"step": 0, "eval/reward": 0.25, "eval/samples": 24, "eval/digits": 0.25},
    {"step": 3, "eval/reward": 0.5, "eval/samples": 24, "eval/digits": 0.5},
    {"step": 9, "eval/reward": 0.75, "eval/samples": 24, "eval/digits": 0.75},
]


def random_copies(family: Family, *, full: bool, old: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Different random numbers for policy, old and EMA, under the engine's names. Adapters of the family get them too;
    whole weights are moved from the base's, and the family keeps those of the policy."""
    generator = torch.Generator().manual_seed(seed)
    denoiser, state = family.denoiser, {}
    if full:
        base = {name: p.detach().float() for name, p in denoiser.named_parameters()}
        copies = ("policy", "old", "ema") if old else ("policy", "ema")
        state = {f"{copy}.{name}": value.clone() for copy in copies for name, value in base.items()}
    else:
        for copy in adapters.adapter_names(denoiser):
            state |= {f"{copy}.{n}": p.detach() for n, p in adapters.parameters(denoiser, copy).items()}
    for value in state.values():
        value += torch.randn(value.shape, generator=generator) * 0.3
    if full:
        denoiser.load_state_dict({n: state[f"policy.{n}"] for n in base}, strict=False)
    return state


def make_trained(
    parent: Path, profile: str = "tiny_t2i_cpu", sets: tuple[str, ...] = (), *, name: str = "first", step: int = 3
) -> tuple[RunDirectory, Path, Family]:
    """A run of a bundled profile with one checkpoint at rank 4 and alpha 6, and the family with its adapters."""
    sets = (f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}", "rl.ema_decay=0.9", *sets)
    flags = {"rl.max_steps": 9, "job.name": name, "job.run_dir": str(parent)}
    resolved = load_profile(bundled_profiles()[profile], sets=sets, flags=flags, env={})
    plan = plan_launch(resolved, argv=["nftctl"])
    family = load_family(plan.profile.model, str(plan.base), plan.family, torch.device("cpu"))
    rl, full = plan.profile.rl, plan.profile.model.train == "full"
    if not full:
        adapters.add_adapters(family.denoiser, plan.profile.model.lora, seed=0, ema=rl.ema_decay > 0)
    state = random_copies(family, full=full, old=rl.old.build_old)
    for parameter in [name.removeprefix("policy.") for name in state if name.startswith("policy.")]:
        value = state[f"policy.{parameter}"]
        state |= {f"optim.{parameter}.{moment}": torch.ones_like(value) for moment in ("exp_avg", "exp_avg_sq")}
        state[f"optim.{parameter}.step"] = torch.tensor(float(step))
    run = RunDirectory.create(
        parent, name, profile_text=plan.profile_text, resolved=plan.profile.model_dump(), record=plan.record()
    )
    (run.path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVALUATIONS))
    (run.path / "reward.svg").write_text("<svg/>\n")
    (run.samples / "before_after.png").write_bytes(b"the last grids")
    checkpoint = write_checkpoint(run, plan, state, step)
    return run, checkpoint, family


def write_checkpoint(run: RunDirectory, plan: Any, state: dict[str, torch.Tensor], step: int) -> Path:
    """A whole checkpoint of these tensors, spread over two files."""
    partial = partial_folder(run.checkpoints, step)
    (partial / "state").mkdir()
    for number, names in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        save_file({name: state[name].contiguous() for name in names}, partial / f"state/shard-{number}.safetensors")
    manifest = Manifest(
        run_id=plan.run_id, step=step, state=RunState(step=step, optimizer_steps=step, cursor=8 * step).to_dict(),
        world_size=plan.profile.ranks, identity=plan.identity, identity_hash=plan.identity_hash,
        seed_contract=plan.seed_contract, tensors=describe(state), created="2026-11-29T00:00:00+00:00",
        reward=[{"name": name, "revision": revision} for name, revision in plan.revisions.items()],
        optimizer_entries=sorted(name.removeprefix("policy.") for name in state if name.startswith("policy.")),
        versions={"nftctl": "0.1.0", "torch": "2.13.0"},
    )  # fmt: skip
    write_manifest(partial, manifest)
    final = run.checkpoints / step_name(step)
    commit(partial, final)
    return final
