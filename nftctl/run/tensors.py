"""Compares the tensors that a set of safetensors files holds with the tensors that were announced.

Reads headers only, but for the hash of a whole group of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nftctl.errors import CheckpointUnusable
from nftctl.run.canonical import digest
from nftctl.run.hashing import hash_range
from nftctl.tensorblocks import Block, cover_problems, read_blocks


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
