"""A disk that fills up under a run: the run ends with its own code and the way back, and loses no step that was saved.

The disk is a real one, a tmpfs of a few MiB, so these need the right to mount.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine import loop
from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.errors import CheckpointUnusable
from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.directory import find_checkpoint
from nftctl.run.manifest import verify
from tests.conftest import Quiet
from tests.engine.test_world import promised, rows_of


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("a small disk can be mounted by root alone")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip(f"mounting is not allowed here: {answer.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


class Filling(Quiet):
    """A reporter that fills the disk up when a step has been taken."""

    def __init__(self, disk: Path, step: int) -> None:
        super().__init__()
        self.ballast = disk / "ballast"
        self._step = step

    def step(self, row: Any, total: int) -> None:
        super().step(row, total)
        if row["step"] == self._step:
            with self.ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)) == 4096:
                        pass
                except OSError:
                    return


@pytest.mark.ray
@pytest.mark.parametrize(
    ("every", "total", "full_after", "said"),
    [
        # The last step's save finds no room.
        (2, 4, 4, "rank 0 could not write the checkpoint to .*step_000004.*no space is left"),
        # With no save under way, a row of metrics finds none, once the last page of its file is full.
        (6, 12, 8, "cannot write to .*No space left"),
    ],
    ids=["in-the-save", "in-the-metrics"],
)
def test_a_full_disk_ends_the_run_and_loses_nothing_that_was_saved(
    world4: Any,
    tiny: Callable[..., Any],
    small_disk: Path,
    capfd: pytest.CaptureFixture[str],
    every: int,
    total: int,
    full_after: int,
    said: str,
) -> None:
    profile = tiny(total, ('job.name="full"', f"checkpoint.every={every}", "logging.tensorboard=true"))
    filling = Filling(small_disk, full_after)
    with pytest.raises(CheckpointUnusable, match=said) as caught:
        run_job(plan_launch(profile, run_dir=small_disk), filling, world4)
    checkpoints = small_disk / "full" / "checkpoints"
    saved = checkpoints / f"step_{every:06d}"
    assert f"nftctl resume {saved}" in caught.value.hint
    assert "make room" in caught.value.hint
    assert [path for _, path in list_steps(checkpoints)] == [saved]
    assert verify(saved) == []
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err

    # What the hint says works once there is room, and leaves no trace of the full disk.
    filling.ballast.unlink()
    again = Quiet()
    run, checkpoint = find_checkpoint(str(saved), small_disk)
    resumed = run_job(plan_resume(run, checkpoint, profile, steps=total), again, world4)
    assert [row["step"] for row in rows_of(resumed)] == list(range(1, total + 1))
    assert [row for row in map(promised, rows_of(resumed)) if row["step"] <= every] == list(
        map(promised, filling.rows[:every])
    )
    assert verify(Path(resumed["checkpoint"])) == []
    assert list_partials(checkpoints) == []
    last = filling.rows[-1]["step"]
    redone = f"steps {every + 1} to {last} had been taken after that checkpoint and are done again; {last - every} rows"
    assert any(note.startswith(redone) for note in again.notes), again.notes


@pytest.mark.parametrize(
    ("error", "advice"), [(PermissionError(13, "Permission denied"), "get the right"), (OSError(30, "ro"), "mount it")]
)
def test_what_cannot_be_written_for_another_reason_is_not_called_a_full_disk(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, advice: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(loop, "_run_job", refuse)
    with pytest.raises(CheckpointUnusable, match=f"cannot write to .*: {error.strerror}") as caught:
        run_job(plan_launch(tiny(1), run_dir=tmp_path), Quiet())
    assert advice in caught.value.hint
    assert "room" not in caught.value.hint
