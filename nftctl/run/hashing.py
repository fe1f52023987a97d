"""Content hashes of files, tensors and weight folders.

Hashes never depend on where a folder lies or how its tensors are split into files, and of a base they cover what a run
reads of it, so that a README, a preview, a second precision or a pickle beside the weights makes no other base of it.
Refuses what cannot be read whole. Nothing is remembered between two calls: a file that was changed within the clock's
resolution, or given its old time back, would pass for the one that was hashed before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nftctl.errors import CheckpointUnusable
from nftctl.run.canonical import digest
from nftctl.run.stored import StoredTensors, form_bytes, read_range
from nftctl.tensorblocks import shard_config, shard_files
from nftctl.tensorfile import STEM, TRANSFORMERS_STEM, TensorInfo, weight_files

FINGERPRINT_VERSION = 2
"""Version of the rule that turns a folder into a fingerprint, and part of every one. Raise it when the rule changes."""

TEXT_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})
"""Files beside the tensors that decide what a model computes: configurations, vocabularies, chat templates."""

READ_PARTS = (
    "transformer", "vae", "tokenizer", "text_tokenizer", "text_encoder", "text_encoder_2", "text_encoder_3",
    "tokenizer_2", "tokenizer_3",
)  # fmt: skip
"""Parts of a base that a run may read even where model_index.json does not name them."""

INDEX = "model_index.json"
LARGE = 2_000_000_000
"""Bytes of weights from which on it is said that they are being hashed."""
MOST_THREADS = 8

Note = Callable[[str], None]
"""Where to say what takes long."""


def silent(text: str) -> None:
    """Says nothing."""


def hash_file(path: Path) -> str:
    """sha256 of a file's content, 64 hex digits. Raises CheckpointUnusable when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Part:
    """What counts of one folder: texts and tensors, under the name that the folder has in the base."""

    name: str
    folder: Path
    texts: Sequence[Path]
    tensors: StoredTensors

    @property
    def size(self) -> int:
        return sum(map(form_bytes, self.tensors.forms.values()))


def fingerprint_base(folder: Path, note: Note = silent) -> str:
    """Hash of a base: tensors (part, name, dtype, shape, content), configurations and tokenizers.

    Of a pipeline folder model_index.json and the parts that it names count, of a distributed checkpoint its tensors and
    the transformer's config.json. Raises CheckpointUnusable when the folder is missing or lacks weights.
    """
    if not folder.is_dir():
        raise CheckpointUnusable(f"{folder} is not a folder", hint="set rl.init_from to a folder of base weights")
    if not (folder / INDEX).is_file():
        return fingerprint_denoiser(folder, note)
    index = _read_index(folder / INDEX)
    named = {key for key, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[0]}
    inside = {name for name in named if "/" not in name and not name.startswith(".")}
    parts = [_part(name, folder / name) for name in sorted(inside | set(READ_PARTS)) if (folder / name).is_dir()]
    if not any(part.name == "transformer" and part.tensors.forms for part in parts):
        weight_files(folder / "transformer")  # names what is missing
    return _fingerprint([("index", digest(index))], parts, note)


def fingerprint_denoiser(folder: Path, note: Note = silent) -> str:
    """The same of a base's denoiser alone: equal for a pipeline folder and a distributed checkpoint of its transformer.

    The second has nothing else, so this is all of its fingerprint. Of a pipeline it is less than that, as it leaves out
    VAE, text encoders and tokenizer.
    """
    if (folder / INDEX).is_file():
        files, place = weight_files(folder / "transformer"), folder / "transformer"
    else:
        files, place = shard_files(folder), shard_config(folder) or folder
    config = [place / "config.json"] if (place / "config.json").is_file() else []
    return _fingerprint([], [_Part("transformer", place, config, StoredTensors(files))], note)


def fingerprint_folder(folder: Path, note: Note = silent) -> str:
    """The same for a part that lies alone and may hold no tensors, such as a VAE or a tokenizer."""
    if not folder.is_dir():
        raise CheckpointUnusable(f"{folder} is not a folder")
    return _fingerprint([], [_part(".", folder)], note)


def _read_index(path: Path) -> dict[str, object]:
    try:
        index = json.loads(path.read_bytes())
        digest(index)
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointUnusable(f"{path} is not JSON: {error}") from error
    if not isinstance(index, dict):
        raise CheckpointUnusable(f"{path} is not a JSON object")
    return index


def _part(name: str, folder: Path) -> _Part:
    return _Part(name, folder, list(_texts(folder)), StoredTensors(_read_weights(folder)))


def _texts(folder: Path) -> Iterator[Path]:
    """Configurations, vocabularies and templates; not what is hidden, and no index of how tensors were split."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        index = path.suffix == ".json" and ".index." in path.name
        if path.suffix in TEXT_SUFFIXES and not hidden and not index and path.is_file():
            yield path


def _read_weights(folder: Path) -> set[Path]:
    """The weights that a part is loaded from: its index's files or the single one. Where no file has such a name, all.

    Where there are both, diffusers goes by the index, and transformers takes the single file.
    """
    found: set[Path] = set()
    for stem in (STEM, TRANSFORMERS_STEM):
        single, index = folder / stem, folder / f"{stem}.index.json"
        if single.is_file() and (stem == TRANSFORMERS_STEM or not index.is_file()):
            found.add(single)
        elif index.is_file():
            found |= set(weight_files(folder, stem))
    return found or {path for path in folder.glob("*.safetensors") if path.is_file()}


def _fingerprint(head: Sequence[tuple[str, str]], parts: Sequence[_Part], note: Note) -> str:
    size = sum(part.size for part in parts)
    if size > LARGE:
        note(f"hashing {size / 1e9:.1f} GB of base weights")
    total = hashlib.sha256()
    total.update(_line("fingerprint", FINGERPRINT_VERSION))
    for line in head:
        total.update(_line(*line))
    # Hashing releases the interpreter's lock, so threads hash as fast as the disk reads.
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for part in parts:
            for path, content in zip(part.texts, pool.map(hash_file, part.texts), strict=True):
                total.update(_line("file", part.name, path.relative_to(part.folder).as_posix(), content))
        tensors = [(part, name) for part in parts for name in sorted(part.tensors.forms)]
        for (part, name), content in zip(tensors, pool.map(lambda pair: _content(*pair), tensors), strict=True):
            dtype, shape = part.tensors.forms[name]
            total.update(_line("tensor", part.name, name, dtype, list(shape), content))
    return total.hexdigest()


def _content(part: _Part, name: str) -> str:
    content = hashlib.sha256()
    for piece in part.tensors.chunks(name):
        content.update(piece)
    return content.hexdigest()


def _line(*parts: object) -> bytes:
    return json.dumps(parts, ensure_ascii=True).encode() + b"\n"


def hash_range(path: Path, info: TensorInfo) -> str:
    """sha256 of one tensor's bytes."""
    content = hashlib.sha256()
    for piece in read_range(path, info.begin, info.end):
        content.update(piece)
    return content.hexdigest()
