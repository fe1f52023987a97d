"""The files that a profile points to, looked at from outside: what kind of base a folder is, whether a file is there.

Reads names and small JSON files only, never a tensor, and never raises on a path that cannot exist.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).parent.parent
EMBEDDED = "embedded"
EMBEDDED_BASE = PACKAGE / "model" / "tiny" / "base"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+@[\w.-]+")


@dataclass(frozen=True, slots=True)
class Base:
    """What `rl.init_from` names. `reason` says, for `unreadable`, what is wrong with it."""

    kind: Literal["unset", "diffusers", "dcp", "hub", "unreadable"]
    folder: Path
    reason: str = ""

    def has(self, *parts: str) -> bool:
        """Whether the folder holds one of these subfolders."""
        return any(is_folder(self.folder / part) for part in parts)

    def transformer_class(self) -> str:
        """The class that transformer/config.json declares, or an empty string."""
        return str(_read_object(self.folder / "transformer" / "config.json").get("_class_name") or "")


def inspect_base(value: str) -> Base:
    """Tell a diffusers folder from a distributed checkpoint, a hub id and nothing at all."""
    folder = EMBEDDED_BASE if value == EMBEDDED else local(value)
    if not value:
        return Base("unset", folder)
    if not exists(folder):
        hub = value != EMBEDDED and _HUB_ID.fullmatch(value)
        return Base("hub", folder) if hub else Base("unreadable", folder, f"{folder} is not there")
    if not is_folder(folder):
        return Base("unreadable", folder, f"{folder} is not a folder")
    if is_file(folder / "transformer" / "config.json") and is_file(folder / "model_index.json"):
        return Base("diffusers", folder)
    if is_file(folder / ".metadata") or _has_shards(folder):
        return Base("dcp", folder)
    lacking = [n for n in ("model_index.json", "transformer/config.json") if not is_file(folder / n)]
    return Base("unreadable", folder, f"{folder} has no {' and no '.join(lacking)}")


def is_vae(folder: Path) -> bool:
    """Whether a folder looks like a diffusers autoencoder."""
    return is_file(folder / "config.json")


def scorer_names() -> list[str]:
    """The packaged scorers: one module each."""
    return sorted(p.stem for p in (PACKAGE / "reward" / "scorers").glob("*.py") if p.stem != "__init__")


def local(value: str) -> Path:
    """A path as a person writes it, `~` included."""
    return Path(os.path.expanduser(value))  # noqa: PTH111 - unlike Path.expanduser, leaves an unknown ~user alone


def exists(path: Path) -> bool:
    """Whether anything is there; a path that the system cannot even look up is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether a readable name of a file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether a readable name of a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _has_shards(folder: Path) -> bool:
    try:
        return any(child.suffix in (".distcp", ".safetensors") for child in folder.iterdir())
    except OSError:
        return False


def _read_object(file: Path) -> dict[str, object]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
