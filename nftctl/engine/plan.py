"""From a resolved profile to a plan: everything that is known before a process is started. Torch-free; creates nothing.

Owns the computation of hashes, identity and seed contract, and the comparison of a resumed run with its checkpoint.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nftctl import __version__
from nftctl.engine.storage import Input
from nftctl.errors import CheckpointUnusable, Difference, ResumeRefused, RewardFailed
from nftctl.profile.adapter import denoiser_modules
from nftctl.profile.artifacts import inspect_folder, pinned
from nftctl.profile.load import Resolved
from nftctl.profile.prompts import base_folder, read_prompts, resolve_prompt_file
from nftctl.profile.schema import Profile, Provider
from nftctl.profile.t2i import T2I_PROFILES
from nftctl.profile.targets import matched
from nftctl.reward.scorers import scorer_revision
from nftctl.run import hashing, identity
from nftctl.run.checkpoints import list_steps, step_name
from nftctl.run.directory import RunDirectory
from nftctl.run.manifest import Manifest, read_whole, verify
from nftctl.run.state import RunState


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A run that could start now.

    state         where it begins; all zeros for a fresh run
    resume_from   the checkpoint folder, or None
    parent        where a fork came from, empty for every other run: run, run_id, checkpoint, step, changed values
    revisions     provider name -> the revision every reply must carry
    judges        the same of the providers that score evaluations alone, which are no part of the identity
    restart       why the run is restarted by itself, in words; empty where a person began this attempt
    again         it begins once more at step 0 in its own folder, because nothing of it was saved
    """

    profile: Profile
    profile_name: str
    profile_text: str
    run_path: Path
    run_id: str
    total_steps: int
    state: RunState
    resume_from: Path | None
    family: str
    base: Path
    base_fingerprint: str
    prompt_path: Path
    prompt_hash: str
    prompt_count: int
    revisions: dict[str, str]
    identity: dict[str, object]
    identity_hash: str
    seed_contract: dict[str, object]
    judges: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    parent: dict[str, Any] = field(default_factory=dict)
    restart: str = ""
    again: bool = False

    @property
    def nothing_to_do(self) -> bool:
        """True when the stored total is already reached."""
        return self.state.step >= self.total_steps

    def describe(self) -> dict[str, Any]:
        """What `--dry-run` prints."""
        rl, grid = self.profile.rl, self.profile.grid
        return {
            "profile": self.profile_name,
            "run": str(self.run_path),
            "resume_from": str(self.resume_from) if self.resume_from else None,
            "steps": {"from": self.state.step, "to": self.total_steps},
            "ranks": self.profile.ranks,
            "device": grid.device,
            "rows_per_step": self.profile.data.rows_per_step,
            "samples_per_step": self.profile.data.rows_per_step * rl.group_size,
            "base": {"path": str(self.base), "fingerprint": self.base_fingerprint},
            "prompts": {"path": str(self.prompt_path), "count": self.prompt_count, "sha256": self.prompt_hash},
            "reward": _described(self.profile.reward.providers, self.revisions),
            **({"eval": _described(self.profile.eval.providers, self.judges)} if self.judges else {}),
            "checkpoint_every": self.profile.checkpoint.every,
            "identity": self.identity_hash,
            **({"parent": self.parent} if self.parent else {}),
        }

    def record(self) -> dict[str, Any]:
        """The facts written to run.json."""
        return {
            "run_id": self.run_id,
            "profile": self.profile_name,
            "identity": self.identity_hash,
            "identity_document": self.identity,
            "seed_contract": self.seed_contract,
            "init_from": self.profile.rl.init_from,
            "base_fingerprint": self.base_fingerprint,
            "reward_revisions": self.revisions,
            **({"eval_revisions": self.judges} if self.judges else {}),
            "total_steps": self.total_steps,
            "argv": self.argv,
            **({"parent": self.parent} if self.parent else {}),
        }

    def inputs(self) -> list[Input]:
        """Everything on disk that the ranks read, with the hash that it has here."""
        model, held_out = self.profile.model, self.profile.eval.prompt_file
        found = [
            Input("base", "base", self.base, self.base_fingerprint),
            Input("prompt file", "file", self.prompt_path, self.prompt_hash),
        ]
        if held_out:
            path = resolve_prompt_file(held_out, "test")
            found.append(Input("prompt file", "file", path, hashing.hash_file(path)))
        for what, value in (("VAE", model.vae), ("tokenizer", model.tokenizer)):
            if value:
                found.append(Input(what, "folder", Path(value).expanduser(), _hash_folder(value)))
        return found

    @property
    def continues(self) -> bool:
        """True for a run that goes on in its own folder."""
        return self.again or (self.resume_from is not None and not self.parent)

    @property
    def kept_through(self) -> int:
        """The last step whose rows stay; what was seen before the first step is step 0."""
        return -1 if self.again else self.state.step


def _described(providers: Sequence[Provider], revisions: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": p.name, "kind": p.kind, "url": p.url, "revision": revisions[p.name], "weight": p.weight}
        for p in providers
    ]


def required_revision(provider: Provider) -> str:
    """The revision that this provider must serve: the one the profile pins, else the packaged scorer's own hash."""
    return provider.revision or scorer_revision(provider.scorer)


def refuse_other_scorers(profile: Profile) -> None:
    """Raise RewardFailed when a packaged scorer is not the one that the profile pins."""
    for p in (*profile.reward.providers, *profile.eval.providers):
        if p.kind == "embedded" and p.revision and p.revision != (served := scorer_revision(p.scorer)):
            raise RewardFailed(
                f"reward provider {p.name}: the profile pins revision {p.revision}, "
                f"the packaged scorer {p.scorer} is {served}",
                hint="remove the pin, or install the nftctl release that ships that scorer",
            )


def run_folder_name(resolved: Resolved) -> str:
    """job.name, else the profile's name with date and time."""
    return resolved.profile.job.name or f"{resolved.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _hash_folder(value: str) -> str:
    return hashing.fingerprint_folder(Path(value).expanduser()) if value else ""


def _lora_modules(profile: Profile, base: Path) -> dict[str, int] | None:
    """How many modules each LoRA target selects, by the names in the base's headers; None where all weights train."""
    if profile.model.train == "full":
        return None
    shapes = inspect_folder(base).weights().shapes
    return matched(profile.model.lora.targets, denoiser_modules(shapes, T2I_PROFILES[profile.rl.profile].lora))


def _build(
    resolved: Resolved,
    *,
    run_path: Path,
    run_id: str,
    total: int,
    argv: Sequence[str],
    note: hashing.Note,
    **start: Any,
) -> JobPlan:
    # A branch of the hub may move on; what the run begins from is recorded by its commit.
    rl = resolved.profile.rl.model_copy(update={"init_from": pinned(resolved.profile.rl.init_from)})
    profile = resolved.profile.model_copy(update={"rl": rl})
    base = base_folder(rl.init_from)
    prompts = resolve_prompt_file(profile.data.prompt_file, "train")
    dump = profile.model_dump()
    prompt_hash = hashing.hash_file(prompts)
    base_fingerprint = hashing.fingerprint_base(base, note)
    revisions = {p.name: required_revision(p) for p in profile.reward.providers}
    document = identity.identity_document(
        dump,
        base_fingerprint=base_fingerprint,
        prompt_hash=prompt_hash,
        vae_hash=_hash_folder(profile.model.vae),
        tokenizer_hash=_hash_folder(profile.model.tokenizer),
        revisions=revisions,
        lora_modules=_lora_modules(profile, base),
    )
    return JobPlan(
        profile=profile,
        profile_name=resolved.name,
        profile_text=resolved.text,
        run_path=run_path,
        run_id=run_id,
        total_steps=total,
        family=T2I_PROFILES[profile.rl.profile].family,
        base=base,
        base_fingerprint=base_fingerprint,
        prompt_path=prompts,
        prompt_hash=prompt_hash,
        prompt_count=len(read_prompts(prompts)),
        revisions=revisions,
        identity=document,
        identity_hash=identity.fingerprint(document),
        seed_contract=identity.seed_contract(dump, prompt_hash=prompt_hash),
        judges={p.name: required_revision(p) for p in profile.eval.providers},
        argv=list(argv),
        **start,
    )


def plan_launch(
    resolved: Resolved, *, run_dir: Path | None = None, argv: Sequence[str] = (), note: hashing.Note = hashing.silent
) -> JobPlan:
    """The plan of a fresh run; the profile has passed preflight. `note` hears what takes long."""
    parent = run_dir or Path(resolved.profile.job.run_dir).expanduser()
    total = resolved.profile.rl.max_steps
    if total is None:  # preflight's `max-steps-missing`; this is the type checker's proof
        raise ValueError("rl.max_steps is not set")
    refuse_other_scorers(resolved.profile)
    return _build(
        resolved,
        run_path=parent / run_folder_name(resolved),
        run_id=secrets.token_hex(8),
        total=total,
        argv=argv,
        note=note,
        state=RunState(),
        resume_from=None,
    )


def plan_resume(
    run: RunDirectory,
    checkpoint: Path,
    resolved: Resolved,
    *,
    steps: int | None = None,
    argv: Sequence[str] = (),
    note: hashing.Note = hashing.silent,
) -> JobPlan:
    """The plan that continues `checkpoint`; reads only.

    Raises, in this order: CheckpointUnusable (damaged or incomplete), ResumeRefused (seed contract, then the rest of
    the identity, then the rank count), RewardFailed (another revision of a packaged scorer).
    """
    manifest = _of_its_step(checkpoint)
    _refuse_second_history(run, manifest.step)
    total = steps if steps is not None else _stored_total(run)
    plan = _build(
        resolved,
        run_path=run.path,
        run_id=manifest.run_id,
        total=total,
        argv=argv,
        note=note,
        state=manifest.run_state,
        resume_from=checkpoint,
    )
    _refuse_changes(manifest, plan)
    refuse_other_scorers(plan.profile)
    return plan


def plan_again(
    run: RunDirectory, resolved: Resolved, *, argv: Sequence[str] = (), note: hashing.Note = hashing.silent
) -> JobPlan:
    """The plan that begins a run once more that never had a checkpoint: the same run in the same folder, from step 0.

    Raises ResumeRefused when the profile or a file is no longer what the run began with, CheckpointUnusable for a fork,
    which begins elsewhere.
    """
    record = run.read_record()
    if record.get("parent"):
        raise CheckpointUnusable(
            f"{run.path} is a fork without a checkpoint of its own", hint="fork it again: resume ... --fork NAME"
        )
    plan = _build(
        resolved,
        run_path=run.path,
        run_id=str(record.get("run_id")),
        total=_stored_total(run),
        argv=argv,
        note=note,
        state=RunState(),
        resume_from=None,
        again=True,
    )
    found = identity.differences(record.get("identity_document", {}), plan.identity)
    if found:
        raise ResumeRefused(
            f"{run.path}: the run's identity changed; beginning again would be a different run",
            found,
            hint="undo the change; or begin a new run: nftctl launch",
        )
    refuse_other_scorers(plan.profile)
    return plan


def plan_fork(
    run: RunDirectory,
    checkpoint: Path,
    resolved: Resolved,
    name: str,
    *,
    steps: int | None = None,
    argv: Sequence[str] = (),
    note: hashing.Note = hashing.silent,
) -> JobPlan:
    """The plan of a new run `name` beside `run` that begins with the state of `checkpoint`; the profile may differ.

    What differs is recorded as the new run's parent. Raises CheckpointUnusable for a damaged checkpoint, ResumeRefused
    when the profile trains other tensors than the checkpoint has, RewardFailed as a resume does.
    """
    manifest = _of_its_step(checkpoint)
    plan = _build(
        resolved,
        run_path=run.path.parent / name,
        run_id=secrets.token_hex(8),
        total=steps if steps is not None else _stored_total(run),
        argv=argv,
        note=note,
        state=manifest.run_state,
        resume_from=checkpoint,
    )
    changed = identity.differences(manifest.identity, plan.identity)
    _refuse_other_tensors(checkpoint, plan, changed)
    refuse_other_scorers(plan.profile)
    parent = {
        "run": str(run.path),
        "run_id": manifest.run_id,
        "checkpoint": str(checkpoint),
        "step": manifest.step,
        "identity": manifest.identity_hash,
        "changed": [{"key": d.key, "was": d.was, "now": d.now} for d in changed],
    }
    return replace(plan, parent=parent)


def _of_its_step(checkpoint: Path) -> Manifest:
    """The manifest of a whole checkpoint, whose folder has the name of its step."""
    manifest = read_whole(checkpoint)
    if checkpoint.name != step_name(manifest.step):
        raise CheckpointUnusable(
            f"{checkpoint} holds the checkpoint of step {manifest.step}",
            hint=f"call it {step_name(manifest.step)} again",
        )
    return manifest


def _refuse_second_history(run: RunDirectory, step: int) -> None:
    """Refuse to go on from the middle of a run: its newer checkpoints would belong to another history."""
    newer = [path for other, path in list_steps(run.checkpoints) if other > step and not verify(path)]
    if newer:
        raise CheckpointUnusable(
            f"{run.path} has gone on to {newer[-1].name}; resuming step {step} would give it two histories",
            hint=f"resume the newest: nftctl resume {shlex.quote(str(run.path))}; or begin a new run from step {step}: "
            "add --fork NAME",
        )


def _stored_total(run: RunDirectory) -> int:
    stored = run.read_record().get("total_steps")
    if type(stored) is not int or stored < 1:
        raise CheckpointUnusable(f"{run.run_json}: total_steps is {stored!r}, not a number of steps")
    return stored


def _other_tensors(plan: JobPlan, changed: Sequence[Difference]) -> list[Difference]:
    """Those of the changed keys that decide which tensors a checkpoint has, and of which shape."""
    keys = {"model.train"}
    if plan.profile.model.train != "full":
        keys |= {"model.lora.rank", "model.lora.targets"}
    return [
        d
        for d in changed
        # The average is there or is not; how fast it moves is free.
        if d.key in keys or (d.key == "rl.ema_decay" and (d.was == 0) != (d.now == 0))
    ]


def _refuse_other_tensors(checkpoint: Path, plan: JobPlan, changed: Sequence[Difference]) -> None:
    found = _other_tensors(plan, changed)
    if found:
        said = "; ".join(f"{d.key} was {d.was}, now {d.now}" for d in found)
        raise ResumeRefused(
            f"{checkpoint}: a fork goes on with its parent's tensors, so these keys must stay: {said}",
            found,
            hint="undo the change; or begin a new run instead: nftctl launch",
        )


def _refuse_changes(manifest: Manifest, plan: JobPlan) -> None:
    seeds = identity.differences(manifest.seed_contract, plan.seed_contract)
    rest = identity.differences(manifest.identity, plan.identity)
    known = {d.key for d in seeds}
    found: list[Difference] = [*seeds, *(d for d in rest if d.key not in known)]
    if manifest.world_size != plan.profile.ranks and "rl.group_size" not in {d.key for d in found}:
        found.append(
            Difference("ranks", manifest.world_size, plan.profile.ranks, "each rank makes one sample of a group")
        )
    if not found:
        return
    what = "the seed contract" if seeds else "the run's identity"
    raise ResumeRefused(
        f"{plan.resume_from}: {what} changed; continuing would be a different run",
        found,
        hint="undo the change; or begin a new run"
        + (": nftctl launch" if _other_tensors(plan, found) else " from this checkpoint: add --fork NAME"),
    )


def plan_versions() -> dict[str, str]:
    """Versions of everything that takes part in the arithmetic."""
    from importlib.metadata import version

    others = {name: version(name) for name in ("torch", "ray", "diffusers", "peft")}
    return {"nftctl": __version__} | others
