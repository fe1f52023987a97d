"""A denoiser's weights from diffusers layout to a distributed checkpoint (DCP) and back, tensor for tensor the same.

DCP is written as safetensors by torch's own writer, so there is no pickle in it; its folder carries the transformer's
config along. On the way back every tensor is compared with the config by name and shape before the first is written.
Refuses to guess a config, a prefix, or which of several models a folder holds.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model.export import COMPONENT, copy_base
from nftctl.model.foreign_dcp import METADATA, ForeignTensors
from nftctl.model.registry import FAMILIES
from nftctl.model.weights import Tensors, common_prefix, differences
from nftctl.profile.artifacts import is_file, is_folder, read_object
from nftctl.profile.t2i import T2I_PROFILES
from nftctl.run.outfolder import Entry, copy_file, write_safetensors
from nftctl.run.stored import StoredTensors, TensorSource, form_bytes
from nftctl.tensorblocks import SHOWN, Form, shard_config, shard_files
from nftctl.tensorfile import STEM, weight_files

SHARD_BYTES = 1 << 30
"""torch's writer holds a whole file in memory, so files are closed once they are this long."""
FILE_BYTES = 4 << 30
"""The same for files in diffusers layout, which are written tensor by tensor."""


def component_of(folder: Path) -> Path | None:
    """The transformer of a diffusers folder, whole pipeline or component alone; None for anything else."""
    for place in (folder / COMPONENT, folder):
        if is_file(place / "config.json") and (is_file(place / STEM) or is_file(place / f"{STEM}.index.json")):
            return place
    return None


def write_dcp(component: Path, folder: Path) -> dict[str, Form]:
    """Write the weights of a component as a DCP folder; returns the forms of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = StoredTensors(weight_files(component)).forms
    index = {name: number for number, names in enumerate(_split(forms, SHARD_BYTES), 1) for name in names}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        tensors = Tensors(weight_files(component), stack)
        # Mapped files: a tensor is read when its file is written.
        state = {name: tensors.as_stored(name) for name in forms}
        dcp_save(state, storage_writer=HuggingFaceStorageWriter(str(folder), index), no_dist=True)
    written = open_dcp(folder).forms
    if written != forms:
        raise CheckpointUnusable(f"what was written to {folder} is not what was read from {component}")
    copy_file(component / "config.json", folder / COMPONENT / "config.json")
    return forms


def open_dcp(folder: Path) -> TensorSource:
    """The tensors of a DCP folder: torch's safetensors storage, or its own with pickles that are never run."""
    if is_file(folder / METADATA):
        return ForeignTensors(folder)
    if not any(folder.glob("*.safetensors")):
        raise CheckpointUnusable(f"{folder} is neither a diffusers folder nor a distributed checkpoint")
    return StoredTensors(shard_files(folder))


def write_diffusers(
    source: TensorSource, config: Path, like: Path | None, strip_prefix: str, folder: Path
) -> tuple[dict[str, Form], list[str]]:
    """Write tensors in diffusers layout: a component, or with `like` a whole pipeline with that base's other parts.

    Returns the forms by their final names, and the names that were left out.
    """
    names = {name.removeprefix(strip_prefix): name for name in source.forms if name.startswith(strip_prefix)}
    left_out = sorted(set(source.forms) - set(names.values()))
    expected, optional = _expected(config)
    forms = {name: source.forms[own] for name, own in names.items()}
    _refuse_differences(forms, expected, optional, strip_prefix)
    place = folder / COMPONENT if like is not None else folder
    if like is not None:
        copy_base(like, folder)
    copy_file(config / "config.json", place / "config.json")
    ordered = {name: forms[name] for name in expected if name in forms}
    parts = list(_split(ordered, FILE_BYTES))
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = STEM if len(parts) == 1 else f"{Path(STEM).stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        entries = [Entry(name, forms[name], partial(source.chunks, names[name])) for name in part]
        write_safetensors(place / file, entries, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = sum(map(form_bytes, forms.values()))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (place / f"{STEM}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return ordered, left_out


def config_folder(source: Path, config: Path | None, like: Path | None) -> Path:
    """Where the transformer's config.json is: as named, else the base's, else the one that a DCP folder carries."""
    places = [config, like / COMPONENT if like is not None else None, shard_config(source)]
    for place in places:
        if place is not None and is_file(place / "config.json"):
            return place
        if place is not None and place in (config, like and like / COMPONENT):
            raise UsageRefused(f"{place} has no config.json", hint="name the folder of the transformer's config.json")
    raise UsageRefused(
        f"nothing says what model {source} holds the weights of",
        hint="name the folder of its transformer's config.json: --config FOLDER; or a whole base: --like BASE",
    )


def refuse_no_base(like: Path) -> None:
    """Refuse a `--like` that is no pipeline folder."""
    if not is_folder(like) or not is_file(like / "model_index.json"):
        raise UsageRefused(f"--like {like} is no base: it has no model_index.json")


def _split(forms: Mapping[str, Form], limit: int) -> Iterator[list[str]]:
    """Names in files: a file is closed once it is `limit` long."""
    part: list[str] = []
    held = 0
    for name, form in forms.items():
        part.append(name)
        held += form_bytes(form)
        if held >= limit:
            yield part
            part, held = [], 0
    if part:
        yield part


def _expected(config: Path) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Names and shapes of the model that a config describes, and the beginnings of names that may be absent."""
    declared = read_object(config / "config.json").get("_class_name")
    families = {contract.transformer: contract.family for contract in T2I_PROFILES.values()}
    if declared not in families:
        raise CheckpointUnusable(
            f"{config}/config.json declares {declared!r}", hint=f"known transformers: {', '.join(families)}"
        )
    module: Any = import_module(FAMILIES[families[str(declared)]])
    stock = module.empty_transformer(config)
    return {name: tuple(value.shape) for name, value in stock.state_dict().items()}, getattr(module, "UNUSED", ())


def _refuse_differences(
    forms: Mapping[str, Form], expected: Mapping[str, tuple[int, ...]], optional: tuple[str, ...], prefix: str
) -> None:
    wrong = differences(forms, expected, optional)
    if not wrong:
        return
    more = f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    found = "" if prefix else common_prefix(forms, expected)
    raise CheckpointUnusable(
        f"the tensors do not match the config, {len(wrong)} differences:\n  " + "\n  ".join(wrong[:SHOWN]) + more,
        hint=f"they have a prefix: add --strip-prefix {found}" if found else "",
    )
