"""The files that a profile points to, looked at from outside: what kind of base a folder is, whether a file is there.

Reads names, small JSON files and safetensors headers, never a tensor; never raises on a path that cannot exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nftctl.errors import CheckpointUnusable
from nftctl.profile.hub import HubId
from nftctl.tensorfile import STEM, safetensors_header, weight_files

PACKAGE = Path(__file__).parent.parent
EMBEDDED = "embedded"
EMBEDDED_BASE = PACKAGE / "model" / "tiny" / "base"


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
        return self.lists_as_absent("vae")

    def used_text_parts(self, parts: Sequence[tuple[str, str]], *, t5: bool) -> list[tuple[str, str]]:
        """Of (text encoder, tokenizer) folders those that a run uses: T5 may be absent, or switched off."""
        without = not t5 or self.lists_as_absent("text_encoder_3")
        return [pair for pair in parts if not (without and pair[0] == "text_encoder_3")]

    def lists_as_absent(self, part: str) -> bool:
        """Whether model_index.json says `[null, null]` of a part, which is diffusers' word for none."""
        return read_object(self.folder / "model_index.json").get(part) == [None, None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A component's tensors by name, from its headers. `reason` says why they cannot be read."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""


def read_weights(component: Path, stem: str = STEM) -> Weights:
    """The headers of a component in diffusers layout, in one file or split behind an index."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in weight_files(component, stem):
            shapes |= {name: info.shape for name, info in safetensors_header(file).items()}
    except CheckpointUnusable as error:
        return Weights(reason=error.message)
    except (OSError, ValueError) as error:
        return Weights(reason=f"{component} cannot be read: {getattr(error, 'strerror', None) or error}")
    return Weights(shapes)


def inspect_base(value: str) -> Base:
    """Tell a diffusers folder from a distributed checkpoint, a hub id and nothing at all."""
    folder = base_place(value)
    if not value:
        return Base("unset", folder)
    hub = hub_id(value)
    if not exists(folder):
        return Base("hub", folder) if hub else Base("unreadable", folder, f"{folder} is not there")
    if not is_folder(folder):
        return Base("unreadable", folder, f"{folder} is not a folder")
    if is_file(folder / "transformer" / "config.json") and is_file(folder / "model_index.json"):
        return Base("diffusers", folder)
    if is_file(folder / ".metadata") or _has_shards(folder):
        return Base("dcp", folder)
    lacking = [n for n in ("model_index.json", "transformer/config.json") if not is_file(folder / n)]
    return Base("hub" if hub else "unreadable", folder, f"{folder} has no {' and no '.join(lacking)}")


def hub_id(value: str) -> HubId | None:
    """The hub id that `rl.init_from` is, unless there is a file or folder of that name."""
    return HubId.parse(value) if value != EMBEDDED and not exists(local(value)) else None


def base_place(value: str) -> Path:
    """The folder that `rl.init_from` names: the packaged base, a local one, or a snapshot in the cache of downloads."""
    if value == EMBEDDED:
        return EMBEDDED_BASE
    hub = hub_id(value)
    return (hub.cached() if hub else None) or local(value)


def pinned(value: str) -> str:
    """`rl.init_from` with a hub id's branch or tag replaced by the commit that it stands for in the local cache."""
    hub = hub_id(value)
    return hub.pinned() if hub else value


def is_vae(folder: Path) -> bool:
    """Whether a folder looks like a diffusers autoencoder."""
    return is_file(folder / "config.json")


def pixels_per_latent(vae: Mapping[str, Any], family: str) -> int:
    """Along a side, from a VAE's config.json; keys that it leaves out have diffusers' defaults."""
    if family == "sd3":
        blocks = vae.get("block_out_channels")
        return 2 ** (len(blocks) - 1) if isinstance(blocks, list) and blocks else 1
    scale = vae.get("scale_factor_spatial")
    return scale if type(scale) is int and scale > 0 else 8


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
