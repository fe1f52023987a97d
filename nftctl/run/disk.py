"""Durable file operations: a file, a folder or a link is either the old one or the new one, also after a power cut.

Owns fsync and rename, and what can be done about a write that the system refused. Knows nothing about runs or
checkpoints.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_CURES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room within the quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EACCES: "get the right to write there",
    errno.EPERM: "get the right to write there",
    errno.EROFS: "mount it for writing",
    errno.ENOTDIR: "a file stands where a folder belongs: name another place",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def cure(error: OSError) -> str:
    """What to do about a write that failed, in the imperative, by what the system said."""
    return _CURES.get(error.errno or 0, "mend the disk or the folder")


def atomic_write(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary file in the same folder, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Force the content of `path` to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Force the entries of `folder` (names, not contents) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force every file and folder below `folder`, and `folder` itself, to the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


def point_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` (relative to its folder), replacing a former link in one step."""
    temporary = link.with_name(f".{link.name}.{os.urandom(4).hex()}.tmp")
    temporary.symlink_to(target)
    try:
        temporary.replace(link)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(link.parent)
