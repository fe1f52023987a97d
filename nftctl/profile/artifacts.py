"""The files that a profile points to, looked at from outside: what kind of base a folder is, whether a file is there.

Reads names, small JSON files and safetensors headers, never a tensor; never raises on a path that cannot exist.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nftctl.errors import CheckpointUnusable
from nftctl.tensorfile import safetensors_header, weight_files

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
        return str(self.transformer_config().get("_class_name") or "")

    def transformer_config(self) -> Mapping[str, Any]:
        """transformer/config.json, empty where it is no JSON object."""
        return read_object(self.folder / "transformer" / "config.json")

    def latents_are_pixels(self) -> bool:
        """Whether model_index.json lists the VAE as absent."""
        return read_object(self.folder / "model_index.json").get("vae") == [None, None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A component's tensors by name, from its headers. `reason` says why they cannot be read."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""


def read_weights(component: Path) -> Weights:
    """The headers of a component in diffusers layout, in one file or split behind an index."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in weight_files(component):
            shapes |= {name: info.shape for name, info in safetensors_header(file).items()}
    except CheckpointUnusable as error:
        return Weights(reason=error.message)
    except (OSError, ValueError) as error:
        return Weights(reason=f"{component} cannot be read: {getattr(error, 'strerror', None) or error}")
    return Weights(shapes)


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


def bundled_profiles() -> dict[str, Path]:
    """Name -> file of every profile in the package."""
    return {path.stem: path for path in sorted((PACKAGE / "_profiles").glob("*.toml"))}


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


def read_object(file: Path) -> dict[str, Any]:
    """A small JSON file; empty where it is missing or no JSON object."""
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
