"""A run is found by whatever a person calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nftctl.errors import CheckpointUnusable
from nftctl.run.find import find_run
from tests.report.folders import make_run
from tests.run.make import write_checkpoint


def test_a_run_is_found_by_folder_by_name_and_by_its_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "first")
    step = write_checkpoint(run.checkpoints, 10)
    for target in ("first", str(run.path), str(run.checkpoints), str(step), str(run.checkpoints / "latest")):
        assert find_run(target, tmp_path / "runs").path.resolve() == run.path.resolve()
    for target, said in (("fist", "no run folder and no run named fist"), (str(run.run_json), "is a file")):
        with pytest.raises(CheckpointUnusable, match=said):
            find_run(target, tmp_path / "runs")
    with pytest.raises(CheckpointUnusable, match=r"is not a run folder: no run\.json"):
        find_run(str(tmp_path), tmp_path / "runs")
