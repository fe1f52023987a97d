"""Pixels survive the wire unchanged, and nothing unpacks to more than was declared."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image as Pillow

from nftctl.reward.images import MAX_PIXELS, BadImage, decode_image, encode_image

shapes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))


def _file(picture, kind="PNG"):
    out = io.BytesIO()
    picture.save(out, format=kind)
    return base64.b64encode(out.getvalue()).decode()


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.uint8, shapes), st.sampled_from(["png", "raw"]))
def test_every_image_survives(image, encoding):
    height, width, _ = image.shape
    np.testing.assert_array_equal(decode_image(encoding, width, height, encode_image(image, encoding)), image)


@pytest.mark.parametrize("encoding", ["png", "raw"])
def test_views_survive_and_decoded_pixels_are_writable(encoding):
    image = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)[::-2, ::-1]
    back = decode_image(encoding, 4, 3, encode_image(image, encoding))
    np.testing.assert_array_equal(back, image)
    back[0, 0, 0] = 1


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_other_shapes_and_types_are_refused(image):
    with pytest.raises(BadImage, match=r"must be uint8 \[H, W, 3\]"):
        encode_image(image, "png")


def test_jpeg_is_close_smaller_and_keeps_colour_edges():
    rows = np.linspace(0, 255, 64).astype(np.uint8)
    smooth = np.stack([np.tile(rows, (64, 1)), np.tile(rows[:, None], (1, 64)), np.full((64, 64), 128, np.uint8)], 2)
    high, low = (encode_image(smooth, "jpeg", quality) for quality in (95, 60))
    assert len(low) < len(high) < len(encode_image(smooth, "raw")) / 4
    assert np.abs(decode_image("jpeg", 64, 64, high).astype(int) - smooth).mean() < 2
    # Red and blue columns one pixel wide: at half colour resolution they would become one purple.
    stripes = np.zeros((16, 16, 3), np.uint8)
    stripes[:, ::2, 0] = stripes[:, 1::2, 2] = 255
    back = decode_image("jpeg", 16, 16, encode_image(stripes, "jpeg")).astype(int)
    assert np.abs(back - stripes).mean() < 6


def test_jpeg_is_read():
    image = decode_image("jpeg", 8, 8, _file(Pillow.new("RGB", (8, 8), (255, 255, 255)), "JPEG"))
    np.testing.assert_array_equal(image, np.full((8, 8, 3), 255))


@pytest.mark.parametrize(
    ("encoding", "width", "height", "data", "says"),
    [
        ("gif", 2, 2, "", "'gif' is not one of"),
        ("raw", 2, 2, base64.b64encode(bytes(11)).decode(), "11 raw bytes where 2 x 2 x 3 = 12"),
        ("raw", 2, 2, "not base64!", "not base64"),
        ("raw", 2, 2, "ä", "not base64"),
        ("raw", 0, 2, "", "outside 1 to"),
        ("raw", 2, MAX_PIXELS, "", "outside 1 to"),
        ("png", 2, 2, _file(Pillow.new("RGB", (3, 2))), "the file is 3x2, declared 2x2"),
        ("png", 2, 2, _file(Pillow.new("L", (2, 2))), "the file is L"),
        ("png", 2, 2, _file(Pillow.new("RGBA", (2, 2))), "the file is RGBA"),
        ("png", 2, 2, _file(Pillow.new("RGB", (2, 2)), "JPEG"), "not a readable png"),
        ("png", 2, 2, base64.b64encode(b"\x89PNG\r\n\x1a\n").decode(), "not a readable png"),
        ("png", 9, 9, _file(Pillow.effect_noise((9, 9), 90).convert("RGB"))[:160], "not a readable png"),
    ],
)
def test_damaged_or_contradicting_images_are_refused(encoding, width, height, data, says):
    with pytest.raises(BadImage, match=says):
        decode_image(encoding, width, height, data)


def _bomb(width, height):
    """A valid header of that size, then far too few pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    blob = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return base64.b64encode(blob).decode()


def test_a_bomb_is_refused_by_its_header(monkeypatch):
    monkeypatch.setattr(Pillow.Image, "load", lambda self: pytest.fail("pixels were unpacked"))
    with pytest.raises(BadImage, match=r"the file is 9000x9000, declared 8x8"):
        decode_image("png", 8, 8, _bomb(9000, 9000))
    with pytest.raises(BadImage, match="outside 1 to"):
        decode_image("png", 60000, 60000, _bomb(60000, 60000))
