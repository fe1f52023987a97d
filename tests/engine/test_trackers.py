"""Trackers repeat what the run's own files hold, and never stop it."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from nftctl.engine.trackers import TensorBoard


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
