"""A checkpoint is what its manifest says, or it is refused with the part by name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nftctl.errors import CheckpointUnusable
from nftctl.run.canonical import digest, pretty_bytes
from nftctl.run.checkpoints import partial_folder, step_name
from nftctl.run.manifest import Manifest, commit, in_words, read_manifest, verify, write_manifest
from nftctl.run.state import RunState
from nftctl.tensorblocks import SHARDING_KEY

from .make import TENSORS, make_manifest, safetensors_bytes, snapshot, write_checkpoint

POLICY = "state/shard-00001.safetensors"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints", 100)


def test_a_written_checkpoint_is_complete_and_read_back(step: Path) -> None:
    assert verify(step) == []
    manifest = read_manifest(step)
    assert manifest.run_state == RunState(step=100, optimizer_steps=100, cursor=400, policy_version=100)
    assert manifest.tensors["policy.a"] == {"dtype": "F32", "shape": [2, 3]}
    assert [entry["name"] for entry in manifest.files] == [POLICY, "state/shard-00002.safetensors"]
    assert step.name == "step_000100"
    assert (step.parent / "latest").readlink() == Path("step_000100")
    assert sorted(path.name for path in step.parent.iterdir()) == ["latest", "step_000100"]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file missing": (lambda p: (p / POLICY).unlink(), f"{POLICY}: missing"),
    "file truncated": (lambda p: os.truncate(p / POLICY, 50), f"{POLICY}: truncated (50 bytes"),
    "file grown": (lambda p: (p / POLICY).open("ab").write(b"x"), f"{POLICY}: too long"),
    "file extra": (lambda p: (p / "state/extra.bin").write_bytes(b"x"), "state/extra.bin: not in the manifest"),
    "file at the top": (lambda p: (p / "x.pkl").write_bytes(b"x"), "x.pkl: not in the manifest"),
    "link instead of a file": (
        lambda p: (p / POLICY).rename(p.parent / "elsewhere") and (p / POLICY).symlink_to(p.parent / "elsewhere"),
        f"{POLICY}: not a regular file",
    ),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
    "manifest cut": (lambda p: os.truncate(p / "manifest.json", 200), "is not JSON"),
    "manifest empty": (lambda p: (p / "manifest.json").write_bytes(b""), "is not JSON"),
    "manifest a list": (lambda p: (p / "manifest.json").write_bytes(b"[]"), "not a JSON object"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(step: Path, damage: Callable[[Path], Any], expected: str) -> None:
    damage(step)
    assert any(expected in problem for problem in verify(step, hashes=False))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_altered_byte_of_every_file_is_found(step: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([p for p in sorted(step.rglob("*")) if p.is_file()]))
    before, written = path.read_bytes(), read_manifest(step)
    at = data.draw(st.integers(0, len(before) - 1))
    flipped = before[at] ^ data.draw(st.integers(1, 255))
    path.write_bytes(before[:at] + bytes([flipped]) + before[at + 1 :])
    try:
        problems = verify(step)
        # White space of the manifest carries nothing, so it may change.
        assert any(path.name in problem for problem in problems) or (not problems and read_manifest(step) == written)
        assert problems or path.name == "manifest.json"
    finally:
        path.write_bytes(before)


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Forge the manifest, with its own digest made right again."""
    document = orjson.loads((folder / "manifest.json").read_bytes()) | changes
    document.pop("digest")
    (folder / "manifest.json").write_bytes(pretty_bytes(document | {"digest": digest(document)}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "nftctl-checkpoint/9"}, "format 'nftctl-checkpoint/9'"),
        ({"step": "100"}, "step is not a int"),
        ({"world_size": True}, "world_size is not a int"),
        ({"step": 99}, "step is impossible"),
        ({"world_size": 0}, "world_size or step is impossible"),
        ({"surprise": 1}, "unknown key surprise"),
        ({"state": {"step": 100}}, "lacks cursor"),
        ({"state": RunState(step=100, cursor=-4).to_dict()}, "cursor is -4"),
        ({"files": [{"name": "../../etc/passwd", "size": 1, "sha256": "0" * 64}]}, "malformed"),
        ({"files": [{"name": "/etc/passwd", "size": 1, "sha256": "0" * 64}]}, "malformed"),
        ({"files": [{"name": "state/x", "size": -1, "sha256": "0" * 64}]}, "malformed"),
        ({"files": ["state/x"]}, "malformed"),
        ({"tensors": {"a": {"dtype": "F32", "shape": [-1]}}}, "malformed"),
        ({"optimizer_entries": [1]}, "not a name"),
        ({"reward": ["digits"]}, "reward entry"),
    ],
)
def test_an_impossible_manifest_is_refused(step: Path, changes: dict[str, Any], expected: str) -> None:
    rewrite(step, changes)
    with pytest.raises(CheckpointUnusable, match=r"."):
        read_manifest(step)
    assert any(expected in problem for problem in verify(step))


def test_a_hand_edited_cursor_is_found(step: Path) -> None:
    path = step / "manifest.json"
    path.write_text(path.read_text().replace('"cursor": 400', '"cursor": 396'))
    assert verify(step) == [f"{path} was altered after it was written: it is not what its own digest stands for"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"identity": {"rl.seed": 4}}, "identity_hash is not the hash"),
        ({"optimizer_entries": ["a", "b"]}, "optimizer entry b: no tensor holds it"),
        ({"tensors": {}}, "tensor policy.a: not in the manifest"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_found(step: Path, changes: dict[str, Any], expected: str) -> None:
    rewrite(step, changes)
    assert any(expected in problem for problem in verify(step))


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("policy.", "tensor policy.a: missing, though old has it"),
        ("old.", "tensor old.a: missing, though policy has it"),
        ("optim.", "no optimizer state, though 100 optimizer steps were taken"),
    ],
)
def test_a_part_that_was_never_written_is_found(tmp_path: Path, gone: str, expected: str) -> None:
    """Files, hashes and lists agree with each other: what is missing was left out from the start."""
    partial = partial_folder(tmp_path, 100)
    (partial / "state").mkdir()
    kept = {n: e for n, e in TENSORS.items() if not n.startswith(gone)}
    content = {n: ("F32", e["shape"], bytes(4 * math.prod(e["shape"]))) for n, e in kept.items()}
    (partial / "state" / "shard-0.safetensors").write_bytes(safetensors_bytes(content))
    manifest = make_manifest(100, dict(kept))
    manifest.optimizer_entries = [] if gone == "optim." else ["a"]
    write_manifest(partial, manifest)
    assert verify(partial) == [expected]


def with_blocks(tmp_path: Path, blocks: list[tuple[list[int], list[int]]], shape: list[int]) -> list[str]:
    """Problems of a checkpoint with one tensor laid out as (offsets, shape) blocks, one file each."""
    partial = partial_folder(tmp_path, 1)
    (partial / "state").mkdir()
    for index, (offsets, size) in enumerate(blocks):
        count = 1
        for side in size:
            count *= side
        notes = {SHARDING_KEY: json.dumps({"w": {"saved_offsets": offsets}})}
        content = safetensors_bytes({"w": ("F32", size, bytes(4 * count))}, notes)
        (partial / "state" / f"shard-{index}.safetensors").write_bytes(content)
    manifest = make_manifest(1, {"w": {"dtype": "float32", "shape": shape}})
    manifest.optimizer_entries, manifest.state["optimizer_steps"] = [], 0
    try:
        write_manifest(partial, manifest)
    except CheckpointUnusable as error:
        return [error.message]
    return verify(partial)


def test_a_tensor_may_be_spread_over_files(tmp_path: Path) -> None:
    assert with_blocks(tmp_path, [([0, 0], [2, 3]), ([2, 0], [2, 3])], [4, 3]) == []


@pytest.mark.parametrize(
    "blocks",
    [
        [([0, 0], [2, 3])],
        [([0, 0], [2, 3]), ([0, 0], [2, 3])],
        [([0, 0], [2, 3]), ([3, 0], [2, 3])],
        [([0, 0], [3, 3]), ([1, 0], [1, 3])],
        [([0], [12])],
    ],
)
def test_holes_overlaps_and_edges_are_refused(tmp_path: Path, blocks: list[tuple[list[int], list[int]]]) -> None:
    (problem,) = with_blocks(tmp_path, blocks, [4, 3])
    assert "tensor w:" in problem


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({**TENSORS, "policy.b": {"dtype": "F32", "shape": [1]}}, "tensor policy.b: missing"),
        ({k: v for k, v in TENSORS.items() if k != "old.a"}, "tensor old.a: not in the manifest"),
        ({**TENSORS, "old.a": {"dtype": "F32", "shape": [3, 2]}}, "tensor old.a: shape"),
        ({**TENSORS, "old.a": {"dtype": "BF16", "shape": [2, 3]}}, "tensor old.a: dtype F32, the manifest says BF16"),
    ],
)
def test_a_state_that_is_not_what_was_announced_never_gets_a_manifest(
    tmp_path: Path, tensors: dict[str, dict[str, Any]], expected: str
) -> None:
    partial = write_checkpoint(tmp_path, 5, done=False)
    with pytest.raises(CheckpointUnusable, match=expected):
        write_manifest(partial, make_manifest(5, tensors))
    assert not (partial / "manifest.json").exists()


def test_numbers_that_are_not_finite_never_reach_the_manifest(tmp_path: Path) -> None:
    partial = write_checkpoint(tmp_path, 5, done=False)
    manifest = make_manifest(5, dict(TENSORS))
    manifest.metric_tail = [{"train/loss": float("nan")}]
    with pytest.raises(ValueError, match=r"metric_tail\[0\].train/loss is nan"):
        write_manifest(partial, manifest)


def test_a_folder_without_a_manifest_is_not_put_into_place(tmp_path: Path) -> None:
    partial = write_checkpoint(tmp_path, 5, done=False)
    with pytest.raises(CheckpointUnusable, match="not written to the end"):
        commit(partial, tmp_path / step_name(5))
    assert partial.exists()
    assert not (tmp_path / "latest").exists()


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    first = snapshot(write_checkpoint(tmp_path, 5))
    again = write_checkpoint(tmp_path, 5)
    assert snapshot(again) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000005"]


def test_the_manifest_is_the_last_file_written(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 5)
    times = {path.name: path.stat().st_mtime_ns for path in step.rglob("*.*") if path.is_file()}
    assert max(times, key=lambda name: times[name]) == "manifest.json"


def test_an_oversized_manifest_is_not_read(step: Path) -> None:
    os.truncate(step / "manifest.json", 1 << 30)
    assert "larger than" in verify(step)[0]


@given(st.binary(max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_make_the_reader_fail_in_another_way(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointUnusable):
        read_manifest(tmp_path)


def test_state_refuses_what_is_not_a_count() -> None:
    good = RunState(step=1).to_dict()
    assert RunState.from_dict(good) == RunState(step=1)
    for bad in (good | {"cursor": 1.0}, good | {"cursor": True}, good | {"more": 1}, {"step": 1}):
        with pytest.raises(CheckpointUnusable):
            RunState.from_dict(bad)


def test_manifest_types_cover_every_field() -> None:
    from nftctl.run import manifest as module

    assert set(module._TYPES) == set(Manifest.__dataclass_fields__)


@pytest.mark.parametrize("damage", ["missing", "truncated", "unreadable"])
def test_a_lost_file_stands_in_one_line_with_its_tensors(tmp_path: Path, damage: str) -> None:
    partial = partial_folder(tmp_path, 100)
    (partial / "state").mkdir()
    names = [f"{part}.{i}" for part in ("policy", "old") for i in range(40)]
    shard = partial / "state" / "shard-0.safetensors"
    shard.write_bytes(safetensors_bytes({name: ("F32", [1], bytes(4)) for name in names}))
    manifest = make_manifest(100, {name: {"dtype": "F32", "shape": [1]} for name in names})
    manifest.optimizer_entries, manifest.state["optimizer_steps"] = [], 0
    write_manifest(partial, manifest)
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    (problem,) = verify(partial, hashes=False)
    assert "state/shard-0.safetensors" in problem
    assert "so 80 of its tensors are missing or not whole (tensor old.0: missing, and 79 more)" in problem


def test_a_long_list_is_cut_with_the_number_of_the_rest() -> None:
    assert in_words(["a", "b", "c", "d"]) == "a; b; c; d"
    assert in_words(["a", "b", "c", "d", "e", "f"]) == "a; b; c; d; and 2 more"
