"""The files that a profile points to, looked at from outside: what kind of base a folder is, whether a file is there.

Reads names, small JSON files and safetensors headers, never a tensor; never raises on a path that cannot exist.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nftctl.errors import CheckpointUnusable
from nftctl.profile.hub import HubId
from nftctl.tensorblocks import read_wholes, shard_config, shard_files
from nftctl.tensorfile import STEM, weight_files

PACKAGE = Path(__file__).parent.parent
PROFILES = PACKAGE / "_profiles"
EMBEDDED = "embedded"
"""What a profile says to mean the packaged set of its own contract; resolving names it: `embedded:scenes`."""
EMBEDDED_SETS = {"digits": PACKAGE / "model" / "tiny", "scenes": PACKAGE / "model" / "scenes"}
"""Packaged sets of a base and its prompts, name -> folder."""
EMBEDDED_SET = "digits"
"""The set that a bare `embedded` means where no contract says otherwise."""
EMBEDDED_BASE = EMBEDDED_SETS[EMBEDDED_SET] / "base"


@dataclass(frozen=True, slots=True)
class Base:
    """What `rl.init_from` names. `reason` says, for `unreadable`, what is wrong with it."""

    kind: Literal["unset", "diffusers", "dcp", "hub", "unreadable"]
    folder: Path
    reason: str = ""

    @property
    def config_folder(self) -> Path:
        """Where the transformer's config.json is."""
        beside = shard_config(self.folder) if self.kind == "dcp" else None
        return beside or self.folder / "transformer"

    def weight_files(self) -> list[Path]:
        """The safetensors files that hold the transformer. Raises CheckpointUnusable when some are missing."""
        return shard_files(self.folder) if self.kind == "dcp" else weight_files(self.folder / "transformer")

    def weights(self) -> Weights:
        """The transformer by its headers."""
        return _read_headers(self.folder, self.weight_files)

    @property
    def is_pickled(self) -> bool:
        """Whether it is a distributed checkpoint whose metadata is a pickle."""
        return self.kind == "dcp" and is_file(self.folder / ".metadata")

    def has(self, *parts: str) -> bool:
        """Whether the folder holds one of these subfolders."""
        return any(is_folder(self.folder / part) for part in parts)

    def transformer_class(self) -> str:
        """The class that the transformer's config.json declares, or an empty string."""
        return str(self.transformer_config().get("_class_name") or "")

    def transformer_config(self) -> Mapping[str, Any]:
        """The transformer's config.json, empty where it is no JSON object."""
        return read_object(self.config_folder / "config.json")

    def latents_are_pixels(self, vae: str) -> bool:
        """Whether model_index.json lists the VAE as absent.

        A distributed checkpoint has no such list: there latents are pixels that have three channels and for which
        `model.vae` names nothing. Preflight lets that pass only under a contract whose latents are pixels.
        """
        if self.kind == "dcp":
            return not vae and self.transformer_config().get("latent_channel") == 3
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
    return _read_headers(component, lambda: weight_files(component, stem))


def _read_headers(folder: Path, files: Callable[[], list[Path]]) -> Weights:
    try:
        return Weights({name: whole.form[1] for name, whole in read_wholes(files()).items()})
    except CheckpointUnusable as error:
        return Weights(reason=error.message)
    except (OSError, ValueError) as error:
        return Weights(reason=f"{folder} cannot be read: {getattr(error, 'strerror', None) or error}")


def inspect_base(value: str) -> Base:
    """Tell a diffusers folder from a distributed checkpoint, a hub id and nothing at all."""
    folder = base_place(value)
    if not value:
        return Base("unset", folder)
    hub = hub_id(value)
    if not exists(folder):
        return Base("hub", folder) if hub else Base("unreadable", folder, f"{folder} is not there")
    base = inspect_folder(folder)
    # A snapshot that lacks its index may well have another program's weights beside the folders of its parts.
    return Base("hub", folder, base.reason or _lacks(folder)) if hub and base.kind != "diffusers" else base


def inspect_folder(folder: Path) -> Base:
    """What kind of base a folder is."""
    if not is_folder(folder):
        return Base("unreadable", folder, f"{folder} is not a folder")
    if is_file(folder / "transformer" / "config.json") and is_file(folder / "model_index.json"):
        return Base("diffusers", folder)
    if is_file(folder / STEM) or is_file(folder / f"{STEM}.index.json"):
        return Base("unreadable", folder, f"{folder} is one part of a base; name the folder that it lies in")
    if not is_file(folder / "model_index.json") and (is_file(folder / ".metadata") or _has_shards(folder)):
        return Base("dcp", folder)
    return Base("unreadable", folder, _lacks(folder))


def _lacks(folder: Path) -> str:
    lacking = [n for n in ("model_index.json", "transformer/config.json") if not is_file(folder / n)]
    return f"{folder} has no {' and no '.join(lacking)}"


def hub_id(value: str) -> HubId | None:
    """The hub id that `rl.init_from` is, unless there is a file or folder of that name."""
    return HubId.parse(value) if embedded_set(value) is None and not exists(local(value)) else None


def base_place(value: str) -> Path:
    """The folder that `rl.init_from` names: the packaged base, a local one, or a snapshot in the cache of downloads."""
    packaged = embedded_set(value)
    if packaged is not None:
        return packaged / "base"
    hub = hub_id(value)
    return (hub.cached() if hub else None) or local(value)


def embedded_set(value: str) -> Path | None:
    """The folder of the packaged set that a value names, `embedded` or `embedded:NAME`; None for anything else."""
    word, _, name = value.partition(":")
    return EMBEDDED_SETS.get(name if value != EMBEDDED else EMBEDDED_SET) if word == EMBEDDED else None


def unknown_set(value: str) -> tuple[str, str]:
    """What is wrong with an `embedded:NAME` that names no packaged set, and what to do; empty for anything else."""
    word, colon, name = value.partition(":")
    if word != EMBEDDED or not colon or embedded_set(value) is not None or exists(local(value)):
        return "", ""
    known = ", ".join(f"{EMBEDDED}:{known}" for known in EMBEDDED_SETS)
    close = difflib.get_close_matches(name, EMBEDDED_SETS, n=1)
    meant = f"did you mean {EMBEDDED}:{close[0]}? " if close else ""
    return f"{name or 'an empty name'} is no packaged set", f"{meant}packaged: {known}"


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
    return {path.stem: path for path in sorted(PROFILES.glob("*.toml"))}


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


def known_words(tokenizer: Path) -> tuple[str, ...]:
    """Every word of a tokenizer that has one token a word and none for a word it lacks; empty for any other kind."""
    document = read_object(tokenizer / "tokenizer.json")
    model, added = document.get("model"), document.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) and model.get("type") == "WordLevel" else None
    by_space = document.get("pre_tokenizer") == {"type": "WhitespaceSplit"}
    if not by_space or not isinstance(vocabulary, dict) or model is None or model.get("unk_token") in vocabulary:
        return ()
    special = {entry.get("content") for entry in added if isinstance(entry, dict)} if isinstance(added, list) else set()
    return tuple(word for word in vocabulary if word not in special)


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
