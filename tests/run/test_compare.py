"""What differs between two checkpoints: facts by key, numbers by content, whatever files and blocks they lie in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nftctl.errors import CheckpointUnusable
from nftctl.run import compare as module
from nftctl.run.compare import Change, compare
from nftctl.run.manifest import Manifest, read_manifest, write_manifest

from .make import make_manifest, safetensors_bytes

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "BOOL": "?"}
Parts = dict[str, list[tuple[tuple[int, ...], npt.NDArray[Any]]]]
"""Tensor -> its blocks, each with its offsets; a block's place in the list is the file it lies in."""


def write(folder: Path, parts: Parts, dtype: str = "F32", **changed: Any) -> tuple[Path, Manifest]:
    """A whole checkpoint whose tensors all have one dtype; `changed` replaces fields of its manifest."""
    (folder / "state").mkdir(parents=True)
    shapes: dict[str, list[int]] = {}
    files: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, blocks in parts.items():
        ends = [[o + s for o, s in zip(offsets, block.shape, strict=True)] for offsets, block in blocks]
        shapes[name] = [max(side) for side in zip(*ends, strict=True)]
        for number, (offsets, block) in enumerate(blocks):
            tensors, sharding = files.setdefault(number, ({}, {}))
            tensors[name] = (dtype, list(block.shape), block.tobytes())
            sharding[name] = {"saved_offsets": list(offsets)}
    for number, (tensors, sharding) in files.items():
        content = safetensors_bytes(tensors, {"DCP_SHARDING_INFO": json.dumps(sharding)})
        (folder / "state" / f"shard-{number}.safetensors").write_bytes(content)
    announced = {name: {"dtype": dtype, "shape": shape} for name, shape in shapes.items()}
    manifest = replace(make_manifest(3, announced), optimizer_entries=[], **changed)
    write_manifest(folder, manifest)
    return folder, read_manifest(folder)


def whole(value: npt.NDArray[Any]) -> list[tuple[tuple[int, ...], npt.NDArray[Any]]]:
    return [((0,) * value.ndim, value)]


def changes(tmp_path: Path, this: Parts, other: Parts, dtype: str = "F32") -> dict[str, Change]:
    return compare(*write(tmp_path / "this", this, dtype), *write(tmp_path / "other", other, dtype)).changes


@pytest.mark.parametrize("slab", [1, 4, 1 << 22])
def test_other_layouts_are_compared_by_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: int
) -> None:
    """Rows over two ranks against columns over three: no block of one is a block of the other."""
    monkeypatch.setattr(module, "SLAB", slab)
    a = np.arange(42, dtype="<f4").reshape(7, 6)
    b = a.copy()
    b[4, 1] += 0.25
    b[0, 5] -= 2.0
    rows = [((0, 0), a[:4].copy()), ((4, 0), a[4:].copy())]
    same = {"policy.w": [((0, n), np.ascontiguousarray(a[:, n : n + 2])) for n in (0, 2, 4)]}
    moved = {"policy.w": [((0, n), np.ascontiguousarray(b[:, n : n + 2])) for n in (0, 2, 4)]}
    assert changes(tmp_path / "1", {"policy.w": rows}, same) == {}
    assert changes(tmp_path / "2", {"policy.w": rows}, moved) == {"policy.w": Change(2, 2.0, 0)}


@pytest.mark.parametrize(
    ("dtype", "this", "other", "expected"),
    [
        ("F32", [1.0, 2.0, 3.0], [1.0, 2.5, 3.0], Change(1, 0.5, 0)),
        ("F64", [1.0, 1e-300], [1.0, 0.0], Change(1, 1e-300, 0)),
        ("F16", [1.0, 2.0], [1.5, 2.0], Change(1, 0.5, 0)),
        # Equal numbers of other bits are a difference, of size zero.
        ("F32", [0.0, 1.0], [-0.0, 1.0], Change(1, 0.0, 0)),
        ("F32", [np.nan, 1.0, 2.0], [0.0, np.inf, 2.25], Change(3, 0.25, 2)),
        ("F32", [np.nan], [np.nan], None),
        ("I64", [1, 2], [1, 9], Change(1, None, 0)),
        ("BOOL", [True, False], [True, True], Change(1, None, 0)),
    ],
)
def test_how_much_numbers_differ(
    tmp_path: Path, dtype: str, this: list[float], other: list[float], expected: Change | None
) -> None:
    sides = ({"old.a": whole(np.array(side, NUMPY[dtype]))} for side in (this, other))
    assert changes(tmp_path, *sides, dtype).get("old.a") == expected


def test_bf16_is_read_by_its_bits(tmp_path: Path) -> None:
    # 0x3F80 is 1, 0x3F81 is 1 + 2^-7, 0xC000 is -2, 0x4000 is 2.
    this, other = (np.array(bits, "<u2") for bits in ([0x3F80, 0xC000, 0x3F80], [0x3F81, 0x4000, 0x3F80]))
    found = changes(tmp_path, {"policy.a": whole(this)}, {"policy.a": whole(other)}, "BF16")
    assert found == {"policy.a": Change(2, 4.0, 0)}


def test_a_number_without_dimensions_and_an_empty_tensor(tmp_path: Path) -> None:
    this = {"optim.a.step": whole(np.array(3, "<f4")), "policy.none": whole(np.zeros((0, 2), "<f4"))}
    other = this | {"optim.a.step": whole(np.array(5, "<f4"))}
    assert changes(tmp_path, this, other) == {"optim.a.step": Change(1, 2.0, 0)}


def test_tensors_of_one_side_or_of_another_form_are_listed_and_not_compared(tmp_path: Path) -> None:
    ones = np.ones((2, 3), "<f4")
    this = {"policy.a": whole(ones), "policy.b": whole(ones), "old.a": whole(ones)}
    other = {"policy.a": whole(ones.reshape(3, 2)), "old.a": whole(ones), "optim.a.exp_avg": whole(ones)}
    found = compare(*write(tmp_path / "this", this), *write(tmp_path / "other", other))
    assert (found.only_in_this, found.only_in_other) == (["policy.b"], ["optim.a.exp_avg"])
    assert found.other_form == [
        {"name": "policy.a", "this": {"dtype": "F32", "shape": [2, 3]}, "other": {"dtype": "F32", "shape": [3, 2]}}
    ]
    assert found.compared == ["old.a"]
    assert not found.equal


def test_parts_say_how_many_differ_and_where_most(tmp_path: Path) -> None:
    ones = np.ones(3, "<f4")
    names = ("policy.a", "policy.b", "policy.c", "old.a", "optim.a.step")
    this = {name: whole(ones) for name in names}
    other = this | {"policy.a": whole(ones * 2), "policy.c": whole(ones * 4), "optim.a.step": whole(ones * np.nan)}
    parts = compare(*write(tmp_path / "this", this), *write(tmp_path / "other", other)).parts()
    assert list(parts) == ["policy", "old", "optim"]
    assert parts["policy"] == {
        "tensors": 3, "differing": 2, "max_abs_difference": 3.0, "where": "policy.c", "not_finite": 0,
    }  # fmt: skip
    assert (parts["old"]["differing"], parts["old"]["max_abs_difference"]) == (0, None)
    assert (parts["optim"]["differing"], parts["optim"]["not_finite"]) == (1, 3)


STATE = make_manifest(3, {}).state


@pytest.mark.parametrize(
    ("section", "changed", "promised"),
    [
        ("run", {"run_id": "another"}, False),
        ("versions", {"versions": {"nftctl": "9"}}, False),
        (None, {"created": "2027-01-01T00:00:00Z"}, False),
        (None, {"metric_tail": [{"step": 3, "train/reward_mean": 0.5, "timer/step": 1.0, "system/x": 2.0}]}, False),
        (None, {"metric_tail": [{"step": 4, "train/reward_mean": 0.7}]}, False),
        ("metrics", {"metric_tail": [{"step": 3, "train/reward_mean": 0.7}]}, True),
        ("state", {"state": STATE | {"cursor": 8}}, True),
        ("ranks", {"world_size": 4}, True),
        ("seed_contract", {"seed_contract": {"rl.seed": 4, "data.prompt_hash": "ab"}}, True),
        ("reward", {"reward": [{"name": "digits", "revision": "r2"}]}, True),
        ("schedule", {"schedule": {"lr": 1e-3, "warmup_steps": 5}}, True),
    ],
)
def test_facts_that_differ_have_their_section_and_only_promised_ones_count(
    tmp_path: Path, section: str | None, changed: dict[str, Any], promised: bool
) -> None:
    parts = {"policy.a": whole(np.ones(2, "<f4"))}
    found = compare(*write(tmp_path / "this", parts), *write(tmp_path / "other", parts, **changed))
    assert [name for name, entries in found.facts.items() if entries] == ([section] if section else [])
    assert found.equal is not promised


def test_a_file_that_goes_away_meanwhile_is_a_checkpoint_error(tmp_path: Path) -> None:
    parts = {"policy.a": whole(np.ones(2, "<f4"))}
    this, other = write(tmp_path / "this", parts), write(tmp_path / "other", parts)
    (other[0] / "state" / "shard-0.safetensors").unlink()
    with pytest.raises(CheckpointUnusable, match=r"shard-0\.safetensors"):
        compare(*this, *other)
