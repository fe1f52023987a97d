"""The public recipe's own measurement, whole, on two CPU ranks and a tiny base: what four GPUs are asked to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environment

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(1800)]

SETS = ('grid.device="cpu"', 'model.dtype="float32"', "rl.sample_steps=2")


def test_it_starts_steps_resumes_exactly_and_is_timed(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "public_profile.py"), str(tmp_path)]
    sizes = ["--ranks", "2", "--shape", "cosmos3-tiny", "--sizes", "256", "--seconds", "1700"]
    sets = [part for one in SETS for part in ("--set", one)]
    done = subprocess.run(
        [*script, *sizes, *sets], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "said.txt").read_text()[-3000:]
    found = json.loads((tmp_path / "public_profile.json").read_text())
    assert found["failed"] == found["left_out"] == []
    assert found["exact"]["equal"]
    assert found["exact"]["tensors"] > 0
    assert found["published"]["steps"] == 20
    assert [(one["ranks"], one["size"]) for one in found["bench"]] == [(2, 256), (1, 256)]
    assert "efficiency of 2 ranks against 1" in done.stdout
