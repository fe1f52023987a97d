"""Content hashes of files, tensors and weight folders.

Hashes never depend on where a folder lies or how its tensors are split into files. Refuses what cannot be read whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from nftctl.errors import CheckpointUnusable
from nftctl.tensorfile import TensorInfo, safetensors_header

TEXT_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})
"""Files beside the tensors that decide what a model computes: configurations, vocabularies, chat templates."""

_CHUNK = 1 << 20


def hash_file(path: Path) -> str:
    """sha256 of a file's content, 64 hex digits. Raises CheckpointUnusable when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error


def fingerprint_base(folder: Path) -> str:
    """Hash of a base model's folder: tensors (component, name, dtype, shape, content) and configuration files.

    Raises CheckpointUnusable when the folder is missing or holds no safetensors file.
    """
    if not folder.is_dir():
        raise CheckpointUnusable(f"{folder} is not a folder", hint="set rl.init_from to a folder of base weights")
    if not any(path.suffix == ".safetensors" for path in _visible_files(folder)):
        raise CheckpointUnusable(f"{folder} holds no .safetensors file", hint="only safetensors weights are read")
    return fingerprint_folder(folder)


def fingerprint_folder(folder: Path) -> str:
    """The same hash for a folder that may hold no tensors, such as a tokenizer's."""
    if not folder.is_dir():
        raise CheckpointUnusable(f"{folder} is not a folder")
    total = hashlib.sha256()
    for path in _visible_files(folder):
        # The shard index only says how tensors were split into files.
        if path.suffix in TEXT_SUFFIXES and not path.name.endswith(".safetensors.index.json"):
            total.update(_line("file", path.relative_to(folder).as_posix(), hash_file(path)))
    for component, name, info, path in _sorted_tensors(folder):
        total.update(_line("tensor", component, name, info.dtype, list(info.shape), hash_range(path, info)))
    return total.hexdigest()


def _line(*parts: object) -> bytes:
    return json.dumps(parts, ensure_ascii=True).encode() + b"\n"


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files below `folder` in a fixed order, leaving out hidden ones such as a download cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _sorted_tensors(folder: Path) -> list[tuple[str, str, TensorInfo, Path]]:
    found = [
        (path.parent.relative_to(folder).as_posix(), name, info, path)
        for path in _visible_files(folder)
        if path.suffix == ".safetensors"
        for name, info in safetensors_header(path).items()
    ]
    return sorted(found, key=lambda item: (item[0], item[1], item[3].name))


def hash_range(path: Path, info: TensorInfo) -> str:
    """sha256 of one tensor's bytes."""
    content = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(info.begin)
        left = info.end - info.begin
        while left:
            chunk = stream.read(min(_CHUNK, left))
            if not chunk:
                raise CheckpointUnusable(f"{path} became shorter while it was read")
            content.update(chunk)
            left -= len(chunk)
    return content.hexdigest()
