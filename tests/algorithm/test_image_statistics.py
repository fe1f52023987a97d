"""Figures of images that are known beforehand: flat ones, checkerboards, ramps, noise, groups of black and white."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nftctl.algorithm.image_statistics import SQUARES, THUMBNAIL, diversity, look_at


def flat(level: int, height: int = 12, width: int = 20) -> np.ndarray:
    return np.full((height, width, 3), level, dtype=np.uint8)


def checkerboard(side: int) -> np.ndarray:
    rows, columns = np.indices((side, side))
    return np.repeat((((rows + columns) % 2) * 255).astype(np.uint8)[:, :, None], 3, axis=2)


@pytest.mark.parametrize(
    ("level", "share"), [(0, 1.0), (2, 1.0), (3, 0.0), (128, 0.0), (252, 0.0), (253, 1.0), (255, 1.0)]
)
def test_a_flat_image_has_no_detail_and_is_saturated_at_the_ends_alone(level: int, share: float) -> None:
    look = look_at(flat(level))
    assert (look.saturation, look.high_frequency) == (share, pytest.approx(0.0, abs=1e-6))
    assert look.thumbnail == pytest.approx(np.full((6, 8, 3), level / 255), abs=1e-6)


def test_saturation_counts_channels_and_not_pixels() -> None:
    image = flat(128)
    image[:, :, 1] = 255
    assert look_at(image).saturation == pytest.approx(1 / 3)


@pytest.mark.parametrize("side", [8, 64, 1024])
def test_a_checkerboard_is_all_detail(side: int) -> None:
    look = look_at(checkerboard(side))
    assert look.high_frequency == pytest.approx(0.5, abs=1e-6)
    assert look.thumbnail == pytest.approx(np.full_like(look.thumbnail, 0.5), abs=1e-6)


def test_detail_of_a_ramp_is_half_its_slope() -> None:
    image = np.repeat((3 * np.arange(64, dtype=np.uint8))[None, :, None], 32, axis=0).repeat(3, axis=2)
    assert look_at(image).high_frequency == pytest.approx(1.5 / 255, rel=1e-5)


@pytest.mark.parametrize("side", [128, 1024])
def test_detail_of_noise_is_what_a_mean_of_four_takes_away(side: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    look = look_at(image)
    assert look.high_frequency == pytest.approx(math.sqrt(0.75 * (256**2 - 1) / 12) / 255, rel=0.02)
    assert look.saturation == pytest.approx(6 / 256, rel=0.15)


def test_a_grid_of_eight_pixels_is_met_at_all_its_phases() -> None:
    """A large image is read in part, and lines as a decoder leaves them are in that part as often as in the image."""
    image = flat(100, 1024, 1024)
    image[:, ::8] = 255
    assert image.shape[0] // 2 > SQUARES
    assert look_at(image).saturation == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.parametrize("cell", [2, 16])
def test_the_thumbnail_is_the_mean_of_equal_cells(cell: int) -> None:
    cells = np.random.default_rng(1).integers(0, 256, (THUMBNAIL, THUMBNAIL, 3), dtype=np.uint8)
    image = cells.repeat(cell, axis=0).repeat(cell, axis=1)
    assert look_at(image).thumbnail == pytest.approx(cells / 255, abs=1e-6)


def test_sides_that_are_no_multiple_of_the_cells() -> None:
    """26 rows are 13 squares: cells of one or two of them."""
    image = np.random.default_rng(2).integers(0, 256, (26, 16, 3), dtype=np.uint8)
    squares = image.reshape(13, 2, 8, 2, 3).mean(axis=(1, 3)) / 255
    edges = [0, 1, 3, 4, 6, 8, 9, 11, 13]
    wanted = np.stack([squares[a:b].mean(axis=0) for a, b in itertools.pairwise(edges)])
    assert look_at(image).thumbnail == pytest.approx(wanted, abs=1e-6)


def test_an_odd_last_line_is_left_out() -> None:
    image = flat(128, 9, 11)
    image[8], image[:, 10] = 255, 255
    assert look_at(image).saturation == 0.0
    with pytest.raises(ValueError, match="no 2x2 square"):
        look_at(flat(0, 1, 8))


def test_diversity_is_the_mean_distance_of_pairs_in_a_group() -> None:
    black, white, grey = np.zeros(12), np.ones(12), np.full(12, 0.25)
    assert diversity(np.array([[black, white]])) == 1.0
    assert diversity(np.array([[black, black, white, white]])) == pytest.approx(4 / 6)
    # Groups count alike, and images of different groups are not compared.
    assert diversity(np.array([[black, black], [white, grey]])) == pytest.approx((0.0 + 0.75) / 2)


def test_a_group_of_one_has_none() -> None:
    assert diversity(np.zeros((3, 1, 12))) == 0.0
