"""Whole runs through the installed command, two ranks each: how they begin, how they end, what they leave.

One finished run serves most of them. Those that are interrupted in mid-step are in test_kills, one that is stopped
before its first step in test_clusters; a finished run that is gone on with is in the test of docs/ci.sh.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import clean_environment

pytestmark = pytest.mark.ray

SMALL = ("--set", "rl.group_size=2", "--set", "data.rows_per_step=2", "--set", "rl.sample_steps=4")
QUIET = (*SMALL, "--set", 'eval.prompt_file=""', "--set", "samples.prompts=0")
Cli = Callable[..., subprocess.CompletedProcess[str]]


MARK = f"run-{os.getpid()}"
"""Put into the environment of every process that these tests start, so that theirs alone are looked for."""


def left_behind() -> list[str]:
    """Command lines of processes, of whatever program, that were started by these tests and still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TEST_MARK") == MARK and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()) or process.name())
    return found


def start(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nftctl", *arguments],
        cwd=folder,
        env={**clean_environment(), "TEST_MARK": MARK, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for(path: Path, pattern: str, timeout: float = 90) -> re.Match[str]:
    """The first match of `pattern` in a file that is being written."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        match = re.search(pattern, path.read_text()) if path.exists() else None
        if match:
            return match
        time.sleep(0.05)
    raise AssertionError(f"{pattern!r} did not appear in {path}")


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def copy(finished: Any, tmp_path: Path) -> Path:
    """The finished run, copied to the folder that `cli` works in."""
    shutil.copytree(finished.folder / "runs", tmp_path / "runs", symlinks=True)
    return tmp_path / "runs" / "first"


def test_a_run_leaves_one_tidy_folder(finished: Any) -> None:
    document, run = finished.document, finished.run
    summary = document["summary"]
    assert document["ok"] is True
    assert document["exit_code"] == 0
    assert summary["steps"] == {"from": 0, "to": 8, "total": 8}
    assert {p.name for p in run.iterdir()} >= {
        "profile.toml", "profile.resolved.json", "run.json", "metrics.jsonl", "evaluations.jsonl", "samples",
        "checkpoints", "logs", "tensorboard",
    }  # fmt: skip
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == list(range(1, 9))
    pictures = ("step_000000", "step_000008", "extremes_000008")
    files = {f"{name}.{kind}" for name in pictures for kind in ("png", "json")}
    assert {p.name for p in (run / "samples").iterdir()} == files | {"before_after.png"}
    assert {p.name for p in (run / "logs" / "latest").iterdir()} >= {"rank_0.log", "rank_1.log"}
    for rank in range(2):
        # Each says on its own, every step, which copy sampled: old and an average are easily mixed up.
        said = re.findall(r"sampling with (\w+): rows", (run / "logs" / "latest" / f"rank_{rank}.log").read_text())
        assert said == ["old"] * 8
    assert [p.name for p in (run / "checkpoints").glob("step_*")] == ["step_000008"]
    assert set(summary["eval"]) == {"before", "after"}
    assert summary["eval"]["before"]["eval/samples"] == 12 * 2


def test_metrics_and_summary_have_the_names_on_record(finished: Any) -> None:
    records = Path(__file__).parents[1] / "cli" / "snapshots"
    row, evaluation = (
        json.loads((finished.run / f"{name}.jsonl").read_text().splitlines()[-1]) for name in ("metrics", "evaluations")
    )
    # The one name that only a GPU run has.
    assert (
        sorted({*row, "system/gpu_peak_sample_gb", "system/gpu_peak_train_gb"})
        == (records / "metrics.txt").read_text().split()
    )
    assert sorted(evaluation) == (records / "evaluations.txt").read_text().split()
    assert sorted(finished.document["summary"]) == (records / "summary.txt").read_text().split()


def test_event_files_are_read_by_tensorboard(finished: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/reward_mean")] == list(range(1, 9))
    assert [e.step for e in events.Images("samples")] == [0, 8]


def test_a_finished_run_has_nothing_to_do(copy: Path, cli: Cli) -> None:
    before = snapshot(copy)
    result = cli("resume", "first")
    assert result.returncode == 0
    assert "nothing to do" in result.stderr
    assert "--steps" in result.stderr
    assert snapshot(copy) == before


def test_a_missing_first_shard_is_refused_by_name(copy: Path, cli: Cli) -> None:
    shard = sorted((copy / "checkpoints" / "step_000008" / "state").glob("*.safetensors"))[0]
    shard.unlink()
    before = snapshot(copy)
    result = cli("resume", "first", "--steps", "9", timeout=60)
    assert result.returncode == 5
    assert shard.name in result.stderr
    assert snapshot(copy) == before
    assert left_behind() == []


@pytest.mark.parametrize(
    ("setting", "code", "text"),
    [("rl.seed=5", 6, "rl.seed"), ("rl.group_size=4", 6, "rl.group_size"), ("rl.scheduler_type=euler", 3, "unipc")],
)
def test_a_changed_run_is_refused_before_anything_starts(
    copy: Path, cli: Cli, setting: str, code: int, text: str
) -> None:
    before = snapshot(copy)
    result = cli("resume", "first", "--steps", "9", "--set", setting, timeout=60)
    assert result.returncode == code, result.stderr
    assert text in result.stderr
    assert snapshot(copy) == before
    assert left_behind() == []


def test_launch_refuses_by_preflight_without_a_folder(cli: Cli, tmp_path: Path) -> None:
    unfit = ("--set", "grid.backend=torchrun", "--set", "rl.ref.update_every=1")
    result = cli("launch", "tiny_t2i_cpu", "--steps", "2", *unfit, timeout=60)
    assert result.returncode == 3
    assert "grid-backend" in result.stderr
    assert "reference-not-frozen" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert left_behind() == []


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = start(folder, "reward-serve", "--scorer", "tiny_digits", "--port", "0", "--revision", "r1")
    assert process.stdout is not None
    return process, process.stdout.readline().removeprefix("listening on ").strip()


def http_profile(folder: Path, url: str, revision: str = "r1") -> str:
    path = folder / "http.toml"
    path.write_text(
        'extends = "tiny_t2i_cpu"\n[reward]\nretries = 1\ndeadline_s = 5.0\n'
        f'[[reward.providers]]\nname = "digits"\nkind = "http"\nurl = "{url}"\nrevision = "{revision}"\n'
    )
    return str(path)


def test_a_wrong_revision_is_found_before_anything_is_created(tmp_path: Path, cli: Cli) -> None:
    service, url = serve(tmp_path)
    try:
        result = cli("launch", http_profile(tmp_path, url, "r2"), "--steps", "2", timeout=60)
    finally:
        service.terminate()
        service.communicate()
    assert result.returncode == 4
    assert "r1" in result.stderr
    assert "r2" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_what_is_sampled_of_a_checkpoint_is_in_the_run_s_own_grids(finished: Any, cli: Cli, tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    run = finished.run
    answer = cli("sample", str(run), "--weights", "base,policy", "--images", "singles")
    assert answer.returncode == 0, answer.stderr
    for step, name in ((0, "base"), (8, "base"), (8, "policy")):
        grid = np.asarray(Image.open(run / f"samples/step_{step:06d}.png").convert("RGB")).astype(int)
        facts = json.loads((run / f"samples/step_{step:06d}.json").read_text())
        column, (left, top), (right, down) = facts["columns"].index(name), facts["origin"], facts["pitch"]
        singles = sorted((tmp_path / "singles").glob(f"*_{name}.png"))
        assert len(singles) == len(facts["prompts"]) == 6
        for row, path in enumerate(singles):
            tile = np.kron(np.asarray(Image.open(path)).astype(int), np.ones((8, 8, 1), int))
            x, y = left + column * right, top + row * down
            # Batches are cut otherwise, which may move a pixel by the last bit.
            assert abs(grid[y : y + 64, x : x + 64] - tile).max() <= 1
