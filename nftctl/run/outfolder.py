"""New folders and files of a person's own: whole under their name or not there at all, and never over something else.

Owns the temporary folder beside the target and the words when a disk refuses. Refuses a target that is in use.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.run.disk import cure, sync_tree
from nftctl.run.stored import form_bytes
from nftctl.tensorblocks import Form


def refuse_taken(target: Path) -> None:
    """Raise UsageRefused unless `target` is absent or an empty folder, and can be made."""
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageRefused(f"{target} is there already and is not empty", hint="name a new folder, or remove that one")
    nearest = next(parent for parent in target.absolute().parents if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageRefused(f"no folder can be made at {target}: {nearest} cannot be written to")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into. It becomes `target` when the block ends well, and is removed when it does not.

    Raises UsageRefused for a target in use, CheckpointUnusable when the disk refuses.
    """
    refuse_taken(target)
    absolute = target.absolute()
    draft = absolute.with_name(f".{absolute.name}.{os.urandom(4).hex()}.partial")
    try:
        draft.mkdir(parents=True)
        yield draft
        sync_tree(draft)
        if absolute.is_dir():
            absolute.rmdir()
        draft.rename(absolute)
    except OSError as error:
        raise CheckpointUnusable(f"cannot write {target}: {error.strerror or error}", hint=cure(error)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written: its name and form, and where its bytes come from when it is its turn."""

    name: str
    form: Form
    chunks: Callable[[], Iterable[bytes]]


def write_safetensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file tensor by tensor, in the order given: no more than one piece is in memory at a time."""
    entries = list(entries)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        size = form_bytes(entry.form)
        header[entry.name] = {"dtype": entry.form[0], "shape": entry.form[1], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the data part, which wants to begin at a multiple of eight
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            written = sum(stream.write(piece) for piece in entry.chunks())
            if written != form_bytes(entry.form):
                raise CheckpointUnusable(f"{entry.name} has {written} bytes, its form needs {form_bytes(entry.form)}")


def copy_file(source: Path, target: Path) -> None:
    """Copy contents, making the folder where there is none. What a link leads to is copied, not the link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
