"""Every way a disk can hurt a checkpoint: `resume` and `inspect-checkpoint` refuse, name the part, and run nothing."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nftctl.engine.plan import plan_resume
from nftctl.errors import CheckpointUnusable
from nftctl.profile.load import load_resolved
from nftctl.run.directory import RunDirectory
from tests.run.make import snapshot

from .test_job import make_resumable
from .test_refused_before_start import run_all

STEP = "checkpoints/step_000002"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def duplicate(path: Path) -> None:
    shutil.copy(path, path.with_name(f"copy-{path.name}"))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(where: float) -> Callable[[Path], None]:
    def at(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(where * len(content)), len(content) - 1)] ^= 1
        path.write_bytes(bytes(content))

    at.__name__ = f"flip_{where}"
    return at


FAULTS = [truncate, empty, delete, duplicate, replace_by_folder, *(flip(x) for x in (0.0, 0.1, 0.5, 0.9, 1.0))]


def test_every_fault_in_every_file_is_refused_by_name(tmp_path: Path) -> None:
    sound = make_resumable(tmp_path / "sound").path
    parts = [p.relative_to(sound / STEP) for p in sorted((sound / STEP).rglob("*")) if p.is_file()]
    assert {str(part) for part in parts} == {"manifest.json", "state/shard-00001.safetensors"}
    cases = [(fault, part) for fault in FAULTS for part in parts]
    for i, (fault, part) in enumerate(cases):
        run = tmp_path / "runs" / f"case{i}"
        shutil.copytree(sound, run, symlinks=True)
        fault(run / STEP / part)
    before = snapshot(tmp_path)
    commands = [["resume", f"runs/case{i}/{STEP}", "--steps", "9"] for i in range(len(cases))]
    commands += [["inspect-checkpoint", f"runs/case{i}/{STEP}", "--verify"] for i in range(len(cases))]
    for (fault, part), (code, said) in zip(cases * 2, run_all(tmp_path, commands), strict=True):
        assert code == 5, (fault.__name__, part, said)
        assert part.name in said, (fault.__name__, part, said)
    assert snapshot(tmp_path) == before


def test_without_the_check_of_contents_a_flipped_bit_would_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusals above come from the manifest's hashes and from nowhere else."""
    run = make_resumable(tmp_path)
    flip(1.0)(run.path / STEP / "state" / "shard-00001.safetensors")
    profile = load_resolved(run.read_resolved(), name="tiny", text="", sets=[], flags={}, env={})
    with pytest.raises(CheckpointUnusable, match="shard-00001"):
        plan_resume(RunDirectory.open(run.path), run.path / STEP, profile, steps=9)
    monkeypatch.setattr("nftctl.run.manifest.verify", lambda folder, **how: [])
    assert plan_resume(RunDirectory.open(run.path), run.path / STEP, profile, steps=9).state.step == 2


class Hostile:
    """A pickle that would leave a mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", [".metadata", "state/.metadata", "state/optim.pt", "state/shard-00002.safetensors"])
def test_a_hostile_pickle_is_refused_and_never_loaded(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "executed"
    payload = pickle.dumps(Hostile(mark))
    pickle.loads(payload)
    assert mark.exists()  # the payload works
    mark.unlink()
    run = make_resumable(tmp_path)
    (run.path / STEP / name).write_bytes(payload)
    target = f"{run.path}/{STEP}"
    for code, said in run_all(
        tmp_path, [["resume", target, "--steps", "9"], ["inspect-checkpoint", target, "--verify"]]
    ):
        assert code == 5
        assert Path(name).name in said
    assert not mark.exists()
