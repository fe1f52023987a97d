"""Safetensors from outside: headers parsed by hand, and which files make up a component of a model folder.

The parser trusts nothing: sizes, types, offsets and names are checked against the file before a byte of data is used,
and any doubt is CheckpointUnusable. Reads headers only, never a tensor.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nftctl.errors import CheckpointUnusable

MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors format allows."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of each safetensors dtype."""

DTYPE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""torch's name of a dtype, without `torch.`, to safetensors' name."""

STEM = "diffusion_pytorch_model.safetensors"
"""Name of a diffusers component's single weight file; an index beside it adds `.index.json`."""

TRANSFORMERS_STEM = "model.safetensors"
"""The same of a component of transformers, such as a text encoder."""

_MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file. `begin` and `end` are byte offsets from the start of the file.

    Example: `TensorInfo("F32", (4, 3), 280, 328)`.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file by name. Raises CheckpointUnusable on anything malformed, naming the file."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and the free-form `__metadata__` of a safetensors file; refuses like `safetensors_header`."""
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            start, document = _header_document(stream, size)
        metadata = document.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ is not a map of texts")
        tensors = {name: _tensor_info(name, entry, start) for name, entry in document.items()}
        _check_layout(tensors, start, size)
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "its header is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointUnusable(f"{path} is not a sound safetensors file: {reason}") from error
    return tensors, metadata


def _header_document(stream: BinaryIO, size: int) -> tuple[int, dict[str, object]]:
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise ValueError("it ends inside the header length")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise ValueError(f"its header claims {length} bytes, the file has {size}")
    text = stream.read(length)
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    return 8 + length, json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"its header holds {text}")


def _tensor_info(name: str, entry: object, start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"shape or offsets of {name!r} are not counts")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} has {end - begin} bytes, its shape needs {math.prod(shape) * ITEM_BYTES[dtype]}")
    return TensorInfo(dtype, tuple(shape), start + begin, start + end)


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_layout(tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """The data part must be the tensors back to back: no hole, no overlap, nothing before or behind."""
    at = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != at:
            raise ValueError(f"{name!r} begins at byte {info.begin}, expected {at}")
        at = info.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at}, the file at {size}")


def weight_files(folder: Path, stem: str = STEM) -> list[Path]:
    """The safetensors files of a component: those of its index, or the single one. CheckpointUnusable if incomplete."""
    index = folder / f"{stem}.index.json"
    if not index.exists():
        files = [folder / stem]
    else:
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointUnusable(f"{index} is not a safetensors index") from error
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointUnusable(f"{folder} has not {', '.join(absent)}")
    return files
