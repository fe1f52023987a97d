"""Which pictures are embedded, that they come back to the byte, and what is left out in words."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from nftctl.report import gallery
from nftctl.report.samples import Extreme, album_of
from nftctl.run.directory import RunDirectory

from .folders import draw_grid, make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def test_a_grid_is_embedded_to_the_byte_with_what_it_shows(run: RunDirectory) -> None:
    path = draw_grid(run, 20, prompts=["a red zero", "two"])
    (grid,) = album_of(run.samples).grids
    assert (grid.step, grid.width, grid.height) == (20, 100, 50)
    kind, _, content = grid.uri().partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content) == path.read_bytes()
    assert grid.embedded == len(content)
    assert grid.sidecar is not None
    assert grid.sidecar.prompts == ["a red zero", "two"]
    assert (grid.sidecar.origin, grid.sidecar.pitch, grid.sidecar.cell) == ((40, 10), (20, 20), (16, 16))


def test_grids_stand_by_their_steps_and_other_pictures_are_none(run: RunDirectory) -> None:
    for step in (1_000_000, 5, 20):
        draw_grid(run, step)
    (run.samples / "before_after.png").write_bytes((run.samples / "step_000005.png").read_bytes())
    (run.samples / "extremes_000010.png").write_bytes((run.samples / "step_000005.png").read_bytes())
    (run.samples / "extremes_000020.png").write_bytes((run.samples / "step_000005.png").read_bytes())
    album = album_of(run.samples)
    assert [grid.step for grid in album.grids] == [5, 20, 1_000_000]
    assert album.extremes is not None
    assert album.extremes.step == 20
    assert album.left_out == []


def test_many_grids_are_thinned_evenly_and_the_rest_is_counted(run: RunDirectory) -> None:
    for step in range(31):
        draw_grid(run, step, sidecar=False)
    album = album_of(run.samples)
    assert len(album.grids) == 24
    assert (album.grids[0].step, album.grids[-1].step) == (0, 30)
    assert album.left_out == ["7 of 31 grids are not shown: at most 24 grids and 12 MB of pictures are embedded"]


def test_the_budget_keeps_the_ends(run: RunDirectory) -> None:
    for step in (0, 5, 10, 15):
        draw_grid(run, step)
    sizes = [grid.embedded for grid in album_of(run.samples).grids]
    album = album_of(run.samples, budget=sizes[0] + sizes[-1])
    assert [grid.step for grid in album.grids] == [0, 15]
    assert [grid.step for grid in album_of(run.samples, budget=max(sizes)).grids] == [15]
    assert album_of(run.samples, budget=10).grids == []
    assert "4 of 4 grids" in album_of(run.samples, budget=10).left_out[0]


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", None])
def test_a_file_that_is_no_whole_picture_is_left_out(run: RunDirectory, content: bytes | None) -> None:
    draw_grid(run, 0)
    path = draw_grid(run, 5)
    path.write_bytes(path.read_bytes()[:-20] if content is None else content)
    album = album_of(run.samples)
    assert [grid.step for grid in album.grids] == [0]
    assert album.left_out == ["step_000005.png is no whole PNG file"]


@pytest.mark.parametrize(
    "change",
    [
        {"pitch": [20, 200]}, {"cell": [0, 16]}, {"origin": [-1, 0]}, {"rewards": [[0.1]]}, {"columns": []},
        {"prompts": "x"}, {"rewards": [["a", "b", "c"], [1, 2, 3]]}, {"cell": 3},
    ],
)  # fmt: skip
def test_a_sidecar_that_does_not_fit_is_left_out(run: RunDirectory, change: dict[str, Any]) -> None:
    sidecar = draw_grid(run, 5).with_suffix(".json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | change))
    (grid,) = album_of(run.samples).grids
    assert grid.sidecar is None


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"prompts": ["a"]}'])
def test_a_broken_sidecar_is_left_out(run: RunDirectory, text: str) -> None:
    draw_grid(run, 5).with_suffix(".json").write_text(text)
    (grid,) = album_of(run.samples).grids
    assert grid.sidecar is None


def test_extremes_are_described_by_their_own_sidecar(run: RunDirectory) -> None:
    picture = draw_grid(run, 5, sidecar=False).rename(run.samples / "extremes_000005.png")
    best = [{"row": 9, "rank": 0, "prompt": "a red bus", "reward": 0.9854}]
    picture.with_suffix(".json").write_text(json.dumps({"step": 5, "best": best, "worst": []}))
    album = album_of(run.samples)
    assert album.extremes is not None
    assert album.extremes.extremes == (Extreme("best", "a red bus", 0.9854),)
    markup = gallery.section(album)
    assert 'alt="The best and the worst samples of step 5. Best: a red bus 0.985."' in markup
    picture.with_suffix(".json").write_text(json.dumps({"best": [{"prompt": "x"}], "worst": 3}))
    extremes = album_of(run.samples).extremes
    assert extremes is not None
    assert extremes.extremes == ()


def test_rewards_may_be_unknown(run: RunDirectory) -> None:
    sidecar = draw_grid(run, 5).with_suffix(".json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"rewards": [[None, 1, 0.5]] * 2}))
    (grid,) = album_of(run.samples).grids
    assert grid.sidecar is not None
    assert grid.sidecar.rewards == [[None, 1.0, 0.5]] * 2


def test_a_run_without_pictures_has_none(tmp_path: Path) -> None:
    album = album_of(tmp_path / "nowhere")
    assert (album.grids, album.extremes, album.left_out) == ([], None, [])
