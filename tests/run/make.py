"""Small, real checkpoints for tests: safetensors files written by hand, byte for byte as the format says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from nftctl.run.checkpoints import partial_folder, step_name
from nftctl.run.directory import RunDirectory
from nftctl.run.identity import fingerprint
from nftctl.run.manifest import Manifest, commit, write_manifest
from nftctl.run.state import RunState

IDENTITY = {"rl.seed": 3, "rl.beta": 1.0, "reward.providers": ["digits"], "data.prompt_hash": "ab"}
SEEDS = {"rl.seed": 3, "data.prompt_hash": "ab"}


def safetensors_bytes(
    tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None
) -> bytes:
    """A safetensors file from (dtype, shape, data) entries."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return raw_file(json.dumps(header).encode(), data)


def raw_file(header: bytes, data: bytes = b"") -> bytes:
    """Header length, header, data, whatever they are."""
    return struct.pack("<Q", len(header)) + header + data


def make_manifest(step: int, tensors: dict[str, dict[str, Any]]) -> Manifest:
    """A manifest of a run of one rank."""
    return Manifest(
        run_id="0123456789abcdef",
        step=step,
        state=RunState(step=step, optimizer_steps=step, cursor=4 * step, policy_version=step).to_dict(),
        world_size=2,
        identity=dict(IDENTITY),
        identity_hash=fingerprint(IDENTITY),
        seed_contract=dict(SEEDS),
        reward=[{"name": "digits", "revision": "r1"}],
        schedule={"lr": 1e-3},
        optimizer_entries=["a"],
        tensors=tensors,
        created="2026-11-29T00:00:00Z",
        versions={"nftctl": "0.1.0"},
        metric_tail=[{"step": step, "train/reward_mean": 0.5}],
    )


TENSORS = {
    "policy.a": {"dtype": "torch.float32", "shape": [2, 3]},
    "old.a": {"dtype": "torch.float32", "shape": [2, 3]},
    "optim.a.step": {"dtype": "torch.float32", "shape": []},
}


def write_checkpoint(checkpoints: Path, step: int, *, done: bool = True) -> Path:
    """A whole checkpoint of three tensors in two files; `done=False` stops before the rename."""
    partial = partial_folder(checkpoints, step)
    (partial / "state").mkdir()
    policy = {"policy.a": ("F32", [2, 3], bytes(24)), "optim.a.step": ("F32", [], bytes(4))}
    (partial / "state" / "shard-00001.safetensors").write_bytes(safetensors_bytes(policy))
    old = {"old.a": ("F32", [2, 3], bytes(range(24)))}
    (partial / "state" / "shard-00002.safetensors").write_bytes(safetensors_bytes(old))
    if not done:
        return partial
    write_manifest(partial, make_manifest(step, dict(TENSORS)))
    final = checkpoints / step_name(step)
    commit(partial, final)
    return final


def make_run(parent: Path, name: str = "tiny", steps: tuple[int, ...] = ()) -> RunDirectory:
    """A run folder with whole checkpoints at `steps`."""
    record = {"run_id": "0123456789abcdef", "identity": fingerprint(IDENTITY)}
    run = RunDirectory.create(parent, name, profile_text="[rl]\nbeta = 1.0\n", resolved={"rl": {}}, record=record)
    for step in steps:
        write_checkpoint(run.checkpoints, step)
    return run


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every file's content and every link's target below `folder`."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
