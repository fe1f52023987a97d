"""`nftctl inspect-checkpoint`: what a checkpoint holds and whether it is whole, on any machine and without torch.

A checkpoint that is not whole is shown as far as it can be read, every fault by name, and ends with exit code 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nftctl.cli.completion import runs_folder
from nftctl.cli.console import Console, shorten, table
from nftctl.errors import CheckpointUnusable, ExitCode, Finding

if TYPE_CHECKING:
    from nftctl.run.manifest import Manifest

SHOWN = 8
"""Faults that are printed one a line; the JSON object has all of them."""


def inspect(target: str, *, hashes: bool, tensors: bool, json: bool) -> None:
    """Print one checkpoint. Without `hashes`, presence, sizes and tensor headers are checked, not contents."""
    from nftctl.run.manifest import read_manifest, verify

    console = Console(json=json)
    folder = locate(target)
    problems = verify(folder, hashes=hashes)
    try:
        manifest = read_manifest(folder)
    except CheckpointUnusable as error:
        raise CheckpointUnusable(error.message, hint=error.hint or other_checkpoints(folder)) from error
    facts = facts_of(folder, manifest, hashes=hashes and not problems)
    for line in _lines(facts, manifest, whole=not problems, hashed=hashes):
        console.data(line)
    if tensors:
        for line in table([(n, t["dtype"], str(t["shape"])) for n, t in manifest.tensors.items()]):
            console.data(line)
    extra = {"tensors": manifest.tensors} if tensors else {}
    faults = [Finding("checkpoint-damaged", "", text, origin=str(folder)) for text in problems]
    code = ExitCode.CHECKPOINT if problems else ExitCode.OK
    console.findings(faults[:SHOWN])
    if len(faults) > SHOWN:
        console.say(f"and {len(faults) - SHOWN} more; --json lists them all")
    if problems:
        console.error(f"{folder} is not whole: {count(problems)}", other_checkpoints(folder))
    console.result(
        "inspect-checkpoint", faults, exit_code=code, complete=not problems, verified=hashes, checkpoint=facts, **extra
    )
    if code:
        raise typer.Exit(code)


def locate(target: str) -> Path:
    """The folder meant by `target`; unlike for resuming, a step folder may be damaged or lie outside a run."""
    from nftctl.run.checkpoints import list_partials, list_steps
    from nftctl.run.directory import find_checkpoint
    from nftctl.run.manifest import MANIFEST_NAME

    given = Path(target).expanduser()
    if (given / MANIFEST_NAME).is_file():
        return given
    for run in (given, runs_folder() / target):
        found = list_steps(run / "checkpoints")
        cut_off = list_partials(run / "checkpoints")
        if found and (found[-1][1] / MANIFEST_NAME).is_file() and (not cut_off or cut_off[-1][0] <= found[-1][0]):
            return found[-1][1]
    return find_checkpoint(target, runs_folder())[1]


def count(faults: Sequence[str]) -> str:
    """How many faults there are, in words."""
    return f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"


def other_checkpoints(folder: Path) -> str:
    """What to take instead of a damaged checkpoint."""
    from nftctl.run.checkpoints import newest_complete

    whole = newest_complete(folder.parent)
    return f"the newest complete one is {whole}" if whole else ""


def facts_of(folder: Path, manifest: Manifest, *, hashes: bool) -> dict[str, Any]:
    """Everything about a checkpoint but its tensors, as the JSON object has it."""
    return {
        "path": str(folder),
        "run_id": manifest.run_id,
        "step": manifest.step,
        "state": manifest.state,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "identity": manifest.identity_hash,
        "seed_contract": manifest.seed_contract,
        "reward": manifest.reward,
        "schedule": manifest.schedule,
        "optimizer_entries": len(manifest.optimizer_entries),
        "copies": _copies(folder, manifest, hashes=hashes),
        "files": {"count": len(manifest.files), "bytes": sum(entry["size"] for entry in manifest.files)},
        "versions": manifest.versions,
    }


def _copies(folder: Path, manifest: Manifest, *, hashes: bool) -> dict[str, dict[str, Any]]:
    """Policy, moving old and average by size and version; with `hashes` also by content: equal weights look equal."""
    from nftctl.run.tensors import content_hash

    state = manifest.state
    versions = {"policy": state.get("policy_version"), "old": state.get("old_version"), "ema": None}
    copies: dict[str, dict[str, Any]] = {}
    for name, version in versions.items():
        own = {key: entry for key, entry in manifest.tensors.items() if key.startswith(f"{name}.")}
        numbers = sum(math.prod(entry["shape"]) for entry in own.values())
        copies[name] = {"tensors": len(own), "numbers": numbers}
        if name != "ema":  # the average moves with every step and counts none
            copies[name] = {"version": version, **copies[name]}
        if hashes:
            copies[name]["sha256"] = content_hash(folder, manifest.files, f"{name}.")
    copies["old"]["refreshes"] = state.get("old_refreshes")
    if not copies["ema"]["tensors"]:
        del copies["ema"]
    copies["reference"] = {"base": manifest.identity.get("base.fingerprint")}
    return copies


def _lines(facts: dict[str, Any], manifest: Manifest, *, whole: bool, hashed: bool) -> list[str]:
    verdict = "complete" if whole else "NOT WHOLE"
    state, files = facts["state"], facts["files"]
    rows = [
        ("checkpoint", facts["path"]),
        ("state", f"{verdict} ({'every byte hashed' if hashed else 'sizes and headers; --verify hashes contents'})"),
        ("step", f"{facts['step']} rollouts, {state['optimizer_steps']} optimizer steps"),
        ("cursor", f"{state['cursor']} prompt rows consumed"),
        *((name, _copy_line(copy, manifest)) for name, copy in facts["copies"].items()),
        ("optimizer", f"state of {facts['optimizer_entries']} parameters"),
        ("reward", ", ".join(f"{r.get('name')} at revision {shorten(r.get('revision'))}" for r in facts["reward"])),
        ("identity", facts["identity"]),
        ("seeds", ", ".join(f"{key} {shorten(value, 24) or 'empty'}" for key, value in manifest.seed_contract.items())),
        ("ranks", str(facts["world_size"])),
        ("run", facts["run_id"]),
        ("written", f"{facts['created']} by " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items())),
        ("files", f"{files['count']} files, {files['bytes']:,} bytes, {len(manifest.tensors)} tensors"),
    ]
    return table(rows)


def _copy_line(copy: dict[str, Any], manifest: Manifest) -> str:
    if "base" in copy:
        full = manifest.identity.get("model.train") == "full"
        return f"the base{'' if full else ' with adapters off'}, {shorten(copy['base'])}"
    text = f"version {copy['version']}, " if "version" in copy else ""
    text += f"{copy['numbers']:,} numbers in {copy['tensors']} tensors"
    text += f", refreshed {copy['refreshes']} times" if "refreshes" in copy else ""
    return text + (f", sha256 {shorten(copy['sha256'])}" if "sha256" in copy else "")
