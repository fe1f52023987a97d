"""Compares the tensors that a set of safetensors files holds with the tensors that were announced.

A tensor may be spread over files as blocks, whose offsets the distributed writer notes in the file's metadata. Reads
headers only; refuses blocks that leave a hole, overlap or reach over the edge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from nftctl.errors import CheckpointUnusable
from nftctl.run.canonical import digest
from nftctl.run.hashing import hash_range
from nftctl.tensorfile import TensorInfo, read_header

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Where torch's distributed writer notes the offsets of each block, as JSON text."""


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor: where it begins and how long it is along each dimension, and where its bytes are."""

    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    info: TensorInfo

    def overlaps(self, other: Block) -> bool:
        """True when the two boxes share an element."""
        sides = zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        return all(a < b + other_size and b < a + size for a, size, b, other_size in sides)


def compare_tensors(paths: Iterable[Path], announced: Mapping[str, Mapping[str, Any]], *, root: Path) -> list[str]:
    """Every missing, extra or wrongly shaped tensor by name, and every file that cannot be read."""
    blocks: dict[str, list[Block]] = {}
    problems = []
    for path in paths:
        try:
            for name, block in read_blocks(path):
                blocks.setdefault(name, []).append(block)
        except CheckpointUnusable as error:
            problems.append(error.message.replace(f"{root}/", ""))
    problems += [f"tensor {name}: missing" for name in sorted(set(announced) - set(blocks))]
    problems += [f"tensor {name}: not in the manifest" for name in sorted(set(blocks) - set(announced))]
    for name in sorted(set(announced) & set(blocks)):
        problems += [f"tensor {name}: {text}" for text in cover_problems(blocks[name], announced[name])]
    return problems


def read_blocks(path: Path) -> list[tuple[str, Block]]:
    """Every block of a file, with its tensor's name. Raises CheckpointUnusable when header or offsets are malformed."""
    tensors, metadata = read_header(path)
    try:
        sharding = json.loads(metadata.get(SHARDING_KEY, "{}"))
        return [
            (name, Block(info.dtype, _offsets(sharding, name, info), info.shape, path, info))
            for name, info in tensors.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointUnusable(f"{path} has malformed block offsets") from error


def _offsets(sharding: Mapping[str, Any], name: str, info: TensorInfo) -> tuple[int, ...]:
    if name not in sharding:
        return (0,) * len(info.shape)
    offsets = tuple(sharding[name]["saved_offsets"])
    if len(offsets) != len(info.shape) or not all(type(o) is int and o >= 0 for o in offsets):
        raise ValueError(name)
    return offsets


def cover_problems(blocks: list[Block], announced: Mapping[str, Any]) -> list[str]:
    dtype, shape = announced["dtype"], tuple(announced["shape"])
    if any(block.dtype != dtype for block in blocks):
        return [f"dtype {', '.join(sorted({b.dtype for b in blocks}))}, the manifest says {dtype}"]
    if any(len(block.shape) != len(shape) for block in blocks):
        return [f"shape {list(blocks[0].shape)}, the manifest says {list(shape)}"]
    inside = all(o + s <= full for b in blocks for o, s, full in zip(b.offsets, b.shape, shape, strict=True))
    held = sum(math.prod(block.shape) for block in blocks)
    if len(blocks) == 1 and blocks[0].shape != shape:
        return [f"shape {list(blocks[0].shape)}, the manifest says {list(shape)}"]
    if not inside or held != math.prod(shape) or any(a.overlaps(b) for a, b in combinations(blocks, 2)):
        return [f"its {len(blocks)} blocks do not cover the shape {list(shape)} exactly once"]
    return []


def content_hash(folder: Path, files: Iterable[Mapping[str, Any]], prefix: str) -> str:
    """sha256 over name (without `prefix`), dtype, place and content of every tensor whose name starts with `prefix`.

    Two groups of tensors with equal weights under equal names have equal hashes. `files` is the manifest's list.
    """
    lines = []
    for entry in files:
        path = folder / entry["name"]
        if path.suffix != ".safetensors" or not path.is_file():
            continue
        for name, block in read_blocks(path):
            if name.startswith(prefix):
                place = [name.removeprefix(prefix), block.dtype, list(block.offsets), list(block.shape)]
                lines.append((place, hash_range(path, block.info)))
    return digest(sorted(lines))
