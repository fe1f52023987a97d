"""A checkpoint as something to take away: proven whole, with the run it lies in and the base that it was trained on.

Torch-free. Owns the way from a checkpoint to its base, and the comparison of that base with the one of the training.
Refuses a checkpoint with any fault, and a base, VAE or tokenizer whose content is another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nftctl.errors import CheckpointUnusable
from nftctl.profile.artifacts import EMBEDDED_SETS, embedded_set, is_folder, local
from nftctl.profile.prompts import base_folder
from nftctl.profile.t2i import T2I_PROFILES, T2iProfile
from nftctl.run.directory import RunDirectory
from nftctl.run.hashing import Note, fingerprint_base, fingerprint_denoiser, fingerprint_folder, silent
from nftctl.run.manifest import Manifest, read_whole
from nftctl.run.stored import StoredTensors

COPIES = ("policy", "old", "ema")
"""Copies of the weights that a checkpoint may hold."""
SIDES = (".lora_A", ".lora_B")

_HUB_SNAPSHOT = re.compile(r"models--(?P<name>.+)/snapshots/(?P<commit>[0-9a-f]+)$")


@dataclass
class Trained:
    """A whole checkpoint. `run` is None for a step folder that lies in no run."""

    folder: Path
    manifest: Manifest
    run: RunDirectory | None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    """The run's profile with every default, empty without a run."""

    @cached_property
    def tensors(self) -> StoredTensors:
        """What it holds."""
        return StoredTensors(self.folder / f["name"] for f in self.manifest.files if f["name"].endswith(".safetensors"))

    def copy(self, weights: str) -> dict[str, str]:
        """Parameter name -> tensor name of one copy of the weights, `policy`, `old` or `ema`, that means something."""
        if not self.has(weights):
            held = ", ".join(name for name in COPIES if self.has(name))
            raise CheckpointUnusable(f"{self.folder} holds no {weights}", hint=f"it holds {held}")
        return self.stored(weights)

    def stored(self, weights: str) -> dict[str, str]:
        """The same of whatever was saved."""
        prefix = f"{weights}."
        return {name.removeprefix(prefix): name for name in sorted(self.tensors.forms) if name.startswith(prefix)}

    def has(self, weights: str) -> bool:
        """Whether a copy of the weights was saved and means something: without `rl.old.build_old`, old does not."""
        if weights == "old" and self.manifest.identity.get("rl.old.build_old") is False:
            return False
        return any(name.startswith(f"{weights}.") for name in self.manifest.tensors)

    def adapted(self, weights: str) -> list[str]:
        """The modules that an adapter goes into; empty where whole weights were trained."""
        return sorted({name.removesuffix(SIDES[0]) for name in self.copy(weights) if name.endswith(SIDES[0])})

    def value(self, key: str) -> Any:
        """A value of the run's identity, such as `model.lora.rank`."""
        if key not in self.manifest.identity:
            raise CheckpointUnusable(f"{self.folder}: its identity has no {key}")
        return self.manifest.identity[key]

    @property
    def contract(self) -> T2iProfile:
        """The named contract it was trained under."""
        name = str(self.value("rl.profile"))
        if name not in T2I_PROFILES:
            raise CheckpointUnusable(
                f"{self.folder} was trained under rl.profile = {name!r}, which this nftctl does not know",
                hint=f"it knows {', '.join(T2I_PROFILES)}",
            )
        return T2I_PROFILES[name]

    @property
    def fingerprint(self) -> str:
        """Content hash of the base."""
        return str(self.value("base.fingerprint"))

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the run's profile, empty without a run."""
        return self.resolved.get(name) or {}

    def init_from(self, given: str = "") -> str:
        """What names the base: `given`, else the run's own `rl.init_from`."""
        value = given or str(self.section("rl").get("init_from") or "")
        if not value:
            raise CheckpointUnusable(
                f"{self.folder} lies in no run, so nothing says where its base is", hint="name it: --base FOLDER"
            )
        return value

    def base_place(self, given: str = "") -> Path:
        """The folder that is named as the base; nothing in it is looked at."""
        folder = base_folder(self.init_from(given))
        if not is_folder(folder):
            raise CheckpointUnusable(f"the base {folder} is not there", hint="say where it is now: --base FOLDER")
        return folder

    def base(self, given: str = "", note: Note = silent) -> Path:
        """The folder of the base, proven to be the one of the training. Reads all of it.

        A run from a distributed checkpoint began from a denoiser alone, so any base with that denoiser is its base.
        """
        folder = self.base_place(given)
        found = fingerprint_base(folder, note)
        if found != self.fingerprint and fingerprint_denoiser(folder) != self.fingerprint:
            raise CheckpointUnusable(
                f"{folder} is not the base that {self.folder} was trained on: "
                f"its fingerprint is {found[:12]}, the checkpoint's is {self.fingerprint[:12]}",
                hint="name the folder with the base of the training: --base FOLDER",
            )
        return folder

    def part(self, name: str) -> Path | None:
        """The folder of a `vae` or `tokenizer` that the profile names beside the base, proven; None for the base's."""
        value, wanted = str(self.section("model").get(name) or ""), self.manifest.identity.get(f"model.{name}_hash")
        if not wanted:
            return None
        if not value or not is_folder(local(value)):
            where = value or "a folder that is not recorded here"
            raise CheckpointUnusable(f"the run took its {name} from {where}, which is not there")
        if fingerprint_folder(local(value)) != wanted:
            raise CheckpointUnusable(f"{local(value)} is not the {name} of the training any more: its content differs")
        return local(value)


def open_trained(folder: Path, *, hashes: bool = True) -> Trained:
    """Open a checkpoint, hashing every byte of it. Raises CheckpointUnusable with its faults.

    Without `hashes` it is proven by sizes and headers alone: enough to refuse what cannot be done with it.
    """
    manifest = read_whole(folder, hashes=hashes)
    run = RunDirectory(folder.absolute().parent.parent)
    if not (run.run_json.is_file() and run.resolved_json.is_file()):
        return Trained(folder, manifest, None)
    if run.read_record().get("run_id") != manifest.run_id:
        raise CheckpointUnusable(f"{folder} is not a checkpoint of the run whose folder it lies in")
    return Trained(folder, manifest, run, run.read_resolved())


def public_name(init_from: str) -> str:
    """A base's name for others: a hub id, or the last part of a path; never where it lies on this machine."""
    folder = embedded_set(init_from)
    if folder is not None:
        return _embedded_name(folder)
    folder = local(init_from)
    if not is_folder(folder) and "@" in init_from:
        return init_from
    cached = _HUB_SNAPSHOT.search(str(folder.absolute()))
    if cached:
        return f"{cached['name'].replace('--', '/')}@{cached['commit']}"
    packaged = folder.parent in EMBEDDED_SETS.values() and folder.name == "base"
    return _embedded_name(folder.parent) if packaged else folder.absolute().name


def _embedded_name(folder: Path) -> str:
    return f"nftctl's embedded {folder.name} base"
