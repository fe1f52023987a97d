"""A distributed checkpoint as torch itself writes it: a pickled `.metadata` and `.distcp` files of pickled tensors.

The metadata is read by an unpickler that knows a dozen names and builds inert records for them, so that nothing in it
can run; tensors are read by torch's own loader in its weights-only mode. Refuses any other name, paths that lead out of
the folder, transformed streams, and tensors whose chunks do not cover them once. What is no tensor is left alone.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from nftctl.errors import CheckpointUnusable
from nftctl.tensorblocks import Block, Form, cover_problems
from nftctl.tensorfile import DTYPE_NAMES, TensorInfo

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30


class Record:
    """Stands for an object of the metadata: what it was made of, and nothing that it could do."""

    def __new__(cls, *arguments: Any) -> Record:
        record = super().__new__(cls)
        record.arguments = arguments
        record.state = {}
        return record

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def part(self, name: str) -> Any:
        """A field by name, None where it was left out."""
        return self.state.get(name)


def _size(values: Any = ()) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(v) is int and v >= 0 for v in values):
        raise pickle.UnpicklingError(f"{values!r} is no size")
    return tuple(values)


def _kind(name: str) -> Any:
    """A class of its own for each name, made anew for each file, so that no file can leave anything behind."""
    return type(name, (Record,), {})


_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "Path"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "Path"),
}  # fmt: skip
"""Module -> names that become records."""


class _Reader(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._kinds: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return self._kinds.setdefault((module, name), _kind(name))
        if module == "torch" and name in DTYPE_NAMES:
            return name
        if (module, name) == ("torch", "Size"):
            return lambda values=(): _size(values)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: str(layout)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")


def read_metadata(file: Path) -> Record:
    """The metadata of a checkpoint as records. Raises CheckpointUnusable on anything that is not just that."""
    try:
        if file.stat().st_size > MAX_METADATA_BYTES:
            raise ValueError(f"it is larger than {MAX_METADATA_BYTES} bytes")
        with file.open("rb") as stream:
            found = _Reader(stream).load()
        if not isinstance(found, Record) or type(found).__name__ != "Metadata":
            raise ValueError("it holds something else")
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {file}: {error.strerror}") from error
    # Whatever a damaged or hostile pickle can make the unpickler stumble over.
    except (
        pickle.UnpicklingError, ValueError, TypeError, AttributeError, KeyError, IndexError, EOFError, ImportError,
        RecursionError, OverflowError, MemoryError,
    ) as error:  # fmt: skip
        raise CheckpointUnusable(f"{file} is not the metadata of a distributed checkpoint: {error}") from error
    return found


class ForeignTensors:
    """The tensors of such a folder, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.forms: dict[str, Form] = {}
        self.not_tensors: list[str] = []
        """Entries that hold something else; they are never read."""
        self._pieces: dict[str, list[tuple[Block, int, int]]] = {}
        metadata = read_metadata(folder / METADATA)
        try:
            self._take(metadata)
        except (pickle.UnpicklingError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise CheckpointUnusable(f"{folder / METADATA} is malformed: {error}") from error

    def _take(self, metadata: Record) -> None:
        places: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for key, place in metadata.part("storage_data").items():
            places[key.part("fqn"), key.part("offset")] = place
        for name, entry in metadata.part("state_dict_metadata").items():
            if type(entry).__name__ != "TensorStorageMetadata":
                self.not_tensors.append(str(name))
                continue
            dtype, shape = DTYPE_NAMES[entry.part("properties").state[0]], _size(entry.part("size"))
            chunks = entry.part("chunks")
            pieces = []
            for chunk in chunks:
                offsets, sizes = _size(chunk.part("offsets")), _size(chunk.part("sizes"))
                place = places.get((name, offsets)) or places[name, None]
                pieces.append(self._piece(dtype, offsets, sizes, place))
            problems = cover_problems([piece[0] for piece in pieces], {"dtype": dtype, "shape": shape})
            if problems or not pieces:
                raise ValueError(f"{name}: {'; '.join(problems) or 'no chunk holds it'}")
            self.forms[str(name)] = (dtype, shape)
            self._pieces[str(name)] = pieces

    def _piece(
        self, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Record
    ) -> tuple[Block, int, int]:
        relative, begin, length = place.part("relative_path"), place.part("offset"), place.part("length")
        parts = str(relative).split("/")
        if not isinstance(relative, str) or any(part in {"", ".", ".."} for part in parts) or "\0" in relative:
            raise ValueError(f"{relative!r} leads out of the folder")
        if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
            raise ValueError(f"a place in {relative} is no stretch of a file")
        if place.part("transform_descriptors"):
            raise ValueError(f"{relative} was transformed by {place.part('transform_descriptors')}, which is not read")
        path = self._folder / relative
        if path.is_symlink() or not path.is_file() or path.stat().st_size < begin + length:
            raise ValueError(f"{relative} is missing or too short")
        return Block(dtype, offsets, sizes, path, TensorInfo(dtype, sizes, begin, begin + length)), begin, length

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a whole tensor."""
        yield self.read(name).reshape(-1).view(torch.uint8).numpy().tobytes()

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        dtype, shape = self.forms[name]
        torch_dtype = next(getattr(torch, ours) for ours, theirs in DTYPE_NAMES.items() if theirs == dtype)
        whole = torch.empty(shape, dtype=torch_dtype)
        for block, begin, length in self._pieces[name]:
            with block.path.open("rb") as stream:
                stream.seek(begin)
                data = stream.read(length)
            part = _load(data, f"{name} in {block.path}")
            if part.dtype != torch_dtype or tuple(part.shape) != block.shape:
                raise CheckpointUnusable(
                    f"{name} in {block.path} is {part.dtype} {list(part.shape)}, its metadata says {dtype} "
                    f"{list(block.shape)}"
                )
            whole[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.shape, strict=True))] = part
        return whole


def _load(data: bytes, what: str) -> Tensor:
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch gives whatever its readers stumble over, and all of it means the same
        raise CheckpointUnusable(f"{what} is not a plain tensor: {str(error).splitlines()[0]}") from error
    if not isinstance(found, Tensor):
        raise CheckpointUnusable(f"{what} is a {type(found).__name__}, not a tensor")
    return found.detach()
