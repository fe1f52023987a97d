"""The run folder: made once, held by one process, found by any of its names, and never stepped back in silence."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from nftctl.errors import CheckpointUnusable
from nftctl.run.checkpoints import discard_partials, list_steps, partial_folder, prune
from nftctl.run.directory import (
    RunDirectory,
    atomic_write,
    begin_again,
    find_checkpoint,
    refuse_impossible,
    refuse_used,
)
from nftctl.run.disk import cure, point_link

from .make import make_run, snapshot, write_checkpoint


def test_a_new_run_holds_what_it_was_given(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    assert run.profile_toml.read_text() == "[rl]\nbeta = 1.0\n"
    assert run.read_resolved() == {"rl": {}}
    assert run.read_record()["run_id"] == "0123456789abcdef"
    assert RunDirectory.open(run.path) == run
    assert sorted(p.name for p in run.path.iterdir()) == [
        ".lock", "checkpoints", "logs", "profile.resolved.json", "profile.toml", "run.json", "samples",
    ]  # fmt: skip


def test_a_used_folder_is_refused_with_three_ways_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = snapshot(run.path)
    with pytest.raises(CheckpointUnusable, match="in use already") as caught:
        make_run(tmp_path)
    assert all(way in caught.value.hint for way in ("--auto-resume", "--name", "remove"))
    assert snapshot(run.path) == before


@pytest.mark.parametrize(
    ("code", "said", "advice"),
    [
        (errno.EACCES, "Permission denied", "get the right to write there"),
        (errno.EROFS, "Read-only file system", "mount it for writing"),
        (errno.ENOSPC, "No space left on device", "make room on that disk"),
        (errno.EIO, "Input/output error", "mend the disk or the folder"),
    ],
)
def test_what_cannot_be_written_is_said_with_its_own_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str, advice: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("nftctl.run.directory.atomic_write", refuse)
    with pytest.raises(CheckpointUnusable, match=f"cannot create .*tiny: {said}") as caught:
        make_run(tmp_path)
    assert caught.value.hint == advice == cure(OSError(code, ""))


def test_a_place_without_the_right_to_write_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(CheckpointUnusable, match="cannot be written to") as caught:
        refuse_impossible(tmp_path / "new" / "runs" / "tiny")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    assert "room" not in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    refuse_impossible(tmp_path / "new" / "runs" / "tiny")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert make_run(tmp_path).path.is_dir()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointUnusable, match="cannot be the name"):
        make_run(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_leave_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only finite"):
        RunDirectory.create(tmp_path, "x", profile_text="", resolved={"a": float("nan")}, record={})
    with pytest.raises(CheckpointUnusable, match=r"no run\.json"):
        RunDirectory.open(tmp_path / "x")


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.run_json.write_text("{")
    with pytest.raises(CheckpointUnusable, match=r"run\.json is not JSON"):
        run.read_record()
    run.run_json.write_text("[]")
    with pytest.raises(CheckpointUnusable, match="not a JSON object"):
        run.read_record()


HOLD = """
import sys, pathlib
from nftctl.run.directory import RunDirectory
with RunDirectory.open(pathlib.Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_live_process_holds_a_run_and_death_frees_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = snapshot(run.path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointUnusable, match="in use by a running nftctl"), run.lock():
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with run.lock():
        assert snapshot(run.path) == before


def test_attempts_are_numbered_and_latest_follows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert [run.new_attempt().name for _ in range(11)] == [f"attempt_{n}" for n in range(1, 12)]
    assert (run.logs / "latest").readlink() == Path("attempt_11")


def test_every_name_of_a_checkpoint_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs", steps=(50, 100))
    newest = run.checkpoints / "step_000100"
    for target in (
        str(run.path),
        str(run.checkpoints),
        str(newest),
        "tiny",
        str(run.checkpoints / "latest"),
        f"{newest}/",
    ):
        found_run, found = find_checkpoint(target, tmp_path / "runs")
        assert (found_run.path.resolve(), found.resolve()) == (run.path.resolve(), newest.resolve())
    assert find_checkpoint(str(run.checkpoints / "step_000050"), tmp_path)[1].name == "step_000050"
    monkeypatch.chdir(run.path)
    assert find_checkpoint(".", tmp_path / "runs")[1].name == "step_000100"
    monkeypatch.chdir(newest)
    assert find_checkpoint(".", tmp_path / "runs")[1].name == "step_000100"
    assert find_checkpoint("..", tmp_path / "runs")[1].name == "step_000100"


def test_the_link_is_never_the_truth(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=(50, 100))
    point_link(run.checkpoints / "latest", "step_000050")
    assert find_checkpoint(str(run.path), tmp_path)[1].name == "step_000100"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda newest: (newest / "manifest.json").unlink(), "no manifest.json"),
        (lambda newest: os.truncate(newest / "state/shard-00001.safetensors", 9), "shard-00001.safetensors: truncated"),
        (lambda newest: newest.rename(newest.with_name("step_000100.partial")), "its writing was cut off"),
    ],
)
def test_an_incomplete_newest_one_is_refused_and_the_newest_complete_named(tmp_path: Path, damage, said: str) -> None:
    run = make_run(tmp_path, steps=(10, 50, 100))
    damage(run.checkpoints / "step_000100")
    (run.checkpoints / "step_000050/state/shard-00002.safetensors").write_bytes(b"altered")
    before = snapshot(run.path)
    with pytest.raises(CheckpointUnusable, match="the newest checkpoint") as caught:
        find_checkpoint(str(run.path), tmp_path)
    assert said in caught.value.message
    assert caught.value.hint.endswith(f"nftctl resume {run.checkpoints / 'step_000010'}")
    assert snapshot(run.path) == before


def test_a_cut_off_folder_below_the_newest_is_no_obstacle(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=(100,))
    for step in (50, 100):
        write_checkpoint(run.checkpoints, step, done=False)
    assert find_checkpoint(str(run.path), tmp_path)[1].name == "step_000100"


def test_nothing_to_find_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tiny")
    with pytest.raises(CheckpointUnusable, match="has no checkpoint yet") as caught:
        find_checkpoint("tiny", tmp_path)
    assert "nftctl launch" in caught.value.hint
    begun = run.read_record() | {"argv": ["/bin/nftctl", "launch", "--set", "job.name=a b"]}
    run.run_json.write_bytes(orjson.dumps(begun))
    with pytest.raises(CheckpointUnusable) as caught:
        find_checkpoint("tiny", tmp_path)
    assert "nftctl launch --set 'job.name=a b'" in caught.value.hint
    with pytest.raises(CheckpointUnusable, match="no checkpoint, run folder or run") as caught:
        find_checkpoint("tiney", tmp_path)
    assert caught.value.hint == "did you mean tiny?"
    with pytest.raises(CheckpointUnusable, match="is not a run folder"):
        find_checkpoint(str(tmp_path), tmp_path)
    with pytest.raises(CheckpointUnusable, match="is a file"):
        find_checkpoint(str(run.run_json), tmp_path)
    write_checkpoint(run.checkpoints, 3, done=False)
    with pytest.raises(CheckpointUnusable, match="cut off") as caught:
        find_checkpoint("tiny", tmp_path)
    assert "no complete checkpoint" in caught.value.hint


def test_pruning_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(tmp_path, step)
    write_checkpoint(tmp_path, 60, done=False)
    assert [path.name for path in prune(tmp_path, keep_last=2, keep_every=20)] == ["step_000010", "step_000030"]
    assert [step for step, _ in list_steps(tmp_path)] == [20, 40, 50]
    assert (tmp_path / "step_000060.partial").exists()
    assert prune(tmp_path, keep_last=2, keep_every=20) == []
    assert [path.name for path in prune(tmp_path, keep_last=0, keep_every=0)] == ["step_000020", "step_000040"]


def test_an_incomplete_folder_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step_000030/manifest.json").unlink()
    assert [path.name for path in prune(tmp_path, keep_last=1, keep_every=0)] == ["step_000010"]
    assert [step for step, _ in list_steps(tmp_path)] == [20, 30]


def test_leftovers_are_cleared_before_writing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    stale = write_checkpoint(tmp_path, 20, done=False)
    (tmp_path / ".pruned-step_000005").mkdir()
    assert list(partial_folder(tmp_path, 20).iterdir()) == []
    assert {path.name for path in discard_partials(tmp_path)} == {stale.name, ".pruned-step_000005"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    atomic_write(path, b"old")
    with pytest.raises(TypeError):
        atomic_write(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


LAUNCHED = ["nftctl", "launch", "my.toml"]
NAMED = {"job": {"name": "y", "run_dir": "runs"}}


@pytest.mark.parametrize(
    ("record", "resolved", "command"),
    [
        (
            {"argv": [*LAUNCHED, "--set", "a=b c"]},
            NAMED,
            "the same name with: nftctl launch my.toml --set 'a=b c' --auto-resume",
        ),
        ({"argv": [*LAUNCHED, "--auto-resume"]}, NAMED, "the same name with: nftctl launch my.toml --auto-resume"),
        ({"argv": LAUNCHED}, {"job": {"name": "", "run_dir": "runs"}}, "again with: nftctl launch my.toml"),
        (
            {"argv": ["nftctl", "resume", "x", "--fork", "y"], "parent": {"run": "x"}},
            NAMED,
            "another name with: nftctl resume x --fork y-3",
        ),
        (
            {"argv": ["nftctl", "resume", "x", "--fork=y"], "parent": {"run": "x"}},
            NAMED,
            "another name with: nftctl resume x --fork=y-3",
        ),
        ({}, NAMED, "with: nftctl launch runs/y/profile.toml --name y --run-dir runs --auto-resume"),
    ],
)  # fmt: skip
def test_a_run_without_a_checkpoint_is_begun_by_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], resolved: dict[str, Any], command: str
) -> None:
    """A fork is begun by `resume`, which has no --auto-resume, so it gets a name that no folder has."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(Path("runs"), "y", profile_text="", resolved=resolved, record=record)
    Path("runs/y-2").mkdir()
    assert begin_again(run).endswith(command)


def test_a_run_is_begun_again_from_where_it_was_begun_and_from_the_profile_that_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"argv": ["nftctl", "launch", "-", "--name", "y"]}
    run = RunDirectory.create(tmp_path / "my place/runs", "y", profile_text="", resolved=NAMED, record=record)
    monkeypatch.chdir(tmp_path)
    kept = shlex.quote(str(run.profile_toml))
    place = shlex.quote(str(tmp_path / "my place"))
    assert begin_again(run).endswith(f"with: cd {place} && nftctl launch - --name y --auto-resume < {kept}")


def test_a_used_folder_is_left_by_ways_that_are_open(tmp_path: Path) -> None:
    """Never checkpointed, saved, saved with the newest cut off, all damaged, and no run at all."""

    def ways(path: Path, *more: str) -> str:
        with pytest.raises(CheckpointUnusable, match="is in use already") as refused:
            refuse_used(path, *more)
        return refused.value.hint

    run = RunDirectory.create(tmp_path, "y", profile_text="", resolved=NAMED, record={})
    left = f"it has no complete checkpoint to go on from; {{}}use another --name; or remove {run.path}"
    assert ways(run.path) == left.format("add --auto-resume to begin again under this name; or ")
    assert ways(run.path, "use another --name", "") == left.format("")
    write_checkpoint(run.checkpoints, 2)
    go_on = "go on with it: nftctl resume {}; or use another --name; or remove " + str(run.path)
    assert ways(run.path) == go_on.format(run.path)
    write_checkpoint(run.checkpoints, 4, done=False)
    assert ways(run.path) == go_on.format(run.checkpoints / "step_000002")
    (run.checkpoints / "step_000002/manifest.json").unlink()
    assert ways(run.path) == left.format("")
    other = tmp_path / "other"
    (other / "things").mkdir(parents=True)
    assert ways(other) == left.format("").replace(str(run.path), str(other))
