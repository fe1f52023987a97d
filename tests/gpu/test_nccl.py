"""The embedded model on two GPUs over NCCL: the same command, the same code. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TWO = ("--set", "rl.group_size=2", "--set", "grid.device=cuda", "--set", "job.deterministic=true")


def nftctl(folder: Path, *arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "nftctl", *arguments, "--json"],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(p.read_text()[-2000:] for p in folder.glob("runs/*/logs/latest/rank_*.log"))
    assert result.returncode == 0, result.stderr + logs
    print(result.stderr)
    document: dict[str, Any] = json.loads(result.stdout)["summary"]
    return document


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def promised(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith(("timer/", "system/"))}


def tensors(folder: Path, checkpoint: str) -> dict[str, bytes]:
    """Every tensor's bytes by name; which rank wrote which is not part of the promise."""
    from safetensors import safe_open

    found: dict[str, bytes] = {}
    for path in sorted((folder / checkpoint / "state").glob("*.safetensors")):
        with safe_open(path, "pt") as part:
            found |= {name: part.get_tensor(name).numpy().tobytes() for name in part.keys()}  # noqa: SIM118
    return found


def test_ten_steps_are_finite_and_the_reward_is_sane(tmp_path: Path) -> None:
    summary = nftctl(tmp_path, "launch", "tiny_t2i_cpu", "--steps", "10", "--name", "ten", *TWO)
    table = rows(tmp_path, "ten")
    assert summary["device"] == "cuda"
    assert len(table) == 10
    assert all(math.isfinite(v) for row in table for v in row.values() if isinstance(v, float))
    assert all(row["forwards/planned"] == row["forwards/executed"] for row in table)
    assert 0.3 < summary["eval"]["before"]["eval/reward"] < 0.7
    for row in table:
        print({k: round(v, 4) for k, v in row.items() if k.startswith(("train/reward", "timer/", "system/"))})


def test_gpu_and_cpu_sample_the_same_images(tmp_path: Path) -> None:
    """The first step's reward, from the same noise: equal up to the arithmetic of two devices."""
    quiet = ("--set", 'eval.prompt_file=""', "--set", "samples.prompts=0", "--steps", "1")
    nftctl(tmp_path, "launch", "tiny_t2i_cpu", "--name", "gpu", *TWO, *quiet)
    nftctl(tmp_path, "launch", "tiny_t2i_cpu", "--name", "cpu", *TWO[:2], "--set", "grid.device=cpu", *quiet)
    gpu, cpu = rows(tmp_path, "gpu")[0], rows(tmp_path, "cpu")[0]
    for name in ("train/reward_mean", "train/policy_loss", "train/positive_error"):
        assert gpu[name] == pytest.approx(cpu[name], rel=0.02), name


def test_straight_equals_resumed_to_the_bit(tmp_path: Path) -> None:
    quiet = ("--set", 'eval.prompt_file=""', "--set", "samples.prompts=0")
    straight = nftctl(tmp_path, "launch", "tiny_t2i_cpu", "--steps", "6", "--name", "straight", *TWO, *quiet)
    nftctl(tmp_path, "launch", "tiny_t2i_cpu", "--steps", "3", "--name", "halted", *TWO, *quiet)
    resumed = nftctl(tmp_path, "resume", "halted", "--steps", "6")
    assert [promised(r) for r in rows(tmp_path, "halted")] == [promised(r) for r in rows(tmp_path, "straight")]
    first, second = tensors(tmp_path, straight["checkpoint"]), tensors(tmp_path, resumed["checkpoint"])
    assert len(first) == 32 * 5
    assert sorted(name for name in first if first[name] != second[name]) == []
    shutil.rmtree(tmp_path / "runs")
