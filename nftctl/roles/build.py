"""Builds the five roles of a rank from its spec: one family, one adapter pair, one FSDP mesh; and who scores
evaluations.

Refuses prompts that the base's tokenizer refuses, before anything is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nftctl.errors import Finding, ProfileRefused
from nftctl.model import adapters, compiled, fp8, recorded, shard
from nftctl.model.copies import FullCopies, copies_of
from nftctl.model.family import Denoiser, Family, PromptEncoder
from nftctl.model.registry import load_family
from nftctl.profile.prompts import read_prompts, resolve_prompt_file
from nftctl.profile.schema import Profile
from nftctl.roles.data import DataRole
from nftctl.roles.policy import PolicyRole
from nftctl.roles.replay import ReplayRole
from nftctl.roles.reward import Endpoint, RewardRole
from nftctl.roles.rollout import RolloutRole

MOST_REFUSED = 20
"""Refused prompts that are named; the next one teaches nothing that these did not."""


class Spec(Protocol):
    """What roles are built from (the engine's WorkerSpec)."""

    @property
    def profile(self) -> Profile: ...
    @property
    def family(self) -> str: ...
    @property
    def base(self) -> Path: ...
    @property
    def prompt_path(self) -> Path: ...
    @property
    def endpoints(self) -> Sequence[Endpoint]: ...
    @property
    def judges(self) -> Sequence[Endpoint]: ...
    @property
    def component_names(self) -> Sequence[str]: ...
    @property
    def request_key(self) -> str: ...


@dataclass(slots=True)
class Roles:
    """The five roles of one process, and the model that three of them share."""

    family: Family
    data: DataRole
    rollout: RolloutRole
    reward: RewardRole
    replay: ReplayRole
    policy: PolicyRole
    lora_targets: Sequence[str]
    judge: RewardRole
    """Who scores evaluations, and nothing else: `reward` itself unless the profile names others."""

    def close(self) -> None:
        """Let go of every connection to a scorer."""
        self.reward.close()
        if self.judge is not self.reward:
            self.judge.close()

    def release(self) -> None:
        """Give the gathered base back where it is trained; one that is frozen stays for the next step."""
        shard.end_step(self.family.denoiser)

    def facts(self) -> dict[str, Any]:
        """Counts for the log."""
        denoiser = self.family.denoiser
        trained = copies_of(denoiser).parameters
        return {
            "base_parameters": sum(p.numel() for n, p in denoiser.named_parameters() if "lora_" not in n),
            "trained_parameters": sum(p.numel() for p in trained.values()),
            "trained_tensors": len(trained),
            "adapted_modules": adapters.adapted_modules(denoiser, self.lora_targets),
            "shard": None if denoiser.sharding is None else denoiser.sharding.policy,
            "base_is": None if denoiser.sharding is None else shard.SAID[denoiser.sharding.policy],
            "compiled_layers": sum(compiled.is_compiled(layer) for layer in denoiser.compile_units()),
            "prompts": len(self.data.prompts),
            "tensors_loaded": self.family.report.loaded,
            "tensors_expected": self.family.report.expected,
            "tensors_initialised": list(self.family.report.initialised),
        }


def build_roles(spec: Spec, *, rank: int, device: torch.device, control: dist.ProcessGroup) -> Roles:
    """Load, adapt, shard, and wire the roles. Collective."""
    profile = spec.profile
    family = load_family(
        profile.model,
        str(spec.base),
        spec.family,
        device,
        skip_keys=tuple(profile.rl.init_keys_to_skip_loading),
        seed=profile.rl.seed,
        unread=True,
    )
    mesh = shard.make_mesh(device.type, dist.get_world_size(), profile.grid.shard_group)
    lowered = _prepare_copies(family, profile, mesh, device)
    data = DataRole(
        read_prompts(spec.prompt_path),
        rows_per_step=profile.data.rows_per_step,
        shuffle=profile.data.shuffle,
        seed=profile.rl.seed,
    )
    _refuse_unreadable(family.encoder, profile, spec.prompt_path)
    reward = RewardRole(profile.reward, spec.endpoints, key=spec.request_key, rank=rank)
    return Roles(
        family=family,
        data=data,
        rollout=RolloutRole(family, profile, rank=rank, device=device, lowered=lowered),
        reward=reward,
        replay=ReplayRole(profile, spec.component_names, control),
        policy=PolicyRole(family, profile, rank=rank, device=device, control=control),
        lora_targets=profile.model.lora.targets,
        judge=RewardRole(profile.reward, spec.judges, key=spec.request_key, rank=rank) if spec.judges else reward,
    )


def _refuse_unreadable(encoder: PromptEncoder, profile: Profile, training: Path) -> None:
    """Refuse the first prompts that cannot be encoded, training and held-out, each by its line. Encodes nothing."""
    files = [("data.prompt_file", training)]
    if profile.eval.prompt_file:
        files.append(("eval.prompt_file", resolve_prompt_file(profile.eval.prompt_file, "test")))
    findings: list[Finding] = []
    for key, path in files:
        for line, prompt in enumerate(read_prompts(path), 1):
            try:
                encoder.check(prompt.text)
            except ProfileRefused as refused:
                findings += [replace(f, key=key, origin=str(path), line=line, column=1) for f in refused.findings]
            if len(findings) >= MOST_REFUSED:
                raise ProfileRefused(findings)
    guided = profile.rl.guidance if profile.eval.guidance is None else profile.eval.guidance
    if not profile.rl.guidance == guided == 1.0:
        try:
            encoder.check(profile.rl.negative_prompt, negative=True)
        except ProfileRefused as refused:
            findings += refused.findings
    if findings:
        raise ProfileRefused(findings)


def _prepare_copies(family: Family, profile: Profile, mesh: DeviceMesh, device: torch.device) -> fp8.Fp8Rollout | None:
    """Set up what is trained, shard the denoiser, and read its weights, each rank its own rows.

    Returns the FP8 side of the denoiser where rollouts want it.
    """
    denoiser, model, rl = family.denoiser, profile.model, profile.rl
    full = model.train == "full"
    if full:
        denoiser.requires_grad_(True)
    else:
        adapters.add_adapters(denoiser, model.lora, seed=rl.seed, ema=rl.ema_decay > 0)
    lowers = rl.rollout_precision == "fp8"
    compute, beside = getattr(torch, model.dtype) if full else None, fp8.copy_bytes(denoiser) if lowers else 0
    shard.shard_denoiser(denoiser, mesh, model.shard, compute=compute, beside=beside)
    if family.stored is not None:
        family.stored.fill(denoiser, device)
    lowered = _lowered(denoiser, device) if lowers else None
    if compiled.wanted(model, device=device, deterministic=profile.job.deterministic):
        compiled.compile_layers(denoiser)
    if not full and recorded.wanted(model, device=device, deterministic=profile.job.deterministic):
        denoiser.recorder = recorded.Recorder(denoiser)
    if full:
        denoiser.copies = FullCopies(denoiser, old=rl.old.build_old, reference=rl.kl_beta > 0, ema=rl.ema_decay > 0)
    return lowered


def _lowered(denoiser: Denoiser, device: torch.device) -> fp8.Fp8Rollout:
    if denoiser.sharding is not None and denoiser.sharding.policy == "reshard":
        message = 'model.shard = "auto" found no room to gather the base, and FP8 quantises weights that are whole'
        help = "take more ranks, free memory, or set rl.rollout_precision to base"
        raise ProfileRefused([Finding("fp8-not-whole", "rl.rollout_precision", message, help=help)])
    lowered = fp8.Fp8Rollout(denoiser, device)
    if not lowered.modules:
        message = f"no linear module of this base's layers has both sides in whole multiples of {fp8.MULTIPLE}"
        help = "there is nothing that FP8 could multiply: set rl.rollout_precision to base"
        raise ProfileRefused([Finding("fp8-not-whole", "rl.rollout_precision", message, help=help)])
    return lowered
