"""Pixels on the wire: uint8 RGB arrays [H, W, 3] to and from base64 PNG, JPEG or raw bytes.

Owns value range, layout and size limits, so that a scorer always sees rows x columns x (red, green, blue) in 0..255.
Refuses any other shape or type, sizes that do not match what was declared, and anything that would unpack to more
than `MAX_PIXELS`, before a single pixel is decompressed.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from nftctl.reward.png import write_png

Image = npt.NDArray[np.uint8]
Encoding = Literal["png", "jpeg", "raw"]
T = TypeVar("T")
V = TypeVar("V")

ENCODINGS = ("png", "jpeg", "raw")
MAX_PIXELS = 4096 * 4096
JPEG_QUALITY = 95
MANY_PIXELS = 1 << 18
"""From here on images are packed and unpacked on several threads."""
MOST_THREADS = 8


class BadImage(ValueError):
    """An image that cannot be sent or taken; the text says why and holds no pixel data."""


def encode_image(image: Image, encoding: Encoding, quality: int = JPEG_QUALITY) -> str:
    """Base64 text of one uint8 [H, W, 3] image. `png` and `raw` are lossless, `jpeg` has a quality. Raises BadImage."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise BadImage(f"an image must be uint8 [H, W, 3], got {image.dtype} {list(image.shape)}")
    pixels = np.ascontiguousarray(image)
    data = pixels.tobytes() if encoding == "raw" else _to_file(pixels, encoding, quality)
    return base64.b64encode(data).decode("ascii")


def decode_image(encoding: str, width: int, height: int, data: str) -> Image:
    """The uint8 [height, width, 3] image behind `data` (base64), writable. Raises BadImage."""
    if encoding not in ENCODINGS:
        raise BadImage(f"encoding {encoding!r} is not one of {', '.join(ENCODINGS)}")
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadImage(f"{width}x{height} is outside 1 to {MAX_PIXELS} pixels")
    try:
        # What `base64.b64decode` does too, which looks through all of it for strangers first.
        blob = binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"data is not base64: {error}") from None
    return _from_raw(blob, width, height) if encoding == "raw" else _from_file(blob, encoding, width, height)


def side_by_side(work: Callable[[T], V], parts: Sequence[T], pixels: int) -> list[V]:
    """`work` on each part, in order; on several threads where `pixels` in all are worth them.

    What compresses and unpacks lets go of the interpreter meanwhile. Of several errors the first in order is raised.
    """
    threads = min(len(parts), os.cpu_count() or 1, MOST_THREADS)
    if pixels < MANY_PIXELS or threads < 2:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))


def _to_file(pixels: Image, encoding: str, quality: int) -> bytes:
    if encoding == "png":
        return write_png(pixels)
    from PIL import Image as Pillow

    out = io.BytesIO()
    # Colour at full resolution: a scorer of small coloured things would else see half of them.
    Pillow.fromarray(pixels).save(out, format="JPEG", quality=quality, subsampling=0)
    return out.getvalue()


def _from_raw(blob: bytes, width: int, height: int) -> Image:
    expected = height * width * 3
    if len(blob) != expected:
        raise BadImage(f"{len(blob)} raw bytes where {height} x {width} x 3 = {expected} were declared")
    return np.frombuffer(blob, dtype=np.uint8).reshape(height, width, 3).copy()


def _from_file(blob: bytes, encoding: str, width: int, height: int) -> Image:
    from PIL import Image as Pillow

    try:
        # Opening reads the header only: a bomb is refused by its declared size before anything is unpacked.
        with Pillow.open(io.BytesIO(blob), formats=[encoding.upper()]) as picture:
            if picture.size != (width, height):
                raise BadImage(f"the file is {picture.size[0]}x{picture.size[1]}, declared {width}x{height}")
            if picture.mode != "RGB":
                raise BadImage(f"the file is {picture.mode}, not 8-bit RGB")
            return cast(Image, np.array(picture, dtype=np.uint8))
    except BadImage:
        raise
    except Exception as error:  # Pillow's plugins raise a dozen types on damaged files
        raise BadImage(f"data is not a readable {encoding} file: {error}") from None
