"""`inspect-checkpoint`: what is there, whether it is whole, and every fault by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nftctl.run.identity import fingerprint
from tests.run.make import IDENTITY, TENSORS, make_manifest, make_run, snapshot, write_checkpoint

from .program import nftctl, the_object

FACTS = [
    "path", "run_id", "step", "state", "world_size", "created", "identity", "seed_contract", "reward", "schedule",
    "optimizer_entries", "copies", "files", "versions",
]  # fmt: skip


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=(50, 100))
    before = snapshot(run.path)
    document = the_object(nftctl("inspect-checkpoint", "tiny", "--json", cwd=tmp_path))
    assert (document["complete"], document["verified"]) == (True, False)
    facts = document["checkpoint"]
    assert list(facts) == FACTS
    assert (facts["step"], facts["state"]["cursor"], facts["world_size"]) == (100, 400, 2)
    assert facts["identity"] == fingerprint(IDENTITY)
    assert facts["reward"] == [{"name": "digits", "revision": "r1"}]
    assert facts["copies"]["policy"] == {"version": 100, "tensors": 1, "numbers": 6}
    assert facts["copies"]["old"] == {"version": 0, "tensors": 1, "numbers": 6, "refreshes": 0}
    assert "tensors" not in document
    assert snapshot(run.path) == before


def test_contents_are_hashed_and_tensors_listed_when_asked_for(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", steps=(100,))
    arguments = ("inspect-checkpoint", "runs/tiny", "--verify", "--tensors")
    document = the_object(nftctl(*arguments, "--json", cwd=tmp_path))
    assert document["verified"] is True
    assert document["tensors"]["old.a"] == {"dtype": "F32", "shape": [2, 3]}
    copies = document["checkpoint"]["copies"]
    # policy.a is zeros and old.a counts from 0 to 23, so they must not look alike.
    assert copies["policy"]["sha256"] != copies["old"]["sha256"]
    shown = nftctl(*arguments, cwd=tmp_path).stdout
    assert "every byte hashed" in shown
    assert [line.split()[:2] for line in shown.splitlines()][-3:] == [
        ["policy.a", "F32"], ["old.a", "F32"], ["optim.a.step", "F32"],
    ]  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
def test_the_average_and_the_reference_are_named_as_what_they_are(full: bool, tmp_path: Path) -> None:
    from nftctl.cli.inspect import _lines, facts_of

    average = {"ema.a": {"dtype": "torch.float32", "shape": [4, 5]}} if full else {}
    manifest = make_manifest(3, {**TENSORS, **average})
    manifest.identity.update({"base.fingerprint": "fedc", "model.train": "full" if full else "lora"})
    facts = facts_of(tmp_path, manifest, hashes=False)
    lines = {line.split()[0]: line for line in _lines(facts, manifest, whole=True, hashed=False)}
    assert list(facts["copies"]) == ["policy", "old", *(["ema"] if full else []), "reference"]
    assert lines["reference"].endswith("  the base, fedc" if full else "  the base with adapters off, fedc")
    if full:
        assert facts["copies"]["ema"] == {"tensors": 1, "numbers": 20}
        assert lines["ema"].endswith("  20 numbers in 1 tensors")


def test_equal_weights_have_equal_hashes(tmp_path: Path) -> None:
    from nftctl.run.manifest import read_manifest
    from nftctl.run.tensors import content_hash
    from tests.run.make import safetensors_bytes

    step = write_checkpoint(tmp_path, 1)
    same = {"policy.a": ("F32", [2, 3], bytes(24)), "old.a": ("F32", [2, 3], bytes(24))}
    (step / "state/shard-00001.safetensors").write_bytes(safetensors_bytes(same))
    files = [read_manifest(step).files[0]]
    assert content_hash(step, files, "policy.") == content_hash(step, files, "old.")


@pytest.mark.parametrize("verify", [(), ("--verify",)])
def test_every_fault_is_named_and_the_rest_still_shown(tmp_path: Path, verify: tuple[str, ...]) -> None:
    run = make_run(tmp_path / "runs", steps=(50, 100))
    step = run.checkpoints / "step_000100"
    os.truncate(step / "state/shard-00001.safetensors", 40)
    (step / "state/stray.bin").write_bytes(b"x")
    answer = nftctl("inspect-checkpoint", "tiny", *verify, cwd=tmp_path)
    assert answer.returncode == 5
    assert "NOT WHOLE" in answer.stdout
    assert "step        100 rollouts" in answer.stdout
    for fault in ("shard-00001.safetensors: truncated", "stray.bin: not in the manifest", "tensor policy.a: missing"):
        assert fault in answer.stderr
    assert "the newest complete one is runs/tiny/checkpoints/step_000050" in answer.stderr
    document = the_object(nftctl("inspect-checkpoint", "tiny", *verify, "--json", cwd=tmp_path))
    assert document["complete"] is False
    assert "is not whole: 4 faults" in answer.stderr
    assert len(document["diagnostics"]) == answer.stderr.count("error[checkpoint-damaged]")


def test_an_altered_byte_shows_only_when_contents_are_hashed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=(100,))
    shard = run.checkpoints / "step_000100/state/shard-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert nftctl("inspect-checkpoint", "tiny", cwd=tmp_path).returncode == 0
    answer = nftctl("inspect-checkpoint", "tiny", "--verify", cwd=tmp_path)
    assert answer.returncode == 5
    assert "shard-00002.safetensors: altered" in answer.stderr
    assert "is not whole: 1 fault" in answer.stderr
    assert "1 faults" not in answer.stderr


def test_a_checkpoint_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=(50,))
    write_checkpoint(run.checkpoints, 100, done=False)
    answer = nftctl("inspect-checkpoint", "tiny", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (5, "")
    assert "step_000100.partial is incomplete" in answer.stderr
    assert "go on from the newest complete one: nftctl resume" in answer.stderr
    assert "step_000050" in answer.stderr


def test_a_step_folder_alone_is_enough(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=(50,))
    shutil.copytree(run.checkpoints / "step_000050", tmp_path / "elsewhere")
    assert nftctl("inspect-checkpoint", "elsewhere", cwd=tmp_path).returncode == 0


def test_hostile_files_are_refused_without_a_traceback(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=(50,))
    step = run.checkpoints / "step_000050"
    (step / "state/shard-00001.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n(S'touch owned'\ntR.")
    answer = nftctl("inspect-checkpoint", "tiny", "--verify", "--tensors", cwd=tmp_path)
    assert answer.returncode == 5
    (step / "manifest.json").write_bytes(b'{"format": "nftctl-checkpoint/1", "files": ' + b"[" * 5000)
    answer_two = nftctl("inspect-checkpoint", step, "--verify", cwd=tmp_path)
    assert answer_two.returncode == 5
    assert "Traceback" not in answer.stderr + answer_two.stderr
    assert not (tmp_path / "owned").exists()
