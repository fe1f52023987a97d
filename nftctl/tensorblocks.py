"""Tensors that lie in safetensors files whole or as blocks, and the folders of a distributed checkpoint made of such.

A tensor may be spread over files; the distributed writer notes the offsets of each block in the file's metadata. Reads
headers only; refuses blocks that leave a hole, overlap or reach over the edge, and files that an index does not list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from nftctl.errors import CheckpointUnusable
from nftctl.tensorfile import TensorInfo, read_header

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Where torch's distributed writer notes the offsets of each block, as JSON text."""
SHARD_INDEX = "model.safetensors.index.json"
"""What torch's writer says of its files where each tensor lies in one: tensor -> file."""
SHOWN = 12
"""Faults that one message names."""

Form = tuple[str, tuple[int, ...]]
"""Dtype in safetensors' spelling, and shape."""


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


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor and the blocks that cover it once, in the order of their offsets."""

    form: Form
    blocks: tuple[Block, ...]

    @property
    def is_cut_by_rows(self) -> bool:
        """Whether its blocks, one after the other, are its bytes in row-major order."""
        return all(block.shape[1:] == self.form[1][1:] for block in self.blocks)


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


def read_wholes(paths: Iterable[Path]) -> dict[str, Whole]:
    """Every tensor of these files. Raises CheckpointUnusable with the names of those that are not there once."""
    blocks: dict[str, list[Block]] = {}
    for path in sorted(paths):
        for name, block in read_blocks(path):
            blocks.setdefault(name, []).append(block)
    wholes, problems = {}, []
    for name, parts in blocks.items():
        dtype, shape = _reach(parts)
        faults = cover_problems(parts, {"dtype": dtype, "shape": shape})
        problems += [f"tensor {name}: {text}".replace(", the manifest says", " and") for text in faults]
        if not faults:
            wholes[name] = Whole((dtype, shape), tuple(sorted(parts, key=lambda block: block.offsets)))
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointUnusable(f"{next(iter(blocks.values()))[0].path.parent}: {'; '.join(problems[:SHOWN])}{more}")
    return wholes


def _reach(blocks: Sequence[Block]) -> Form:
    """The form of the tensor that the blocks are parts of, as far as they reach."""
    dims = max(len(block.shape) for block in blocks)
    ends = [tuple(o + n for o, n in zip(b.offsets, b.shape, strict=True)) for b in blocks if len(b.shape) == dims]
    return blocks[0].dtype, tuple(max(column) for column in zip(*ends, strict=True))


def cover_problems(blocks: Sequence[Block], announced: Mapping[str, Any]) -> list[str]:
    """What keeps blocks from being the announced tensor, each of its numbers once."""
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


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a distributed checkpoint; where it has an index, exactly those that it lists."""
    found = {path.name: path for path in sorted(folder.glob("*.safetensors")) if path.is_file()}
    if not found:
        raise CheckpointUnusable(f"{folder} holds no .safetensors file", hint="only safetensors weights are read")
    index = folder / SHARD_INDEX
    if index.is_file():
        try:
            listed = set(json.loads(index.read_bytes())["weight_map"].values())
            wrong = [f"{name} is missing" for name in sorted(listed - set(found))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointUnusable(f"{index} is not a safetensors index") from error
        wrong += [f"{name} was added" for name in sorted(set(found) - listed)]
        if wrong:
            raise CheckpointUnusable(f"{folder} does not hold what its {SHARD_INDEX} lists: {', '.join(wrong)}")
    return list(found.values())


def shard_config(folder: Path) -> Path | None:
    """The folder with the config.json of what a distributed checkpoint holds: transformer/ in it, or it itself."""
    return next((place for place in (folder / "transformer", folder) if (place / "config.json").is_file()), None)
