"""A checkpoint that is written in the background: what points to it and when, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.run.checkpoints import list_partials, list_steps
from tests.engine.test_world import tensors_of

pytestmark = pytest.mark.ray


def hold(worker: Any, gate: Path, save: int) -> None:
    """Let the writer of the given save (from 1) wait until the gate is there."""
    import time

    from nftctl.engine import checkpoint

    worker.sound = original = checkpoint._write_whole
    worker.saves = 0

    def write(*args: Any) -> None:
        worker.saves += 1
        while worker.saves == save and not gate.exists():
            time.sleep(0.01)
        original(*args)

    checkpoint._write_whole = write


def let_go(worker: Any) -> int:
    """Put the writer back; returns how often it was called."""
    from nftctl.engine import checkpoint

    checkpoint._write_whole = worker.sound
    saves: int = worker.saves
    return saves


def test_training_goes_on_under_a_slow_writer_and_reaches_neither_pointer_nor_content(
    world4: Any, tiny: Any, reporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ("checkpoint.every=1", "checkpoint.keep_last=9")
    run_job(plan_launch(tiny(2, ('job.name="short"', *sets)), run_dir=tmp_path), reporter, world4)
    checkpoints, gate = tmp_path / "slow" / "checkpoints", tmp_path / "gate"
    seen: dict[int, tuple[str, list[int], list[int]]] = {}

    def step(row: Mapping[str, Any], total: int) -> None:
        if row["step"] >= 2:
            latest = (checkpoints / "latest").readlink().name if (checkpoints / "latest").is_symlink() else ""
            whole = [n for n, _ in list_steps(checkpoints)]
            seen[row["step"]] = (latest, whole, [n for n, _ in list_partials(checkpoints)])
        if row["step"] == 3:  # its optimizer step is done, and the weights of step 2 are not written
            gate.touch()

    monkeypatch.setattr(reporter, "step", step)
    world4.call("apply", lambda w: hold(w, gate, 2))
    try:
        run_job(plan_launch(tiny(4, ('job.name="slow"', *sets)), run_dir=tmp_path), reporter, world4)
    finally:
        gate.touch()
        saves = world4.call("apply", let_go)
    assert saves == [4, 0, 0, 0]  # whole tensors are the same everywhere, so one rank writes them
    for step_now, (latest, whole, _) in seen.items():
        assert latest == (f"step_{whole[-1]:06d}" if whole else "")
        assert max(whole, default=0) <= step_now - 1
    # While step 2 is being written, step 3 is trained, and what there is to go on from is step 1.
    assert seen[3] == ("step_000001", [1], [2])
    assert (checkpoints / "latest").readlink().name == "step_000004"
    assert [n for n, _ in list_steps(checkpoints)] == [1, 2, 3, 4]
    saved = [tensors_of(path) for _, path in list_steps(checkpoints)]
    assert saved[1] == tensors_of(list_steps(tmp_path / "short" / "checkpoints")[-1][1])
    assert saved[1] != saved[2]
