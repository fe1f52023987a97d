"""PNG files of 8-bit RGB images, written for speed: one filter for all rows, and run lengths instead of a search.

Owns the encoding alone (ISO/IEC 15948); any PNG reader opens the result. Against a general writer at its fastest level
it takes about a quarter of the time on the sending side and half on the reading side, and makes no larger files of
pictures: choosing a filter per row and searching for repeats cost more than they save on pixels.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB, EIGHT_BITS = 2, 8
AVERAGE = 3
"""The filter: what is left of a pixel after the mean of its left and upper neighbours is taken away."""


def write_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The file of one uint8 [H, W, 3] image."""
    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, EIGHT_BITS, RGB, 0, 0, 0)
    # Level and memory matter little here; the strategy does: Huffman codes and runs, no other repeats.
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    data = packer.compress(_filtered(pixels.reshape(height, width * 3)).data) + packer.flush()
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _filtered(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[H, 1 + 3 W]: the filter's number, then the row minus floor((left + above) / 2), modulo 256."""
    left, above = np.zeros_like(rows), np.zeros_like(rows)
    left[:, 3:], above[1:] = rows[:, :-3], rows[:-1]
    # Half of the sum without the ninth bit: what both have, and half of what one has.
    mean = (left & above) + ((left ^ above) >> 1)
    out = np.empty((rows.shape[0], rows.shape[1] + 1), np.uint8)
    out[:, 0] = AVERAGE
    np.subtract(rows, mean, out=out[:, 1:])
    return out


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
