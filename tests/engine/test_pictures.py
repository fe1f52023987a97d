"""Pictures have the sizes and the pixels that they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from nftctl.engine.pictures import Layout, Shown, join_grids, write_curve, write_extremes, write_grid
from nftctl.errors import CheckpointUnusable


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "train/reward_mean": step / 10, **values}


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def opened(path: Path) -> np.ndarray:
    with Image.open(path) as sheet:
        return np.asarray(sheet)


def cut(pixels: np.ndarray, layout: Layout, row: int, column: int) -> np.ndarray:
    """A single image, by what the layout says."""
    left = layout.origin[0] + column * layout.pitch[0]
    top = layout.origin[1] + row * layout.pitch[1]
    return pixels[top : top + layout.cell[1], left : left + layout.cell[0]]


PROMPTS = ["a red one", "a rather long prompt that needs its room, and has so many words that it is broken into lines"]
LOOKS: dict[str, Any] = {
    "captions": ["base", "old", "policy"], "notes": ["mean 0.123", "= policy", "mean -12.345"],
    "rewards": [[0.0, 0.5, -12.345678], [1.0, 100.25, 3.0]],
}  # fmt: skip


@pytest.mark.parametrize("looks", [{}, LOOKS], ids=["bare", "dressed"])
@pytest.mark.parametrize(("size", "zoom"), [((8, 8), 8), ((16, 8), 4), ((64, 64), 1), ((100, 80), 1), ((1, 5), 12)])
def test_a_grid_shows_every_pixel_of_every_sample_enlarged_without_smoothing(
    tmp_path: Path, size: tuple[int, int], zoom: int, looks: dict[str, Any]
) -> None:
    images = noise(2, 3, *size)
    layout = write_grid(tmp_path / "g.png", images, PROMPTS, "base", **looks)
    pixels = opened(tmp_path / "g.png")
    assert layout.cell == (size[1] * zoom, size[0] * zoom)
    for i in range(2):
        for j in range(3):
            expected = images[i, j].repeat(zoom, axis=0).repeat(zoom, axis=1)
            np.testing.assert_array_equal(cut(pixels, layout, i, j), expected)
    # Nothing runs out of the picture.
    assert (pixels[:, -8:] == 255).all()
    assert (pixels[-8:] == 255).all()
    assert (pixels[:8] == 255).all()


def test_large_images_are_reduced_with_smoothing(tmp_path: Path) -> None:
    board = (np.indices((1024, 512)).sum(axis=0) % 2 * 255).astype(np.uint8)
    images = np.broadcast_to(board[None, None, :, :, None], (1, 2, 1024, 512, 3))
    layout = write_grid(tmp_path / "g.png", np.ascontiguousarray(images), ["a"], "base")
    assert layout.cell == (128, 256)
    tile = cut(opened(tmp_path / "g.png"), layout, 0, 1)
    # Every other pixel is white: whoever picked pixels would show black or white alone.
    assert np.abs(tile.astype(float) - 127.5)[4:-4, 4:-4].max() < 3


def test_a_reward_stands_under_its_own_image_and_nowhere_else(tmp_path: Path) -> None:
    images = noise(2, 3, 8, 8)
    sheets = []
    for number, changed in enumerate((0.111, 0.888)):
        rewards = [[0.5, 0.5, 0.5], [0.5, changed, 0.5]]
        layout = write_grid(tmp_path / f"{number}.png", images, PROMPTS, "t", rewards=rewards)
        sheets.append(opened(tmp_path / f"{number}.png").astype(int))
    rows, columns, _ = np.nonzero(sheets[0] != sheets[1])
    left, top = layout.origin[0] + layout.pitch[0], layout.origin[1] + layout.pitch[1] + layout.cell[1]
    middle = left + layout.cell[0] / 2
    assert len(rows)
    assert top < rows.min() <= rows.max() < layout.origin[1] + 2 * layout.pitch[1]
    assert abs(columns.min() - middle) < layout.pitch[0] / 2
    assert abs(columns.max() - middle) < layout.pitch[0] / 2


def test_a_prompt_of_many_thousand_characters_leaves_room_for_the_images(tmp_path: Path) -> None:
    prompts = ["word " * 20_000, "x" * 20_000]
    layout = write_grid(tmp_path / "g.png", noise(2, 1, 8, 8), prompts, "t")
    assert layout.origin[0] < 300
    assert opened(tmp_path / "g.png").shape[0] < 250


def test_best_and_worst_stand_in_two_rows_with_their_prompts(tmp_path: Path) -> None:
    images = noise(7, 8, 8)
    shown = [Shown(image, 0.5 - n, PROMPTS[n % 2]) for n, image in enumerate(images)]
    layout = write_extremes(tmp_path / "e.png", shown[:4], shown[4:], "step 3")
    pixels = opened(tmp_path / "e.png")
    assert layout.cell == (128, 128)
    for n in range(7):
        expected = images[n].repeat(16, axis=0).repeat(16, axis=1)
        np.testing.assert_array_equal(cut(pixels, layout, n // 4, n % 4), expected)
    # There is no eighth sample, so nothing but white stands in its place.
    assert (cut(pixels, layout, 1, 3) == 255).all()
    alone = write_extremes(tmp_path / "one.png", shown[:1], [], "step 4")
    np.testing.assert_array_equal(cut(opened(tmp_path / "one.png"), alone, 0, 0)[::16, ::16], images[0])


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
