"""A base folder in diffusers layout as every family reads it: its JSON files, its parts, and what must fit together.

Refuses folders that lack a part, transformers of another class, and shapes that the decoder cannot make.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nftctl.errors import CheckpointUnusable, Finding, ProfileRefused
from nftctl.model.decoder import VaeDecoder
from nftctl.profile.schema import Model


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of the base."""
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointUnusable(f"{file} cannot be read, so {file.parent} is no diffusers folder") from error
    except ValueError as error:
        raise CheckpointUnusable(f"{file} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointUnusable(f"{file} is not a JSON object")
    return document


def transformer_config(folder: Path, transformer: type, family: str) -> dict[str, Any]:
    """`config.json` of a transformer's folder; raises CheckpointUnusable when it declares another class."""
    config = read_json(folder / "config.json")
    if config.get("_class_name") != transformer.__name__:
        raise CheckpointUnusable(
            f"{folder} holds a {config.get('_class_name')}, family {family} needs a {transformer.__name__}"
        )
    return config


def part_folder(base: Path, given: str, part: str, names: Sequence[str]) -> Path:
    """Folder of the VAE or tokenizer: the profile's, else the base's own."""
    candidates = [Path(given).expanduser()] if given else [base / name for name in names]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise ProfileRefused(
        [
            Finding(
                f"{part}-missing",
                f"model.{part}",
                f"there is no folder {candidates[0]}",
                help=f'set model.{part} = "path/to/{part}"',
            )
        ]
    )


def check_channels(decoder: VaeDecoder, channels: int, base: Path) -> None:
    """Refuse a VAE whose latents the transformer does not make."""
    if decoder.channels != channels:
        raise CheckpointUnusable(
            f"the VAE has {decoder.channels} latent channels, the transformer in {base} {channels}"
        )


def check_media(model: Model, multiple: int, why: str) -> None:
    """Refuse sides that are no multiples of `multiple`."""
    findings = [
        Finding("media-shape", f"model.{key}", f"must be a multiple of {multiple}, {why}, got {n}")
        for key, n in (("height", model.height), ("width", model.width))
        if n % multiple
    ]
    if findings:
        raise ProfileRefused(findings)
