"""Ranks use exactly the visible GPUs, and say which. Run with `pytest -m gpu tests/gpu` on two GPUs or more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TWO = (
    "--set", "rl.group_size=2", "--set", "grid.device=cuda", "--set", 'eval.prompt_file=""',
    "--set", "samples.prompts=0", "--set", "job.deterministic=true",
)  # fmt: skip


def uuids() -> list[str]:
    """Of all GPUs of this machine, in the driver's order."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)


@pytest.mark.parametrize("zero", ["0", "1"])
@pytest.mark.parametrize("order", ["last two", "last two, backwards", "by uuid"])
def test_each_rank_has_one_visible_gpu_and_names_it(tmp_path: Path, order: str, zero: str) -> None:
    present = uuids()
    if len(present) < 2:
        pytest.skip("two GPUs are needed")
    numbers = [len(present) - 2, len(present) - 1]
    numbers = numbers[::-1] if order.endswith("backwards") else numbers
    chosen = ",".join(present[n] if order == "by uuid" else str(n) for n in numbers)
    result = subprocess.run(
        [sys.executable, "-m", "nftctl", "launch", "tiny_t2i_cpu", "--steps", "1", "--name", "two", *TWO],
        cwd=tmp_path,
        # Both of Ray's defaults for processes without a GPU.
        env={
            **clean_environment(),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": chosen,
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": zero,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    logs = [(tmp_path / f"runs/two/logs/latest/rank_{rank}.log").read_text() for rank in (0, 1)]
    found = [re.findall(rf"rank {rank} computes on (GPU-[0-9a-f-]+),", text) for rank, text in enumerate(logs)]
    assert [len(names) for names in found] == [1, 1]
    assert {names[0] for names in found} == {present[n] for n in numbers}


def test_the_driver_holds_no_gpu(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, threading\n"
        "from nftctl.cli.main import main\n"
        "seen = set()\n"
        "def watch():\n"
        "    ask = ['nvidia-smi', '--query-compute-apps=pid', '--format=csv,noheader']\n"
        "    while not done.wait(0.5):\n"
        "        seen.update(subprocess.run(ask, capture_output=True, text=True).stdout.split())\n"
        "done = threading.Event()\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "sys.argv = ['nftctl', *sys.argv[1:]]\n"
        "code = main()\n"
        "done.set(); thread.join()\n"
        "print('driver has a context:', str(os.getpid()) in seen, 'torch' in sys.modules, file=sys.stderr)\n"
        "raise SystemExit(code)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "launch", "tiny_t2i_cpu", "--steps", "2", *TWO],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "driver has a context: False False" in result.stderr
