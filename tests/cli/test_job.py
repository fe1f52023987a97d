"""`launch` and `resume` up to the engine: what is refused, in which order, and that a refusal touches nothing."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from nftctl.cli import job
from nftctl.cli.job import closing_words, left_of
from nftctl.cli.signals import TYPED
from nftctl.engine.plan import plan_launch
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.run.checkpoints import partial_folder, set_aside_newer, step_name
from nftctl.run.directory import RunDirectory
from nftctl.run.identity import fingerprint
from nftctl.run.manifest import Manifest, commit, read_manifest, write_manifest
from nftctl.run.state import RunState
from tests.run.make import make_run, safetensors_bytes, snapshot, write_checkpoint
from tests.run.test_manifest import rewrite

from .program import nftctl, the_object


def make_resumable(folder: Path, name: str = "first", total: int = 4, step: int = 2) -> RunDirectory:
    """A run of the tiny profile with the checkpoint of `step`, as the engine would have left it."""
    flags = {"rl.max_steps": total, "job.name": name, "job.run_dir": str(folder)}
    plan = plan_launch(load_profile(bundled_profiles()["tiny_t2i_cpu"], flags=flags, env={}), argv=["nftctl"])
    run = RunDirectory.create(
        folder, name, profile_text=plan.profile_text, resolved=plan.profile.model_dump(), record=plan.record()
    )
    partial = partial_folder(run.checkpoints, step)
    (partial / "state").mkdir()
    tensors = dict.fromkeys(("policy.a", "old.a", "optim.a.step"), ("F32", [1], bytes(4)))
    (partial / "state/shard-00001.safetensors").write_bytes(safetensors_bytes(tensors))
    manifest = Manifest(
        run_id=plan.run_id, step=step, state=RunState(step=step, optimizer_steps=step, cursor=4 * step).to_dict(),
        world_size=plan.profile.ranks, identity=plan.identity, identity_hash=plan.identity_hash,
        seed_contract=plan.seed_contract, optimizer_entries=["a"],
        tensors={name: {"dtype": "F32", "shape": [1]} for name in tensors},
    )  # fmt: skip
    write_manifest(partial, manifest)
    commit(partial, run.checkpoints / step_name(step))
    return run


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    arguments = ("launch", "--steps", "7", "--name", "trial", "--run-dir", "out", "--dry-run")
    plan = the_object(nftctl(*arguments, "--json", cwd=tmp_path))["plan"]
    assert plan["steps"] == {"from": 0, "to": 7}
    assert (plan["run"], plan["ranks"]) == ("out/trial", 4)
    answer = nftctl(*arguments, cwd=tmp_path)
    assert answer.returncode == 0
    assert "nothing was started or written" in answer.stderr
    assert "out/trial" in answer.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_refused_profile_starts_and_writes_nothing(tmp_path: Path) -> None:
    answer = nftctl("launch", "--set", "grid.backend=slurm", "--set", "rl.ref.update_every=1", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (3, "")
    assert answer.stderr.count(": error[") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_used_run_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    make_resumable(tmp_path / "runs")
    before = snapshot(tmp_path)
    for more in ((), ("--dry-run",)):
        answer = nftctl("launch", "tiny_t2i_cpu", "--name", "first", *more, cwd=tmp_path)
        assert answer.returncode == 5
        assert "runs/first is in use already" in answer.stderr
        assert "nftctl resume runs/first" in answer.stderr
    assert snapshot(tmp_path) == before


def test_resuming_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    make_resumable(tmp_path / "runs", total=2, step=2)
    before = snapshot(tmp_path)
    answer = nftctl("resume", "first", cwd=tmp_path)
    assert (answer.returncode, answer.stdout.strip().endswith("runs/first")) == (0, True)
    assert "nothing to do: 2 steps are done and the total is 2" in answer.stderr
    assert "--steps 4" in answer.stderr
    document = the_object(nftctl("resume", "first", "--steps", "1", "--json", cwd=tmp_path))
    assert document["nothing_to_do"] is True
    assert document["steps"] == {"from": 2, "to": 2, "total": 1}
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(("total", "further"), [(2, "runs/first --steps 4"), (9, "runs/first")])
def test_fewer_steps_than_are_done_is_said_with_both_numbers(tmp_path: Path, total: int, further: str) -> None:
    make_resumable(tmp_path / "runs", total=total, step=2)
    answer = nftctl("resume", "first", "--steps", "1", cwd=tmp_path)
    assert answer.returncode == 0
    assert "nothing to do: 2 steps are done and a total of 1 was asked for" in answer.stderr
    assert answer.stderr.splitlines()[-1].endswith(f"to go further: nftctl resume {further}"), answer.stderr


@pytest.mark.parametrize("place", ["file", "file/below", "dangling/below"])
@pytest.mark.parametrize("more", [("--dry-run",), ("--auto-resume", "--dry-run"), ()], ids=" ".join)
def test_a_run_folder_that_cannot_be_made_is_refused_alike_dry_or_not(
    tmp_path: Path, place: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = snapshot(tmp_path)
    answer = nftctl("launch", "--name", "x", "--steps", "1", "--run-dir", place, *more, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (5, "")
    kind = "a file" if place.startswith("file") else "a link that leads nowhere"
    assert f"cannot create {place}/x: {tmp_path / place.split('/')[0]} is {kind}, not a folder" in answer.stderr
    assert "--run-dir" in answer.stderr
    assert snapshot(tmp_path) == before


def test_a_dry_resume_shows_from_where_to_where(tmp_path: Path) -> None:
    make_resumable(tmp_path / "runs")
    before = snapshot(tmp_path)
    plan = the_object(nftctl("resume", "first", "--steps", "9", "--dry-run", "--json", cwd=tmp_path))["plan"]
    assert plan["steps"] == {"from": 2, "to": 9}
    assert plan["resume_from"].endswith("step_000002")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (("rl.seed=9", "rl.beta=2.0"), ["rl.seed", "rl.beta"]),
        (("optimizer.lr=0.5",), ["optimizer.lr"]),
        (("data.rows_per_step=2",), ["data.rows_per_step"]),
    ],
)
def test_a_changed_identity_is_a_table(tmp_path: Path, sets: tuple[str, ...], keys: list[str]) -> None:
    make_resumable(tmp_path / "runs")
    before = snapshot(tmp_path)
    arguments = [part for text in sets for part in ("--set", text)]
    answer = nftctl("resume", "first", *arguments, "--json", cwd=tmp_path)
    assert answer.returncode == 6
    lines = [line.split() for line in answer.stderr.splitlines()]
    assert ["key", "was", "now", "why"] in lines
    assert [line[0] for line in lines if line and line[0] in keys] == keys
    document = the_object(answer)
    assert [d["key"] for d in document["error"]["differences"]] == keys
    assert snapshot(tmp_path) == before


def test_what_is_outside_the_identity_may_change(tmp_path: Path) -> None:
    make_resumable(tmp_path / "runs")
    arguments = ("--set", "checkpoint.every=1", "--set", "reward.retries=0", "--set", "logging.tensorboard=false")
    assert nftctl("resume", "first", *arguments, "--dry-run", cwd=tmp_path).returncode == 0


def test_the_profile_comes_from_the_run_and_not_from_the_working_folder(tmp_path: Path) -> None:
    make_resumable(tmp_path / "runs")
    (tmp_path / "profile.toml").write_text("this is not TOML")
    answer = nftctl("resume", "first", "--dry-run", cwd=tmp_path, env={"NFTCTL_PROFILE": "nowhere.toml"})
    assert answer.returncode == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_another_number_of_ranks_is_refused_with_both(tmp_path: Path, ranks: int) -> None:
    """Written by four ranks; refused before anything is started, and still inspected by one process."""
    run = make_resumable(tmp_path / "runs")
    before = snapshot(tmp_path)
    answer = nftctl("resume", "first", "--set", f"rl.group_size={ranks}", cwd=tmp_path)
    assert answer.returncode == 6, answer.stderr
    rows = [line.split() for line in answer.stderr.splitlines()]
    assert next(row for row in rows if row and row[0] == "rl.group_size")[1:3] == ["4", str(ranks)]
    assert the_object(nftctl("inspect-checkpoint", run.path, "--json", cwd=tmp_path))["checkpoint"]["world_size"] == 4
    assert snapshot(tmp_path) == before


def test_a_checkpoint_without_its_seed_contract_or_cursor_is_refused_by_name(tmp_path: Path) -> None:
    """Left out by whoever wrote it: nothing contradicts its own hashes."""
    whole = make_resumable(tmp_path / "whole")
    for part, changes, code, said in (
        ("seeds", {"seed_contract": {}}, 6, "the seed contract changed"),
        ("cursor", {"state": {"step": 2}}, 5, "the run state lacks cursor"),
        ("optimizer", {"optimizer_entries": []}, 5, "no optimizer state, though 2 optimizer steps were taken"),
    ):
        run = tmp_path / "runs" / part
        shutil.copytree(whole.path, run, symlinks=True)
        rewrite(run / "checkpoints" / step_name(2), changes)
        answer = nftctl("resume", part, cwd=tmp_path)
        assert (answer.returncode, answer.stdout) == (code, ""), answer.stderr
        assert said in answer.stderr
        if part == "seeds":
            assert [line.split()[:2] for line in answer.stderr.splitlines() if line.split()[0] == "rl.seed"] == [
                ["rl.seed", "(absent)"]
            ]


def test_damage_comes_before_a_changed_identity(tmp_path: Path) -> None:
    run = make_resumable(tmp_path / "runs")
    shard = run.checkpoints / "step_000002/state/shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    before = snapshot(tmp_path)
    answer = nftctl("resume", "first", "--set", "rl.seed=9", cwd=tmp_path)
    assert answer.returncode == 5
    assert "shard-00001.safetensors: altered" in answer.stderr
    assert snapshot(tmp_path) == before


def test_a_live_run_is_not_resumed(tmp_path: Path) -> None:
    run = make_resumable(tmp_path / "runs")
    with run.lock():
        answer = nftctl("resume", "first", "--set", "rl.seed=9", cwd=tmp_path)
    assert answer.returncode == 5
    assert "in use by a running nftctl" in answer.stderr


def test_another_folder_of_runs_is_found_through_the_environment(tmp_path: Path) -> None:
    make_resumable(tmp_path / "elsewhere")
    assert nftctl("resume", "first", "--dry-run", cwd=tmp_path).returncode == 5
    env = {"NFTCTL_JOB__RUN_DIR": "elsewhere"}
    assert nftctl("resume", "first", "--dry-run", cwd=tmp_path, env=env).returncode == 0


SUMMARY: dict[str, Any] = {
    "run": "runs/first",
    "steps": {"from": 0, "to": 150, "total": 150},
    "stopped": None,
    "checkpoint": "runs/first/checkpoints/step_000150",
    "samples": "runs/first/samples/before_after.png",
    "eval": {
        "before": {"step": 0, "eval/reward": 0.5531, "eval/samples": 96, "eval/digits/judge": 0.548},
        "after": {"step": 150, "eval/reward": 0.8642, "eval/samples": 96, "eval/digits/judge": 0.839},
    },
    "train": {"first": {"train/reward_mean": 0.5}, "last": {"train/reward_mean": 0.9}},
}


def test_closing_words_say_what_was_won_and_what_to_type_next() -> None:
    words = "\n".join(closing_words(SUMMARY))
    assert "held-out reward  0.553 -> 0.864 (96 images, step 0 -> 150)" in words
    assert "judge            0.548 -> 0.839" in words
    assert "runs/first/samples/before_after.png" in words
    for command in ("nftctl resume runs/first --steps 300", "nftctl inspect-checkpoint runs/first", "tensorboard"):
        assert command in words
    assert "stopped" not in words


def test_closing_words_of_a_stopped_run() -> None:
    stopped = SUMMARY | {"stopped": "SIGINT", "steps": {"from": 0, "to": 12, "total": 150}, "eval": None}
    words = "\n".join(closing_words(stopped))
    assert "by SIGINT after step 12 of 150" in words
    assert "nftctl resume runs/first --steps 150" in words
    assert "training reward  0.500 -> 0.900" in words


def test_closing_words_of_a_run_that_was_interrupted_when_it_had_no_step_left() -> None:
    words = "\n".join(closing_words(SUMMARY | {"interrupt": "SIGINT"}))
    assert "finished         after step 150; SIGINT came when none was left" in words
    assert "stopped" not in words


def test_the_way_back_from_a_run_that_never_saved_can_be_gone(tmp_path: Path) -> None:
    """Refused under its name, told how, and told the same by `resume`; that command is accepted."""
    typed = ("launch", "tiny_t2i_cpu", "--name", "first", "--steps", "9", "--run-dir", "my runs")
    resolved = load_profile(
        bundled_profiles()["tiny_t2i_cpu"],
        flags={"rl.max_steps": 9, "job.name": "first", "job.run_dir": "my runs"}, env={},
    )  # fmt: skip
    plan = plan_launch(resolved, argv=["nftctl", *typed])
    RunDirectory.create(
        tmp_path / "my runs", "first", profile_text="", resolved=plan.profile.model_dump(), record=plan.record()
    )
    refused = nftctl(*typed, cwd=tmp_path)
    assert refused.returncode == 5
    assert "resume" not in refused.stderr.replace("--auto-resume", "")
    assert "it has no complete checkpoint to go on from; add --auto-resume to begin again under this" in refused.stderr
    answer = nftctl("resume", "my runs/first", cwd=tmp_path)
    command = answer.stderr.rpartition("begin again under the same name with: ")[2].strip()
    assert command == "nftctl launch tiny_t2i_cpu --name first --steps 9 --run-dir 'my runs' --auto-resume"
    assert nftctl(*shlex.split(command)[1:], "--dry-run", cwd=tmp_path).returncode == 0


def test_what_is_left_of_a_run_that_was_ended_at_once_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has a folder, before it has saved, and after."""
    monkeypatch.chdir(tmp_path)
    path = Path("runs/first")
    assert left_of(path) == "nothing was saved"
    run = make_resumable(Path("runs"))
    assert left_of(path) == "what was saved in runs/first stays valid; go on with: nftctl resume runs/first"
    shutil.rmtree(run.checkpoints / step_name(2))
    assert left_of(path).startswith("nothing was saved; run folder runs/first; begin again under the same name with: ")


def test_auto_resume_starts_fresh_only_where_there_was_never_a_checkpoint(tmp_path: Path) -> None:
    place = ("--name", "first", "--run-dir", str(tmp_path))
    arguments = ("launch", "tiny_t2i_cpu", "--auto-resume", *place, "--steps", "9", "--dry-run")
    answer = nftctl(*arguments, "--json", cwd=tmp_path)
    assert "a fresh start" in answer.stderr
    assert the_object(answer)["plan"]["steps"] == {"from": 0, "to": 9}
    run = make_resumable(tmp_path)
    answer = nftctl(*arguments, "--json", cwd=tmp_path)
    assert the_object(answer)["plan"]["steps"] == {"from": 2, "to": 9}
    # A damaged newest checkpoint is not a reason to begin again.
    (run.checkpoints / step_name(2) / "state" / "shard-00001.safetensors").unlink()
    before = snapshot(tmp_path)
    answer = nftctl(*arguments, cwd=tmp_path)
    assert answer.returncode == 5
    assert "shard-00001" in answer.stderr
    assert snapshot(tmp_path) == before


def test_auto_resume_refuses_a_profile_that_is_another_run(tmp_path: Path) -> None:
    make_resumable(tmp_path)
    before = snapshot(tmp_path)
    arguments = ("--auto-resume", "--name", "first", "--run-dir", str(tmp_path), "--steps", "9")
    answer = nftctl("launch", "tiny_t2i_cpu", *arguments, "--set", "rl.beta=2.0", cwd=tmp_path)
    assert answer.returncode == 6
    assert "rl.beta" in answer.stderr
    assert snapshot(tmp_path) == before


def test_auto_resume_needs_a_name(tmp_path: Path) -> None:
    answer = nftctl("launch", "--auto-resume", cwd=tmp_path)
    assert answer.returncode == 2
    assert "--name" in answer.stderr


def test_a_run_that_never_saved_is_moved_aside_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path, "first")
    kept = snapshot(run.path)
    moved = run.retire()
    assert moved.name == "first.unsaved-1"
    assert snapshot(moved) == kept


def test_a_fork_is_a_new_run_with_its_parent_recorded(tmp_path: Path) -> None:
    run = make_resumable(tmp_path)
    target = (
        "resume",
        str(run.path),
        "--fork",
        "second",
        "--steps",
        "9",
        "--set",
        "rl.beta=2.0",
        "--dry-run",
        "--json",
    )
    plan = the_object(nftctl(*target, cwd=tmp_path))["plan"]
    assert plan["run"] == str(tmp_path / "second")
    assert plan["steps"] == {"from": 2, "to": 9}
    assert plan["parent"]["step"] == 2
    assert plan["parent"]["changed"] == [{"key": "rl.beta", "was": 1.0, "now": 2.0}]
    taken = nftctl("resume", str(run.path), "--fork", "first", "--steps", "9", cwd=tmp_path)
    assert taken.returncode == 5


def test_a_run_gets_no_second_history(tmp_path: Path) -> None:
    run = make_resumable(tmp_path)
    older = run.checkpoints / step_name(2)
    write_checkpoint(run.checkpoints, 4)
    before = snapshot(tmp_path)
    answer = nftctl("resume", str(older), "--steps", "9", cwd=tmp_path)
    assert answer.returncode == 5
    assert "--fork" in answer.stderr
    assert snapshot(tmp_path) == before
    # With the newer one damaged, the older one is what there is; the damaged one is kept under another name.
    next((run.checkpoints / step_name(4) / "state").iterdir()).unlink()
    assert nftctl("resume", str(older), "--steps", "9", "--dry-run", cwd=tmp_path).returncode == 0
    set_aside_newer(run.checkpoints, 2)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["damaged-step_000004", "latest", "step_000002"]


@pytest.mark.parametrize(("name", "code"), [("../../zz", 3), ("a/b", 3), ("..", 3), ("", 2), (" ", 2)])
def test_a_fork_stays_among_the_runs(tmp_path: Path, name: str, code: int) -> None:
    run = make_resumable(tmp_path)
    before = snapshot(tmp_path)
    answer = nftctl("resume", str(run.path), "--fork", name, "--steps", "9", cwd=tmp_path)
    assert answer.returncode == code, answer.stderr
    assert "remove" not in answer.stderr
    assert snapshot(tmp_path) == before


def test_a_fork_of_a_finished_run_needs_more_steps(tmp_path: Path) -> None:
    run = make_resumable(tmp_path, total=2)
    answer = nftctl("resume", str(run.path), "--fork", "second", cwd=tmp_path)
    assert answer.returncode == 2
    assert "--steps" in answer.stderr
    assert not (tmp_path / "second").exists()


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    run = make_resumable(tmp_path)
    (run.checkpoints / step_name(2)).rename(run.checkpoints / step_name(9))
    answer = nftctl("resume", str(run.path), "--steps", "20", cwd=tmp_path)
    assert answer.returncode == 5
    assert "step_000002" in answer.stderr


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.train=full", "model.train"),
        ("model.lora.rank=8", "model.lora.rank"),
        ('model.lora.targets=["add_q_proj"]', "model.lora.targets"),
        ("rl.ema_decay=0.9", "rl.ema_decay"),
    ],
)
def test_a_fork_keeps_its_parents_tensors(tmp_path: Path, change: str, key: str) -> None:
    """Refused before anything is made, and the plain resume does not send anyone there."""
    run = make_resumable(tmp_path)
    before = snapshot(tmp_path)
    arguments = ("resume", str(run.path), "--steps", "9", "--set", change, "--set", "rl.beta=2.0", "--json")
    forked = nftctl(*arguments, "--fork", "second", cwd=tmp_path)
    assert forked.returncode == 6, forked.stderr
    assert "a fork goes on with its parent's tensors, so these keys must stay" in forked.stderr
    assert [d["key"] for d in the_object(forked)["error"]["differences"]] == [key]
    plain = nftctl(*arguments, cwd=tmp_path)
    assert plain.returncode == 6
    assert "--fork" not in plain.stderr
    assert snapshot(tmp_path) == before


def test_a_fork_may_let_its_average_move_at_another_speed(tmp_path: Path) -> None:
    run = make_resumable(tmp_path)
    step = run.checkpoints / step_name(2)
    averaged = read_manifest(step).identity | {"rl.ema_decay": 0.5}
    rewrite(step, {"identity": averaged, "identity_hash": fingerprint(averaged)})
    target = ("resume", str(run.path), "--fork", "second", "--steps", "9", "--dry-run")
    assert nftctl(*target, "--set", "rl.ema_decay=0.9", cwd=tmp_path).returncode == 0
    assert nftctl(*target, cwd=tmp_path).returncode == 6  # and without one there is nothing to go on with


def test_a_plain_resume_offers_a_fork_where_one_can_be_made(tmp_path: Path) -> None:
    run = make_resumable(tmp_path)
    assert "--fork NAME" in nftctl("resume", str(run.path), "--set", "rl.beta=2.0", cwd=tmp_path).stderr


def test_a_fork_under_a_used_name_is_sent_to_another_name(tmp_path: Path) -> None:
    run = make_resumable(tmp_path)
    answer = nftctl("resume", str(run.path), "--fork", "first", "--steps", "9", cwd=tmp_path)
    assert answer.returncode == 5
    assert "is in use already" in answer.stderr  # and not: by a running nftctl, which is this very command
    assert "use --fork with another name" in answer.stderr
    assert "--name" not in answer.stderr


def test_the_name_of_a_running_run_is_not_for_another(tmp_path: Path) -> None:
    run = make_resumable(tmp_path / "runs")
    with run.lock():
        before = snapshot(tmp_path)
        answer = nftctl("launch", "tiny_t2i_cpu", "--name", "first", cwd=tmp_path)
        assert snapshot(tmp_path) == before
    assert answer.returncode == 5
    assert "runs/first is in use by a running nftctl" in answer.stderr
    assert "use another --name" in answer.stderr
    assert "remove" not in answer.stderr
    assert "nftctl resume" not in answer.stderr


def test_a_running_run_without_a_checkpoint_is_said_to_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "first")
    with run.lock():
        answer = nftctl("resume", "first", cwd=tmp_path)
    assert answer.returncode == 5
    assert "in use by a running nftctl" in answer.stderr
    assert "begin again" not in answer.stderr
    assert "begin again" in nftctl("resume", "first", cwd=tmp_path).stderr


def test_closing_words_of_a_run_that_saved_nothing_begin_again() -> None:
    stopped = {"run": "runs/first", "steps": {"from": 0, "to": 0, "total": 9}, "stopped": "SIGINT", "checkpoint": None}
    words = "\n".join(closing_words(stopped, "begin again: nftctl launch my.toml"))
    assert "nothing was saved; begin again: nftctl launch my.toml" in words
    assert "nftctl resume" not in words
    assert "inspect-checkpoint" not in words


def test_an_attempt_remembers_the_command_that_a_person_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nftctl", "launch", "p.toml"])
    assert job._typed() == ["nftctl", "launch", "p.toml"]
    monkeypatch.setenv(TYPED, json.dumps(["nftctl", "launch", "p.toml", "--max-restarts", "2"]))
    assert job._typed()[-2:] == ["--max-restarts", "2"]
