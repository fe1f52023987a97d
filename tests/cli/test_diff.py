"""`inspect-checkpoint --diff`: what people and scripts read about two checkpoints; a damaged one is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nftctl.run.identity import fingerprint
from nftctl.run.manifest import write_manifest
from tests.run.make import IDENTITY, SEEDS, make_manifest, make_run, safetensors_bytes, snapshot

from .program import HEAVY, nftctl, the_object
from .test_imports import modules

RECORD = Path(__file__).parent / "snapshots" / "diff.txt"


def make_pair(folder: Path) -> None:
    """The run `tiny` with a checkpoint at step 100, and the folder `other` with one that differs in everything."""
    make_run(folder / "runs", steps=(100,))
    tensors = {
        "policy.a": ("F32", [2, 3], np.array([0, 0, 0.5, 0, -0.125, 0], "<f4").tobytes()),
        "old.a": ("F32", [3, 2], bytes(range(24))),
        "optim.a.step": ("F32", [], np.float32(7).tobytes()),
        "optim.a.exp_avg": ("F32", [1], bytes(4)),
    }
    other = folder / "other"
    (other / "state").mkdir(parents=True)
    (other / "state" / "shard-00001.safetensors").write_bytes(safetensors_bytes(tensors))
    manifest = make_manifest(
        50, {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape, _) in tensors.items()}
    )
    identity = IDENTITY | {"rl.seed": 4, "rl.beta": 2.0, "reward.providers": ["digits", "clip"]}
    write_manifest(
        other,
        replace(
            manifest, run_id="fedcba9876543210", identity=identity, identity_hash=fingerprint(identity),
            seed_contract=SEEDS | {"rl.seed": 4}, schedule={"lr": 2e-3}, world_size=8, versions={"nftctl": "0.2.0"},
            reward=[{"name": "digits", "revision": "r2"}, {"name": "clip", "revision": "c1"}],
            metric_tail=[{"step": 100, "train/reward_mean": 0.75}],
        ),
    )  # fmt: skip


def test_what_people_read(tmp_path: Path) -> None:
    make_pair(tmp_path)
    before = snapshot(tmp_path)
    answer = nftctl("inspect-checkpoint", "tiny", "--diff", "other", "--tensors", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == RECORD.read_text()
    assert snapshot(tmp_path) == before


def test_what_scripts_read(tmp_path: Path) -> None:
    make_pair(tmp_path)
    document = the_object(nftctl("inspect-checkpoint", "tiny", "--diff", "other", "--tensors", "--json", cwd=tmp_path))
    assert list(document)[5:] == ["complete", "verified", "checkpoint", "other", "diff"]
    assert (document["checkpoint"]["step"], document["other"]["step"]) == (100, 50)
    diff = document["diff"]
    assert list(diff) == [
        "equal", "run", "step", "state", "identity", "seed_contract", "reward", "ranks", "schedule", "versions",
        "metrics", "tensors",
    ]  # fmt: skip
    assert diff["equal"] is False
    assert diff["step"] == [{"key": "step", "this": 100, "other": 50}]
    assert diff["ranks"] == [{"key": "world_size", "this": 2, "other": 8}]
    assert diff["reward"] == [
        {"key": "clip", "this": "(absent)", "other": "c1"}, {"key": "digits", "this": "r1", "other": "r2"},
    ]  # fmt: skip
    assert [entry["key"] for entry in diff["identity"]] == ["reward.providers", "rl.beta", "rl.seed"]
    tensors = diff["tensors"]
    assert list(tensors) == ["only_in_this", "only_in_other", "other_form", "parts", "differing"]
    assert tensors["only_in_other"] == ["optim.a.exp_avg"]
    assert [entry["name"] for entry in tensors["other_form"]] == ["old.a"]
    assert tensors["parts"]["policy"] == {
        "tensors": 1, "differing": 1, "max_abs_difference": 0.5, "where": "policy.a", "not_finite": 0,
    }  # fmt: skip
    assert tensors["differing"] == [
        {"name": "optim.a.step", "numbers": 1, "max_abs_difference": 7.0, "not_finite": 0},
        {"name": "policy.a", "numbers": 2, "max_abs_difference": 0.5, "not_finite": 0},
    ]


@pytest.mark.parametrize("other", ["second", "runs/second", "runs/second/checkpoints", "copy"])
def test_equal_ones_are_said_to_be_equal_however_they_are_named(tmp_path: Path, other: str) -> None:
    make_run(tmp_path / "runs", steps=(100,))
    second = make_run(tmp_path / "runs", "second", steps=(100,))
    shutil.copytree(second.checkpoints / "step_000100", tmp_path / "copy")
    answer = nftctl("inspect-checkpoint", "tiny", "--diff", other, cwd=tmp_path)
    assert answer.returncode == 0
    assert "verdict  equal to the bit in everything promised" in answer.stdout
    document = the_object(nftctl("inspect-checkpoint", "tiny", "--diff", other, "--json", cwd=tmp_path))
    assert document["diff"]["equal"] is True


@pytest.mark.parametrize("order", [("tiny", "second"), ("second", "tiny")])
def test_a_damaged_one_is_refused_by_name(tmp_path: Path, order: tuple[str, str]) -> None:
    """A flipped byte of a tensor is damage, and never a difference."""
    make_run(tmp_path / "runs", steps=(100,))
    shard = (
        make_run(tmp_path / "runs", "second", steps=(100,)).checkpoints / "step_000100/state/shard-00002.safetensors"
    )
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    answer = nftctl("inspect-checkpoint", order[0], "--diff", order[1], cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (5, "")
    assert "error: runs/second/checkpoints/step_000100 is not whole" in answer.stderr
    assert "error: runs/tiny" not in answer.stderr
    document = the_object(nftctl("inspect-checkpoint", order[0], "--diff", order[1], "--json", cwd=tmp_path))
    assert document["complete"] is False
    assert [(d["code"], d["origin"]) for d in document["diagnostics"]] == [
        ("checkpoint-damaged", "runs/second/checkpoints/step_000100")
    ]


def test_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", steps=(100,))
    answer = nftctl("inspect-checkpoint", "tiny", "--diff", "nowhere", cwd=tmp_path)
    assert answer.returncode == 5
    assert "no checkpoint, run folder or run named nowhere" in answer.stderr


def test_numpy_is_all_that_is_needed(tmp_path: Path) -> None:
    make_pair(tmp_path)
    code, found = modules(tmp_path, "inspect-checkpoint", "tiny", "--diff", "other")
    assert code == 0
    assert "numpy" in found
    assert not found & {*HEAVY, "rich", "filelock", "aiohttp", "pydantic"}
