"""The PNG writer, read back by Pillow."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nftctl.reward.images import decode_image
from nftctl.reward.png import write_png


def read(data):
    with Image.open(io.BytesIO(data)) as picture:
        picture.verify()
    with Image.open(io.BytesIO(data)) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return np.array(picture)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.integers(1, 256))
def test_every_image_comes_back(seed, height, width, levels):
    image = (np.random.default_rng(seed).integers(0, levels, (height, width, 3)) * (255 // max(levels - 1, 1))).astype(
        np.uint8
    )
    np.testing.assert_array_equal(read(write_png(image)), image)


def test_extremes_come_back():
    board = np.indices((33, 17)).sum(axis=0) % 2 * 255
    for image in (np.zeros((5, 7, 3)), np.full((5, 7, 3), 255), np.stack([board] * 3, axis=-1), np.ones((1, 1, 3))):
        np.testing.assert_array_equal(read(write_png(image.astype(np.uint8))), image)


def test_views_come_back():
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    for view in (image[::2, ::-1], image.transpose(1, 0, 2), image[..., ::-1]):
        np.testing.assert_array_equal(read(write_png(view)), view)


@pytest.mark.parametrize("kind", ["flat", "smooth", "noise"])
def test_files_are_no_larger_than_from_a_general_writer(kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    images = {
        "flat": np.full((256, 256, 3), 77, np.uint8),
        "smooth": np.asarray(Image.fromarray(noise).resize((256, 256), Image.Resampling.BICUBIC)),
        "noise": noise,
    }
    out = io.BytesIO()
    Image.fromarray(images[kind]).save(out, format="PNG", compress_level=1)
    assert len(write_png(images[kind])) <= 1.05 * len(out.getvalue())


def test_a_damaged_file_is_seen():
    data = bytearray(write_png(np.zeros((4, 4, 3), np.uint8)))
    data[-20] ^= 1
    with pytest.raises(ValueError, match="readable png"):
        decode_image("png", 4, 4, base64.b64encode(bytes(data)).decode())
