"""From a checkpoint to what others load: the adapter alone, the adapter folded into its base, or a pipeline folder.

Names are those of the diffusers transformer. The adapter is copied byte for byte, without torch; folded weights are
computed in float32 and rounded once to the base's own dtype, one tensor at a time. Files of the base are copied, never
linked, so that what is taken away stands alone; nothing but safetensors and text is copied. Refuses an adapter that
does not fit its base, and to fold what is no adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nftctl import __version__
from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model.trained import SIDES, Trained, public_name
from nftctl.profile.artifacts import inspect_folder, read_object
from nftctl.run.hashing import TEXT_SUFFIXES
from nftctl.run.outfolder import Entry, copy_file, write_safetensors
from nftctl.run.stored import StoredTensors, read_range
from nftctl.tensorfile import DTYPE_NAMES, STEM, read_header, weight_files

if TYPE_CHECKING:
    import torch

COMPONENT = "transformer"
"""The part of a pipeline that is trained: its folder, and the head of every name in an adapter file."""
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""Name under which diffusers looks for an adapter."""
ADAPTER_FOLDER = "adapter"
"""Where the adapter lies in a pipeline folder."""
PARTS = {"vae": ("vae",), "tokenizer": ("tokenizer", "text_tokenizer")}
"""What the profile may name beside the base -> parts of a pipeline that it stands for."""
ROOT_TEXTS = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
"""Beginnings of names of files at a base's root that go along with every copy."""

Replacement = Callable[[], Iterable[bytes]]


def write_adapter(trained: Trained, weights: str, folder: Path, base_name: str) -> int:
    """Write the adapter file into `folder` and return how many tensors it has."""
    modules = _modules(trained, weights)
    rank, alpha = int(trained.value("model.lora.rank")), float(trained.value("model.lora.alpha"))
    tensors = trained.tensors
    entries = []
    for module in modules:
        for side in SIDES:
            name = f"{weights}.{module}{side}"
            key = f"{COMPONENT}.{module}{side}.weight"
            entries.append(Entry(key, tensors.forms[name], partial(tensors.chunks, name)))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    prefixed = {f"{COMPONENT}.{key}": value for key, value in config.items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(prefixed), **provenance(trained, weights)}
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / ADAPTER_FILE, entries, metadata | {"base_model": base_name})
    return len(entries)


def provenance(trained: Trained, weights: str) -> dict[str, str]:
    """Where weights come from, as texts for a header."""
    manifest = trained.manifest
    facts = {"run_id": manifest.run_id, "step": manifest.step, "weights": weights, "identity": manifest.identity_hash}
    facts |= {"base_fingerprint": trained.fingerprint, "nftctl_version": __version__}
    if trained.adapted(weights):
        facts |= {"rank": trained.value("model.lora.rank"), "alpha": trained.value("model.lora.alpha")}
    return {key: str(value) for key, value in facts.items()}


def write_merged(trained: Trained, weights: str, base: Path, folder: Path) -> int:
    """Write a whole pipeline folder whose transformer has the adapter folded in; returns how many tensors changed."""
    scale = float(trained.value("model.lora.alpha")) / float(trained.value("model.lora.rank"))
    stored = StoredTensors(weight_files(base / COMPONENT))
    replaced: dict[str, Replacement] = {}
    for module in _modules(trained, weights):
        name = f"{module}.weight"
        (_, a), (_, b) = (trained.tensors.forms[f"{weights}.{module}{side}"] for side in SIDES)
        _refuse_other_shape(stored, name, (b[0], a[1]))
        replaced[name] = partial(_folded, stored, name, trained.tensors, f"{weights}.{module}", scale)
    copy_parts(trained, base, folder)
    rewrite_component(base / COMPONENT, folder / COMPONENT, replaced)
    return len(replaced)


def write_pipeline(trained: Trained, weights: str, base: Path, folder: Path, base_name: str) -> int:
    """Write a pipeline folder: the base untouched and the adapter beside it, or the base with the trained weights.

    Returns how many tensors are the training's.
    """
    copy_parts(trained, base, folder)
    if trained.adapted(weights):
        rewrite_component(base / COMPONENT, folder / COMPONENT, {})
        return write_adapter(trained, weights, folder / ADAPTER_FOLDER, base_name)
    stored = StoredTensors(weight_files(base / COMPONENT))
    replaced: dict[str, Replacement] = {}
    for name, own in trained.copy(weights).items():
        _refuse_other_shape(stored, name, trained.tensors.forms[own][1])
        replaced[name] = partial(_in_dtype, trained.tensors, own, stored.forms[name][0])
    rewrite_component(base / COMPONENT, folder / COMPONENT, replaced)
    return len(replaced)


def rewrite_component(source: Path, target: Path, replaced: Mapping[str, Replacement]) -> None:
    """Copy a component file by file, under the same names and index, with some tensors' bytes replaced.

    Forms stay what they are.
    """
    for path in _copied(source):
        if path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
            copy_file(path, target / path.relative_to(source))
    index = source / f"{STEM}.index.json"
    if index.is_file():
        copy_file(index, target / index.name)
    for file in weight_files(source):
        infos, metadata = read_header(file)
        ordered = sorted(infos.items(), key=lambda item: item[1].begin)
        entries = [
            Entry(name, (info.dtype, info.shape), replaced.get(name) or partial(read_range, file, info.begin, info.end))
            for name, info in ordered
        ]
        written = target / file.relative_to(source)
        written.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(written, entries, metadata)


def copy_parts(trained: Trained, base: Path, folder: Path) -> None:
    """Copy everything of the base but the transformer, with the run's own VAE and tokenizer where it names some."""
    copy_base(base, folder, {part: place for part in PARTS if (place := trained.part(part))})


def copy_base(base: Path, folder: Path, own: Mapping[str, Path] = {}) -> None:
    """Copy a pipeline folder but for its transformer. `own` are folders that stand in for parts of it, by PARTS."""
    copy_file(base / "model_index.json", folder / "model_index.json")
    if (base / "README.md").is_file():
        copy_file(base / "README.md", folder / "README.base.md")
    for path in base.iterdir():
        if path.is_file() and path.name.upper().startswith(ROOT_TEXTS):
            copy_file(path, folder / path.name)
    sources = {part: base / part for part in parts_of(base)}
    for key, names in PARTS.items():
        # A base may have a part that its index does not name, and nftctl reads it all the same.
        there = [name for name in names if name in sources or (base / name).is_dir()]
        there = there or ([names[0]] if key in own else [])
        sources |= {name: own.get(key) or base / name for name in there}
    for part, source in sources.items():
        if part != COMPONENT:
            for path in _copied(source):
                copy_file(path, folder / part / path.relative_to(source))


def parts_of(base: Path) -> list[str]:
    """The parts that model_index.json names."""
    index = read_object(base / "model_index.json")
    return [name for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[0]]


def absent_parts(folder: Path) -> list[str]:
    """Parts that a pipeline folder announces and lacks."""
    return [part for part in parts_of(folder) if not (folder / part).is_dir()]


def base_name(trained: Trained, given: str) -> str:
    """What to call the base: as the run or `--base` names it, without a path of this machine."""
    named = given or str(trained.section("rl").get("init_from") or "")
    return public_name(named) if named else f"the base with fingerprint {trained.fingerprint}"


def refuse_unfit(trained: Trained, to: str, weights: str) -> None:
    """Refuse weights that this checkpoint does not hold, and a form that it cannot have."""
    adapted = trained.adapted(weights)
    if to != "diffusers" and not adapted:
        raise UsageRefused(
            f"{trained.folder} holds whole weights and no adapter, so there is nothing to write as {to}",
            hint="take the whole pipeline: --to diffusers",
        )


def refuse_no_pipeline(base: Path, to: str) -> None:
    """Refuse to write a pipeline around a distributed checkpoint, which is a denoiser and nothing else."""
    if inspect_folder(base).kind == "dcp":
        raise UsageRefused(
            f"the base {base} is a distributed checkpoint, a denoiser alone: there is no pipeline to write as {to}",
            hint="name a base with the same denoiser: --base FOLDER, such as `nftctl convert DCP FOLDER --like BASE` "
            "writes; or take the adapter alone: --to lora",
        )


def _modules(trained: Trained, weights: str) -> list[str]:
    """The adapted modules, each with both sides, of one rank."""
    modules, names, forms = trained.adapted(weights), trained.copy(weights), trained.tensors.forms
    odd = sorted(set(names) - {f"{module}{side}" for module in modules for side in SIDES})
    odd += [f"{module}{SIDES[1]}" for module in modules if f"{module}{SIDES[1]}" not in names]
    if odd:
        raise CheckpointUnusable(f"{trained.folder}: not an adapter of pairs of A and B: {', '.join(odd)}")
    rank = trained.value("model.lora.rank")
    for module in modules:
        (_, a), (_, b) = (forms[f"{weights}.{module}{side}"] for side in SIDES)
        if len(a) != 2 or len(b) != 2 or not a[0] == b[1] == rank:
            raise CheckpointUnusable(f"{trained.folder}: {module} is {list(b)} x {list(a)}, the rank is {rank}")
    return modules


def _copied(folder: Path) -> Iterator[Path]:
    """The files of a part that belong to a copy: texts and safetensors. Pickles and hidden files stay behind."""
    for path in sorted(folder.rglob("*")):
        hidden = any(piece.startswith(".") for piece in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.suffix in {*TEXT_SUFFIXES, ".safetensors"}:
            yield path


def _refuse_other_shape(base: StoredTensors, name: str, shape: tuple[int, ...]) -> None:
    found = base.forms.get(name)
    if found is None or found[1] != shape:
        is_what = "not there" if found is None else str(list(found[1]))
        raise CheckpointUnusable(f"{name} of the base is {is_what}, the checkpoint needs {list(shape)}")


def _folded(base: StoredTensors, name: str, adapter: StoredTensors, module: str, scale: float) -> list[bytes]:
    """Bytes of W + scale B A, summed in float32, in the base's dtype."""
    weight = tensor_of(base, name).float()
    a, b = (tensor_of(adapter, f"{module}{side}").float() for side in SIDES)
    return [bytes_of(weight.addmm_(b, a, alpha=scale), base.forms[name][0])]


def _in_dtype(tensors: StoredTensors, name: str, dtype: str) -> Iterable[bytes]:
    """Bytes of a tensor in the given dtype."""
    if tensors.forms[name][0] == dtype:
        return tensors.chunks(name)
    return [bytes_of(tensor_of(tensors, name), dtype)]


def tensor_of(tensors: StoredTensors, name: str) -> torch.Tensor:
    """A stored tensor as torch's."""
    import torch

    dtype, shape = tensors.forms[name]
    raw = torch.frombuffer(bytearray(tensors.read(name).tobytes()), dtype=torch.uint8)
    return raw.view(_torch_dtype(dtype)).reshape(shape)


def bytes_of(value: torch.Tensor, dtype: str) -> bytes:
    """A tensor's numbers as the bytes of a safetensors dtype."""
    import torch

    return value.to(_torch_dtype(dtype)).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    known = {theirs: ours for ours, theirs in DTYPE_NAMES.items()}
    found: torch.dtype = getattr(torch, known[name])
    return found
