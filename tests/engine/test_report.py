"""Metric files hold each step once, nothing that is not finite, and pictures have the sizes they should."""

from __future__ import annotations

import math
import resource
import signal
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import orjson
import pytest
from PIL import Image

from nftctl.engine.report import (
    JsonLines,
    TensorBoard,
    done_again,
    join_grids,
    read_rows,
    require_finite,
    write_curve,
    write_grid,
)
from nftctl.errors import CheckpointUnusable, TrainingFailed


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "train/reward_mean": step / 10, **values}


def written(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Five steps, of which a checkpoint was made at the third."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, keep_through=0)
    for step in range(1, 6):
        lines.append(row(step, attempt=1))
    lines.close()
    return path


def test_a_resumed_run_writes_each_step_once(metrics: Path) -> None:
    lines = JsonLines(metrics, keep_through=3)
    assert [r["step"] for r in lines.rows] == [1, 2, 3]
    for step in (4, 5, 6):
        lines.append(row(step, attempt=2))
    lines.close()
    assert [(r["step"], r["attempt"]) for r in written(metrics)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert lines.rows == written(metrics)


@pytest.mark.parametrize(
    ("step", "steps", "rows"),
    [
        (3, "steps 4 to 5 had been taken {} are", "2 rows of metrics.jsonl are"),
        (4, "step 5 had been taken {} is", "1 row"),
    ],
)
def test_steps_that_are_done_again_are_named(metrics: Path, step: int, steps: str, rows: str) -> None:
    lines = JsonLines(metrics, keep_through=step)
    lines.close()
    said = done_again(lines, step)
    assert said.startswith(f"{steps.format('after that checkpoint and')} done again; {rows}")
    assert said.endswith(" replaced")


def test_where_no_step_is_done_again_nothing_is_said(metrics: Path) -> None:
    lines = JsonLines(metrics, keep_through=5)
    lines.close()
    assert done_again(lines, 5) == ""


def test_rows_are_in_the_file_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.append(row(1))
    assert written(tmp_path / "m.jsonl") == [row(1)]
    lines.close()


def test_what_a_crash_cut_off_is_left_out_and_overwritten(metrics: Path) -> None:
    whole = metrics.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        metrics.write_bytes(whole[:-cut] if cut > 1 else whole[:-2])
        assert [r["step"] for r in read_rows(metrics)] == [1, 2, 3, 4]
    lines = JsonLines(metrics, keep_through=4)
    lines.append(row(5, attempt=2))
    lines.close()
    assert [(r["step"], r["attempt"]) for r in written(metrics)] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_not_written(tmp_path: Path, bad: float) -> None:
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.append(row(1))
    with pytest.raises(TrainingFailed, match=r"step 2: not finite: a, b$"):
        lines.append(row(2, b=bad, a=bad, c=1.0))
    lines.append(row(2))
    lines.close()
    assert [r["step"] for r in written(tmp_path / "m.jsonl")] == [1, 2]


def test_numbers_survive_the_file_to_the_bit(tmp_path: Path) -> None:
    values = {str(n): float(v) for n, v in enumerate(np.random.default_rng(0).standard_normal(100) * 1e-7)}
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.append({"step": 1, **values})
    lines.close()
    assert written(tmp_path / "m.jsonl") == [{"step": 1, **values}]
    require_finite({"step": 1, "text": "nan", "count": 3})


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "absent.jsonl") == []


# ---- pictures


@pytest.mark.parametrize(("size", "zoom"), [((8, 8), 8), ((16, 8), 4), ((64, 64), 1), ((100, 80), 1)])
def test_a_grid_shows_every_pixel_of_every_sample_enlarged_without_smoothing(
    tmp_path: Path, size: tuple[int, int], zoom: int
) -> None:
    height, width = size
    images = np.random.default_rng(0).integers(0, 256, (2, 3, height, width, 3), dtype=np.uint8)
    write_grid(tmp_path / "g.png", images, ["a red one", "a rather long prompt that needs its room"], "base")
    with Image.open(tmp_path / "g.png") as sheet:
        pixels = np.asarray(sheet)
    cell_h, cell_w = height * zoom, width * zoom
    assert sheet.height == 22 + 2 * (cell_h + 4) + 4
    left = sheet.width - 4 - 3 * (cell_w + 4) + 4
    assert left > 0
    for i in range(2):
        for j in range(3):
            top = 26 + i * (cell_h + 4)
            tile = pixels[top : top + cell_h, left + j * (cell_w + 4) :][:, :cell_w]
            np.testing.assert_array_equal(tile, images[i, j].repeat(zoom, axis=0).repeat(zoom, axis=1))


def test_two_grids_side_by_side_keep_their_pixels(tmp_path: Path) -> None:
    before, after = np.full((30, 20, 3), 10, np.uint8), np.full((40, 25, 3), 200, np.uint8)
    Image.fromarray(before).save(tmp_path / "b.png")
    Image.fromarray(after).save(tmp_path / "a.png")
    join_grids(tmp_path / "b.png", tmp_path / "a.png", tmp_path / "both.png")
    with Image.open(tmp_path / "both.png") as sheet:
        pixels = np.asarray(sheet)
    assert sheet.size == (20 + 12 + 25, 40)
    np.testing.assert_array_equal(pixels[:30, :20], before)
    np.testing.assert_array_equal(pixels[:, 32:], after)
    assert (pixels[:, 20:32] == 255).all()


def points(figure: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = figure.findall("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in lines]


def test_the_curve_is_xml_with_a_point_for_each_step_inside_its_frame(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 31)]
    looks = [{"step": 0, "eval/reward": -1.0}, {"step": 30, "eval/reward": 4.0}]
    write_curve(tmp_path / "c.svg", rows, looks)
    figure = ElementTree.parse(tmp_path / "c.svg").getroot()
    raw, smooth = points(figure)
    assert len(raw) == len(smooth) == 30
    assert raw[-1][0] == 580.0
    # The scale runs from -1 to 4 over 170 units, downwards from 200.
    assert raw[9] == pytest.approx((50 + 530 * 10 / 30, 200 - 170 * (1.0 + 1) / 5), abs=0.06)
    assert smooth[9][1] == pytest.approx(200 - 170 * (0.55 + 1) / 5, abs=0.06)  # the mean of 0.1 ... 1.0
    marks = figure.findall("{http://www.w3.org/2000/svg}circle")
    assert [(float(m.attrib["cx"]), float(m.attrib["cy"])) for m in marks] == [(50.0, 200.0), (580.0, 30.0)]


def test_a_flat_curve_and_a_single_step_do_no_harm(tmp_path: Path) -> None:
    flat = [{"step": n, "train/reward_mean": 0.5} for n in (1, 2)]
    write_curve(tmp_path / "flat.svg", flat, [])
    assert points(ElementTree.parse(tmp_path / "flat.svg").getroot())[0] == [(315.0, 200.0), (580.0, 200.0)]
    write_curve(tmp_path / "one.svg", flat[:1], [])
    assert not (tmp_path / "one.svg").exists()


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


def test_a_grid_that_cannot_be_written_is_a_fault_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match=r"cannot write .*absent/g\.png: No such file") as caught:
        write_grid(tmp_path / "absent" / "g.png", np.zeros((1, 1, 8, 8, 3), np.uint8), ["a"], "base")
    assert caught.value.hint
