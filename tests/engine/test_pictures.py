"""Pictures have the sizes and the pixels that they should."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from nftctl.engine.pictures import join_grids, write_curve, write_grid
from nftctl.errors import CheckpointUnusable


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "train/reward_mean": step / 10, **values}


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


def test_a_grid_that_cannot_be_written_is_a_fault_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match=r"cannot write .*absent/g\.png: No such file") as caught:
        write_grid(tmp_path / "absent" / "g.png", np.zeros((1, 1, 8, 8, 3), np.uint8), ["a"], "base")
    assert caught.value.hint
