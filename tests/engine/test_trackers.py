"""Trackers repeat what the run's own files hold, and never stop it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nftctl.engine import trackers
from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.engine.trackers import ROOM, Remote, TensorBoard, Trackers, hyperparameters
from nftctl.profile.schema import Profile
from nftctl.run.directory import RunDirectory
from nftctl.run.rows import read_rows
from tests.conftest import ROOT


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "train/reward_mean": step / 10, **values}


def test_tensorboard_is_written_only_when_it_is_wanted(tmp_path: Path) -> None:
    for name, enabled in (("off", False), ("on", True)):
        board = TensorBoard(tmp_path / name, enabled=enabled)
        board.scalars(row(1, text="no scalar"))
        board.close()
    assert not (tmp_path / "off").exists()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "on"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/reward_mean"]
    assert [(e.step, e.value) for e in events.Scalars("train/reward_mean")] == [(1, pytest.approx(0.1))]


def scalars(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, round(e.value, 3)) for e in events.Scalars("train/reward_mean")]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    """Saved at 3, cut off after 5, gone on with: the later steps are those of the second attempt."""
    for begin, end, keep, reward in ((1, 5, 0, 0.25), (4, 6, 3, 0.75)):
        board = TensorBoard(tmp_path, enabled=True, keep_through=keep)
        for step in range(begin, end + 1):
            board.scalars({"step": step, "train/reward_mean": reward})
        board.close()
    assert scalars(tmp_path) == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.75), (5, 0.75), (6, 0.75)]


def test_a_disk_that_takes_no_events_is_one_warning(tmp_path: Path) -> None:
    """A real limit of the system on the size of files, met in the middle of an event."""
    warnings: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        board = TensorBoard(tmp_path, enabled=True, warn=warnings.append)
        board.scalars(row(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (next(tmp_path.iterdir()).stat().st_size + 10, hard))
        for step in (2, 3):
            board.scalars(row(step))
            board.image("samples", step, tmp_path / "absent.png")
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert warnings == ["no more events for TensorBoard: File too large; metrics.jsonl goes on"]
    assert scalars(tmp_path) == [(1, 0.1)]


def test_a_folder_for_events_that_cannot_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    warnings: list[str] = []
    board = TensorBoard(tmp_path / "tensorboard", enabled=True, warn=warnings.append)
    board.scalars(row(1))
    board.close()
    assert len(warnings) == 1
    assert "File exists" in warnings[0]


# ---- hyperparameters


def test_hyperparameters_are_what_differs_from_the_defaults() -> None:
    profile = Profile.model_validate(
        {
            "rl": {"beta": 0.5, "init_keys_to_skip_loading": ["a", "b"], "group_size": 8, "max_steps": None},
            "optimizer": {"lr": 1e-3},
            "reward": {"providers": [{"name": "digits", "weight": 2.0}]},
        }
    )
    found = hyperparameters(profile)
    assert found["rl.beta"] == 0.5
    assert found["rl.init_keys_to_skip_loading"] == '["a","b"]'
    assert found["reward.providers.0.name"] == "digits"
    assert found["reward.providers.0.weight"] == 2.0
    assert "rl.kl_beta" not in found
    assert "rl.max_steps" not in found
    default = Profile()
    for key, value in found.items():
        if "providers" not in key and isinstance(value, float):
            section, name = key.split(".")
            assert getattr(getattr(default, section), name) != value


def test_tensorboard_reads_the_hyperparameters_as_a_session(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    values = {"rl.beta": 0.5, "rl.old.decay": "linear", "model.system_prompt": True, "rl.group_size": 4}
    for keep in (0, 3):  # and again by the attempt that goes on
        board = TensorBoard(tmp_path, enabled=True, keep_through=keep)
        board.hyperparameters(values)
        board.scalars(row(keep + 1))
        board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    session = metadata.parse_session_start_info_plugin_data(content)
    found = {name: getattr(value, value.WhichOneof("kind")) for name, value in session.hparams.items()}
    assert found == values
    assert [e.step for e in events.Scalars("train/reward_mean")] == [1, 4]


# ---- trackers in a process of their own

FAKE = """
import json, os, time

FILE = os.environ["FAKE_FILE"]

def tell(*words):
    with open(FILE, "a") as file:
        file.write(json.dumps(words) + "\\n")

def stumble(where):
    if os.environ.get("FAKE_HANGS") == where:
        tell("hangs", where)
        while True:
            time.sleep(60)
    if os.environ.get("FAKE_FAILS") == where:
        raise RuntimeError("no route to host\\nand more")

class Image:
    def __init__(self, path):
        self.path = path

class Run:
    def define_metric(self, name, **how):
        tell("define", name, how)
    def log(self, values, step=None):
        stumble("log")
        tell("log", {k: v.path if isinstance(v, Image) else v for k, v in values.items()}, step)
    def finish(self):
        stumble("finish")
        tell("finish")

def Settings(**values):
    return values

def init(*names, **about):
    print("a banner, on standard output")
    about.pop("settings", None)
    stumble("init")
    tell("init", names, about)
    return Run()
"""

ABOUT = {"project": "p", "group": "run id", "name": "first", "folder": "/runs/first", "values": {"rl.beta": 0.5}}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both packages, as ones that write down how they are used; the file they write."""
    packages = tmp_path / "packages"
    for name in ("wandb", "trackio"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{ROOT}")
    monkeypatch.setenv("FAKE_FILE", str(tmp_path / "said"))
    return tmp_path / "said"


def said(path: Path) -> list[list[object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_wandb_is_told_every_step_once_on_an_axis_of_its_own(
    fake: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    warnings: list[str] = []
    tracker = Remote("wandb", ABOUT, tmp_path / "wandb.log", warnings.append)
    for step in (1, 2):
        tracker.scalars(row(step, text="no scalar"))
    tracker.image("samples", 2, tmp_path / "grid.png")
    tracker.close()
    about = {
        "project": "p", "group": "run id", "name": "first", "dir": "/runs/first", "config": {"rl.beta": 0.5},
    }  # fmt: skip
    assert said(fake) == [
        ["init", [], about],
        ["define", "step", {"hidden": True}],
        ["define", "*", {"step_metric": "step"}],
        ["log", {"step": 1, "train/reward_mean": 0.1}, None],
        ["log", {"step": 2, "train/reward_mean": 0.2}, None],
        ["log", {"step": 2, "samples": str(tmp_path / "grid.png")}, None],
        ["finish"],
    ]
    assert (warnings, tracker.lost) == ([], 0)
    # Standard output is for data, whatever a library prints there.
    assert capfd.readouterr().out == ""
    assert "a banner" in (tmp_path / "wandb.log").read_text()


def test_trackio_is_told_the_same(fake: Path, tmp_path: Path) -> None:
    tracker = Remote("trackio", ABOUT, tmp_path / "trackio.log", pytest.fail)
    tracker.scalars(row(7))
    tracker.image("samples", 7, tmp_path / "grid.png")
    tracker.close()
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    assert said(fake) == [
        ["init", ["p", "first"], {"group": "run id", "config": {"rl.beta": 0.5}, **quiet}],
        ["log", {"train/reward_mean": 0.7}, 7],
        ["log", {"samples": str(tmp_path / "grid.png")}, 7],
        ["finish"],
    ]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_never_answers_is_left_behind(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A black hole. Every call comes back, and nothing of it is left afterwards."""
    monkeypatch.setenv("FAKE_HANGS", where)
    monkeypatch.setattr(trackers, "CLOSE_S", 1)
    warnings: list[str] = []
    tracker = Remote("wandb", ABOUT, tmp_path / "wandb.log", warnings.append)
    process = tracker._process
    assert process is not None
    for step in range(1, 4):
        tracker.scalars(row(step))
    wait_until(lambda: ["hangs", where] in said(fake) or where == "finish")
    if where == "finish":
        # Only the end shows that it hangs; in that second it has long been told everything.
        wait_until(lambda: len(said(fake)) == 6)
    tracker.close()
    tracker.close()
    tracker.scalars(row(4))
    assert process.poll() == -signal.SIGKILL
    assert warnings == ["wandb did not take its last rows within 1 s; metrics.jsonl has them all"]


def test_what_a_hanging_tracker_has_no_room_for_is_left_out_with_one_warning(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HANGS", "log")
    monkeypatch.setattr(trackers, "CLOSE_S", 1)
    warnings: list[str] = []
    tracker = Remote("wandb", ABOUT, tmp_path / "wandb.log", warnings.append)
    wait_until(lambda: len(said(fake)) == 3)  # it is there, and has not been asked for anything yet
    # More than a pipe and the reader's buffer hold, beside the room that there is.
    padding = {f"padding/{i}": 0.123456789 for i in range(1000)}
    for step in range(1, ROOM + 101):
        tracker.scalars(row(step, **padding))
    assert 50 <= tracker.lost <= 100
    assert warnings == ["wandb does not keep up and is not sent every row; metrics.jsonl has them all"]
    tracker.close()
    assert warnings[1:] == ["wandb did not take its last rows within 1 s; metrics.jsonl has them all"]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_one_warning_with_its_reason(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("FAKE_FAILS", where)
    warnings: list[str] = []
    tracker = Remote("trackio", ABOUT, tmp_path / "trackio.log", warnings.append)
    process = tracker._process
    assert process is not None
    tracker.scalars(row(1))
    if where != "finish":
        process.wait(60)
        tracker.scalars(row(2))
        assert len(warnings) == 1
        tracker.scalars(row(3))
    tracker.close()
    assert warnings == ["no more rows for trackio: RuntimeError: no route to host; metrics.jsonl goes on"]


def test_a_tracker_whose_package_has_gone_is_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = Remote("wandb", ABOUT, tmp_path / "wandb.log", warnings.append)
    tracker.close()
    assert len(warnings) == 1
    assert "No module named 'wandb'" in warnings[0]


def test_a_tracker_does_not_outlive_a_run_that_is_killed(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HANGS", "log")
    code = f"""
import time
from pathlib import Path
from nftctl.engine.trackers import Remote
tracker = Remote("wandb", {ABOUT!r}, Path("wandb.log"), print)
tracker.scalars({{"step": 1, "a": 1.0}})
print(tracker._process.pid, flush=True)
time.sleep(300)
"""
    run = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    wait_until(lambda: ["hangs", "log"] in said(fake))
    run.kill()
    run.wait(60)
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- those of a run


@pytest.fixture
def plan(tiny: Any, tmp_path: Path) -> Any:
    """The plan of a tiny run that asks for all trackers, which are not looked for by a plan."""
    sets = ("logging.tensorboard=true", "logging.wandb=true", "logging.trackio=true", 'logging.project="mine"')
    return plan_launch(tiny(2, ('job.name="first"', *sets)), run_dir=tmp_path / "runs")


def make_run(plan: Any, attempts: int) -> RunDirectory:
    run = RunDirectory.create(plan.run_path.parent, "first", profile_text="", resolved={}, record={})
    for _ in range(attempts):
        run.new_attempt()
    return run


@pytest.mark.parametrize(("attempts", "step", "name"), [(1, 0, "first"), (2, 1, "first-attempt_2")])
def test_every_attempt_is_a_run_of_its_own_in_one_group(
    fake: Path, plan: Any, attempts: int, step: int, name: str
) -> None:
    run = make_run(plan, attempts)
    plan.state.step = step
    all_of_them = Trackers.of(plan, run, pytest.fail)
    all_of_them.scalars(row(step + 1))
    all_of_them.close()
    starts = [words for words in said(fake) if words[0] == "init"]
    of_wandb = next(about for _, names, about in starts if not names)
    names, of_trackio = next((names, about) for _, names, about in starts if names)
    assert names == ["mine", name]
    assert (of_wandb["project"], of_wandb["name"], of_wandb["dir"]) == ("mine", name, str(run.path))
    assert of_wandb["group"] == of_trackio["group"] == plan.run_id
    assert of_wandb["config"] == of_trackio["config"] == hyperparameters(plan.profile)
    assert [words[1:] for words in said(fake) if words[0] == "log"].count(
        [{"train/reward_mean": (step + 1) / 10}, step + 1]
    ) == 1
    assert scalars(run.path / "tensorboard") == [(step + 1, (step + 1) / 10)]
    assert {p.name for p in (run.logs / "latest").iterdir()} == {"wandb.log", "trackio.log"}


def test_without_trackers_nothing_is_started_or_written(tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    plan = plan_launch(tiny(2, ('job.name="first"',)), run_dir=tmp_path / "runs")
    run = make_run(plan, 1)
    none = Trackers.of(plan, run, pytest.fail)
    none.scalars(row(1))
    none.image("samples", 1, tmp_path / "absent.png")
    none.close()
    assert list((run.logs / "latest").iterdir()) == []
    assert not (run.path / "tensorboard").exists()


@pytest.mark.ray
def test_a_run_ends_well_although_its_tracker_never_answers(
    world4: Any, tiny: Any, reporter: Any, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HANGS", "log")
    monkeypatch.setattr(trackers, "CLOSE_S", 1)
    plan = plan_launch(tiny(2, ('job.name="first"', "logging.wandb=true")), run_dir=tmp_path / "runs")
    summary = run_job(plan, reporter, world4)
    assert summary["steps"] == {"from": 0, "to": 2, "total": 2}
    assert [r["step"] for r in read_rows(plan.run_path / "metrics.jsonl")] == [1, 2]
    assert reporter.warnings == ["wandb did not take its last rows within 1 s; metrics.jsonl has them all"]
