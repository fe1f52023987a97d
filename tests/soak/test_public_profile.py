"""The public recipe's own measurement, whole, on two CPU ranks and a tiny base: what four GPUs are asked to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, clean_environment

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(1800)]

SETS = ('grid.device="cpu"', 'model.dtype="float32"', "rl.sample_steps=2")


def measured(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    script = [sys.executable, str(ROOT / "benchmarks" / "public_profile.py"), str(folder), *options]
    sizes = ["--shape", "cosmos3-tiny", "--sizes", "256", "--seconds", "1700"]
    sets = [part for one in SETS for part in ("--set", one)]
    done = subprocess.run(
        [*script, *sizes, *sets], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + (folder / "said.txt").read_text()[-3000:]
    found = json.loads((folder / "public_profile.json").read_text())
    assert found["failed"] == found["left_out"] == []
    assert found["exact"]["equal"]
    assert found["exact"]["tensors"] > 0
    return found, done.stdout


def test_it_starts_steps_resumes_exactly_and_is_timed(tmp_path: Path) -> None:
    found, said = measured(tmp_path, "--ranks", "2")
    assert found["published"]["steps"] == 20
    assert [(one["ranks"], one["size"]) for one in found["bench"]] == [(2, 256), (1, 256)]
    assert "efficiency of 2 ranks against 1" in said


def test_it_resumes_exactly_over_four_nodes_of_a_cluster(tmp_path: Path) -> None:
    found, said = measured(tmp_path, "--ranks", "4", "--nodes", "4", "--parts", "exact")
    assert "bench" not in found
    assert "4 Ray nodes at" in said
    # A rank on each of them, as `resume` tells, which is not quiet.
    assert re.search(r"^ranks 0 on .*, 1 on .*, 2 on .*, 3 on ", (tmp_path / "said.txt").read_text(), re.MULTILINE)
