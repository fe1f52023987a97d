"""A checkpoint that is written in the background: what points to it and when, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine import saving
from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.engine.saving import Checkpoints
from nftctl.errors import CheckpointUnusable, TrainingFailed
from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.directory import RunDirectory
from nftctl.run.state import RunState
from tests.engine.test_world import tensors_of


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


@pytest.mark.ray
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


class Ranks:
    """Stands in for the group: writes nothing, and says of each `save_finish` what it was told to."""

    def __init__(self, *answers: list[bool] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        self.asked.append(("all", method))
        return self._answer(method)

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        self.asked.append((f"rank {rank}", method))
        return self._answer(method)[0]

    def _answer(self, method: str) -> list[Any]:
        if method == "save_begin":
            return [{"tensors": {}, "optimizer_entries": []}]
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def begun(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`begun(ranks, *sets)`: a save of step 1 that those ranks are writing."""
    monkeypatch.setattr(saving, "PATIENCE_S", 0.01)

    def begin(ranks: Ranks, *sets: str) -> tuple[Checkpoints, Path]:
        plan = plan_launch(tiny(2, ('job.name="run"', *sets)), run_dir=tmp_path)
        run = RunDirectory.create(tmp_path, "run", profile_text="", resolved={}, record=plan.record())
        saves = Checkpoints(plan, run, ranks)  # type: ignore[arg-type]
        saves.begin(RunState(step=1), [])
        return saves, run.checkpoints

    return begin


@pytest.mark.parametrize(
    ("sets", "who", "answers"),
    [
        ((), "rank 0", [[False], [False], [True]]),
        (('model.train="full"',), "all", [[False, True], [True, False], [True, True]]),
    ],
)
def test_only_those_who_write_are_asked_until_all_have_written(
    begun: Any, sets: tuple[str, ...], who: str, answers: list[list[bool]]
) -> None:
    ranks = Ranks(*answers)
    saves, checkpoints = begun(ranks, *sets)
    saves.advance_if_written()  # within a step: one question, no waiting
    assert ranks.asked == [(who, "save_begin"), (who, "save_finish")]
    assert [n for n, _ in list_partials(checkpoints)] == [1]
    assert saves.finish() == checkpoints / "step_000001"
    assert ranks.asked == [(who, "save_begin"), *[(who, "save_finish")] * 3]
    saves.advance()
    saves.advance_if_written()
    assert len(ranks.asked) == 4


@pytest.mark.parametrize(
    "failure", [TrainingFailed("rank 1 did not finish step 1, save"), CheckpointUnusable("still being written")]
)
def test_a_save_that_failed_is_not_waited_for_again_and_leaves_no_checkpoint(begun: Any, failure: Exception) -> None:
    saves, checkpoints = begun(Ranks([False], failure))
    saves.advance_if_written()
    with pytest.raises(type(failure), match=str(failure)):
        saves.advance()
    assert saves.finish() is None
    assert list_steps(checkpoints) == []
