"""The manifest that makes a folder of tensors a checkpoint, and the proof that nothing in it is missing or changed.

A checkpoint is complete when `manifest.json` is there and true. It is written last, after everything else is on the
disk, and the folder is renamed into place afterwards. Refuses to read a manifest that is malformed, altered or newer.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from nftctl.errors import CheckpointUnusable
from nftctl.run.canonical import digest, pretty_bytes
from nftctl.run.disk import atomic_write, point_link, sync_folder, sync_tree
from nftctl.run.hashing import hash_file
from nftctl.run.identity import fingerprint
from nftctl.run.state import RunState
from nftctl.run.tensors import compare_tensors
from nftctl.tensorfile import DTYPE_NAMES

FORMAT = "nftctl-checkpoint/1"
STATE_FOLDER = "state"
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
SHOWN = 4
"""Faults of a damaged checkpoint that one message names."""


@dataclass(slots=True)
class Manifest:
    """Everything about a checkpoint that is not a tensor."""

    run_id: str
    """Random id of the run, given at its birth."""
    step: int
    """Rollouts completed."""
    state: dict[str, int]
    """`RunState.to_dict()`."""
    world_size: int
    """Ranks that wrote it."""
    identity: dict[str, Any]
    """Identity document."""
    identity_hash: str
    """Its fingerprint."""
    seed_contract: dict[str, Any]
    """Seed contract document."""
    reward: list[dict[str, Any]] = field(default_factory=list)
    """`{name, revision}` of each provider."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Learning-rate and old-policy schedule at this step."""
    optimizer_entries: list[str] = field(default_factory=list)
    """Parameters that have optimizer state."""
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`{dtype, shape}` of each whole tensor. Example: `{"policy.a": {"dtype": "F32", "shape": [16, 64]}}`."""
    files: list[dict[str, Any]] = field(default_factory=list)
    """`{name, size, sha256}` of each file; filled by `write_manifest`."""
    created: str = ""
    """Time of writing, ISO 8601."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of nftctl, torch and others that wrote it."""
    metric_tail: list[dict[str, Any]] = field(default_factory=list)
    """The last metric rows, so that a resumed run joins them without a gap."""
    format: str = FORMAT

    @property
    def run_state(self) -> RunState:
        """The counters. Raises CheckpointUnusable when they are not counts."""
        return RunState.from_dict(self.state)


_TYPES: dict[str, type] = {
    "run_id": str, "step": int, "state": dict, "world_size": int, "identity": dict, "identity_hash": str,
    "seed_contract": dict, "reward": list, "schedule": dict, "optimizer_entries": list, "tensors": dict, "files": list,
    "created": str, "versions": dict, "metric_tail": list, "format": str,
}  # fmt: skip


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Hash every file of `folder`, force all of it to the disk, then write manifest.json last.

    Dtypes may be given in torch's spelling. Raises CheckpointUnusable when the files are not what `manifest.tensors`
    announces: a checkpoint that could not be resumed must not look complete.
    """
    manifest.tensors = {name: _plain_tensor(entry) for name, entry in manifest.tensors.items()}
    manifest.files = [
        {"name": name, "size": (folder / name).stat().st_size, "sha256": hash_file(folder / name)}
        for name in _listed(folder)
    ]
    problems = _tensor_problems(folder, manifest)
    if problems:
        raise CheckpointUnusable(f"the checkpoint written to {folder} is not whole: {in_words(problems)}")
    sync_tree(folder)
    document = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    atomic_write(folder / MANIFEST_NAME, pretty_bytes(document | {"digest": digest(document)}))


def commit(partial: Path, final: Path) -> None:
    """Rename a written checkpoint into place and point `latest` at it. `partial` must hold a manifest."""
    if not (partial / MANIFEST_NAME).is_file():
        raise CheckpointUnusable(f"{partial} has no {MANIFEST_NAME}: it was not written to the end")
    replaced = final.with_name(f".replaced-{final.name}")
    if final.exists():
        # A run that was resumed from an older checkpoint writes this step a second time.
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    point_link(final.parent / "latest", final.name)
    shutil.rmtree(replaced, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest:
    """Read and check manifest.json. Raises CheckpointUnusable when it is missing, malformed, altered or newer."""
    path = folder / MANIFEST_NAME
    document, raw = _read_document(path)
    found_format = document.get("format")
    if found_format != FORMAT:
        raise CheckpointUnusable(f"{path} has format {found_format!r}; this nftctl reads {FORMAT!r}")
    stated = document.pop("digest", None)
    for problem in _shape_problems(document):
        raise CheckpointUnusable(f"{path}: {problem}")
    # The second half finds what leaves the document as it was, such as a last byte that is missing.
    if stated != digest(document) or raw != pretty_bytes(document | {"digest": stated}):
        raise CheckpointUnusable(f"{path} was altered after it was written: it is not what its own digest stands for")
    manifest = Manifest(**document)
    manifest.run_state  # noqa: B018 - reading it checks the counters
    return manifest


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """Everything that keeps `folder` from being the checkpoint that was written; empty when it is complete.

    Without `hashes`, contents are not read: presence, sizes and tensor headers only.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointUnusable as error:
        return [error.message]
    listed = {entry["name"] for entry in manifest.files}
    problems = _content_problems(folder, manifest, hashes)
    problems += [f"{name}: not in the manifest" for name in _listed(folder) if name not in listed]
    problems += _part_problems(manifest)
    if manifest.identity_hash != fingerprint(manifest.identity):
        problems.append("manifest.json: identity_hash is not the hash of the identity")
    return problems


def in_words(faults: list[str]) -> str:
    """The first few faults in one line, and how many more there are."""
    more = len(faults) - SHOWN
    return "; ".join(faults[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def read_whole(folder: Path, *, hashes: bool = True) -> Manifest:
    """The manifest of a checkpoint whose every byte is the one that was written; else CheckpointUnusable.

    Without `hashes` only what `verify` finds without them is refused.
    """
    faults = verify(folder, hashes=hashes)
    if faults:
        raise CheckpointUnusable(
            f"{folder} is damaged: {in_words(faults)}",
            hint="choose another step folder; "
            f"`nftctl inspect-checkpoint {shlex.quote(str(folder))} --verify --json` lists every fault",
        )
    return read_manifest(folder)


def _read_document(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointUnusable(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
        raw = path.read_bytes()
        document = orjson.loads(raw)
    except FileNotFoundError as error:
        raise CheckpointUnusable(f"{path.parent} is not a complete checkpoint: no {path.name}") from error
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise CheckpointUnusable(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointUnusable(f"{path} is not a JSON object")
    return document, raw


def _shape_problems(document: Mapping[str, Any]) -> list[str]:
    """What keeps a document from being a manifest, in the order in which it can be checked."""
    names = {f.name for f in fields(Manifest)}
    if set(document) != names:
        missing, unknown = sorted(names - set(document)), sorted(set(document) - names)
        return [f"lacks {name}" for name in missing] + [f"has the unknown key {name}" for name in unknown]
    wrong = [f"{name} is not a {kind.__name__}" for name, kind in _TYPES.items() if type(document[name]) is not kind]
    if wrong:
        return wrong
    wrong = [f"files entry {entry!r} is malformed" for entry in document["files"] if not _is_file_entry(entry)]
    wrong += [f"tensors entry {n!r} is malformed" for n, e in document["tensors"].items() if not _is_tensor_entry(e)]
    wrong += [f"reward entry {entry!r} is malformed" for entry in document["reward"] if not isinstance(entry, dict)]
    if not all(isinstance(entry, str) for entry in document["optimizer_entries"]):
        wrong.append("optimizer_entries holds something that is not a name")
    if document["world_size"] < 1 or document["step"] != document["state"].get("step"):
        wrong.append("world_size or step is impossible")
    return wrong


def _is_file_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"name", "size", "sha256"}:
        return False
    name, size, sha256 = entry["name"], entry["size"], entry["sha256"]
    if not isinstance(name, str) or not isinstance(sha256, str) or type(size) is not int:
        return False
    parts = name.split("/")
    # A manifest from elsewhere must not make us read outside its folder.
    inside = not name.startswith("/") and all(part not in {"", ".", ".."} for part in parts) and "\0" not in name
    return inside and size >= 0 and len(sha256) == 64


def _is_tensor_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape"} or not isinstance(entry["dtype"], str):
        return False
    shape = entry["shape"]
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _plain_tensor(entry: Mapping[str, Any]) -> dict[str, Any]:
    dtype = str(entry["dtype"]).removeprefix("torch.")
    return {"dtype": DTYPE_NAMES.get(dtype, dtype), "shape": [int(size) for size in entry["shape"]]}


def _listed(folder: Path) -> list[str]:
    """Everything below `folder` that is not a folder, but for the manifest, as sorted relative names."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST_NAME)


def _file_problem(folder: Path, entry: Mapping[str, Any], hashes: bool) -> str:
    name, path = entry["name"], folder / entry["name"]
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return f"{name}: not a regular file"
    if not path.exists():
        return f"{name}: missing"
    size = path.stat().st_size
    if size != entry["size"]:
        kind = "truncated" if size < entry["size"] else "too long"
        return f"{name}: {kind} ({size} bytes, {entry['size']} written)"
    if hashes and hash_file(path) != entry["sha256"]:
        return f"{name}: altered (sha256 differs)"
    return ""


def _content_problems(folder: Path, manifest: Manifest, hashes: bool) -> list[str]:
    """Faults of files and tensors. Many tensors that are gone because files are share the line of the last of those."""
    files = {e["name"]: text for e in manifest.files if (text := _file_problem(folder, e, hashes))}
    tensors = _tensor_problems(folder, manifest)
    # A file that cannot be read is a file's fault too, unless that file has one already.
    unread = {e["name"]: text for e in manifest.files for text in tensors if text.startswith(f"{e['name']} is not a ")}
    tensors = [text for text in tensors if text not in unread.values()]
    files = unread | files
    lost = [name for name in files if name in unread or not (folder / name).is_file()]
    gone = [text for text in tensors if text.startswith("tensor ") and not text.endswith(": not in the manifest")]
    if lost and len(gone) > SHOWN:
        whose = "its tensors" if len(lost) == 1 else f"the tensors of these {len(lost)} files"
        said = f"so {len(gone)} of {whose} are missing or not whole ({gone[0]}, and {len(gone) - 1} more)"
        files[lost[-1]] += f", {said}"
        tensors = [text for text in tensors if text not in gone]
    return [*files.values(), *tensors]


def _tensor_problems(folder: Path, manifest: Manifest) -> list[str]:
    names = [entry["name"] for entry in manifest.files if entry["name"].endswith(".safetensors")]
    paths = [path for name in names if (path := folder / name).is_file() and not path.is_symlink()]
    problems = compare_tensors(paths, manifest.tensors, root=folder)
    held = {name.removeprefix("optim.").rpartition(".")[0] for name in manifest.tensors if name.startswith("optim.")}
    stateless = [name for name in manifest.optimizer_entries if name not in manifest.tensors and name not in held]
    return problems + [f"optimizer entry {entry}: no tensor holds it" for entry in stateless]


def _part_problems(manifest: Manifest) -> list[str]:
    """Parts without which a run would go on as another one, however sound the rest is."""
    policy, old = (
        {name.removeprefix(part) for name in manifest.tensors if name.startswith(part)} for part in ("policy.", "old.")
    )
    problems = [f"tensor policy.{name}: missing, though old has it" for name in sorted(old - policy)]
    problems += [f"tensor old.{name}: missing, though policy has it" for name in sorted(policy - old)]
    steps = manifest.state["optimizer_steps"]
    if steps and not manifest.optimizer_entries:
        problems.append(f"no optimizer state, though {steps} optimizer steps were taken")
    return problems
