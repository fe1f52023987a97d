"""Tensors in safetensors files, read whole and one at a time, whatever blocks and files they are spread over.

Reads bytes, not numbers, so that any dtype comes through as it is. Refuses a tensor whose blocks do not cover it once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nftctl.errors import CheckpointUnusable
from nftctl.tensorblocks import Form, read_wholes
from nftctl.tensorfile import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CHUNK = 1 << 24
"""Bytes that are read at once where a tensor need not be whole in memory."""


class TensorSource(Protocol):
    """Named tensors that can be read one after the other."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """Dtype and shape of each, by name."""
        ...

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor in row-major order, little-endian, in pieces."""
        ...


class StoredTensors:
    """The tensors of these files by name."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.wholes = read_wholes(paths)
        self.forms: dict[str, Form] = {name: whole.form for name, whole in self.wholes.items()}

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, in pieces of a bounded size where its blocks are whole rows."""
        whole = self.wholes[name]
        if whole.is_cut_by_rows:
            for block in whole.blocks:
                yield from read_range(block.path, block.info.begin, block.info.end)
        else:
            yield self.read(name).tobytes()

    def read(self, name: str) -> npt.NDArray[np.void]:
        """The whole tensor as an array of its shape whose items are raw bytes."""
        import numpy as np

        dtype, shape = self.forms[name]
        whole = np.empty(shape, dtype=f"V{ITEM_BYTES[dtype]}")
        for block in self.wholes[name].blocks:
            data = b"".join(read_range(block.path, block.info.begin, block.info.end))
            part = np.frombuffer(data, whole.dtype).reshape(block.shape)
            whole[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.shape, strict=True))] = part
        return whole


def read_range(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """A stretch of a file in pieces. Raises CheckpointUnusable when the file ends before."""
    try:
        with path.open("rb") as stream:
            stream.seek(begin)
            while begin < end:
                piece = stream.read(min(CHUNK, end - begin))
                if not piece:
                    raise CheckpointUnusable(f"{path} became shorter while it was read")
                begin += len(piece)
                yield piece
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error


def form_bytes(form: Form) -> int:
    """Bytes of a tensor of this form."""
    return math.prod(form[1]) * ITEM_BYTES[form[0]]
