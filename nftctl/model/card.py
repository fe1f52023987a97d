"""The README.md of an export: what it is, how it came about, what it scores, and the lines that load it.

Written for people elsewhere: names and hashes, never a path, a host or a secret of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from nftctl import __version__
from nftctl.model.export import ADAPTER_FOLDER, COMPONENT
from nftctl.model.trained import Trained, public_name
from nftctl.profile.artifacts import EMBEDDED, EMBEDDED_SETS, PACKAGE
from nftctl.run.outfolder import copy_file
from nftctl.tensorfile import DTYPE_NAMES, read_header, weight_files

PIPELINES = {"cosmos3": "Cosmos3OmniPipeline", "sd3": "StableDiffusion3Pipeline"}
"""Family -> the class of diffusers that loads a whole base."""
LOAD_ADAPTER = {
    # Cosmos3's pipeline has no loader of its own, so its transformer is asked.
    "cosmos3": 'pipe.transformer.load_lora_adapter("{folder}", use_safetensors=True)',
    "sd3": 'pipe.load_lora_weights("{folder}")',
}
"""Family -> the line that loads an adapter into `pipe`."""

WEIGHTS = {
    "policy": "the trained policy",
    "old": "the moving old policy, which samples in training",
    "ema": "the running average of the policy",
}
"""Copy of the weights -> what it is."""

RECIPE = (
    ("profile", "rl.profile"),
    ("image", "model.width", "model.height"),
    ("adapter rank, alpha", "model.lora.rank", "model.lora.alpha"),
    ("adapted modules", "model.lora.targets"),
    ("group size, prompts per step", "rl.group_size", "data.rows_per_step"),
    ("learning rate", "optimizer.lr"),
    ("beta, KL weight", "rl.beta", "rl.kl_beta"),
    ("moving old policy", "rl.old.decay", "rl.old.update_every"),
    ("timesteps per sample", "rl.timesteps_per_sample"),
    ("sampler, steps, shift, guidance", "rl.scheduler_type", "rl.sample_steps", "rl.sampler_shift", "rl.guidance"),
    ("seed", "rl.seed"),
    ("prompts, sha256", "data.prompt_hash"),
)
"""Row of the table -> keys of the identity."""


def write_card(trained: Trained, to: str, weights: str, base_name: str, folder: Path) -> None:
    """Write README.md into an export, with the run's own pictures beside it."""
    pictures = _copy_pictures(trained, folder)
    parts = [
        _front_matter(to, base_name),
        f"# {_title(trained, to)}\n",
        _what(trained, to, weights, base_name),
        f"## Loading\n\n```python\n{loading(trained, to, base_name)}\n```\n",
        _whence(to, base_name),
        f"{_sampling(trained)}\n",
        _rounding(trained, to, weights, folder),
        _rewards(trained, weights, pictures),
        _table("Recipe", ("setting", "value"), _recipe(trained)),
        _table("Provenance", ("", ""), _provenance(trained, weights)),
        f"## Licence\n\n{_licence(base_name)}\n",
    ]
    (folder / "README.md").write_text("\n".join(part for part in parts if part))


def loading(trained: Trained, to: str, base_name: str) -> str:
    """The exact lines of Python that load an export; its folder is the working folder's `FOLDER`."""
    contract = trained.contract
    adapter = {"lora": "FOLDER", "diffusers": f"FOLDER/{ADAPTER_FOLDER}"}.get(to) if _is_adapter(trained) else None
    place = _from_base(base_name) if to == "lora" else '"FOLDER"'
    first, base = _packaged_lines(base_name) if to == "lora" else ([], [])
    if not contract.needs_vae:
        # Latents are pixels, so there is no pipeline: the transformer is all that diffusers can load.
        lines = [
            *first,
            f"from diffusers import {contract.transformer}",
            "",
            *base,
            f'transformer = {contract.transformer}.from_pretrained({place}, subfolder="transformer")',
        ]
        return "\n".join([*lines, *([_load("cosmos3", adapter).removeprefix("pipe.")] if adapter else [])])
    name = PIPELINES[contract.family]
    more = ", enable_safety_checker=False" if contract.family == "cosmos3" else ""
    imports = ["import torch", f"from diffusers import {name}"]
    if contract.embedded:
        # The index of a packaged base calls its tokenizer `tokenizer`, and this pipeline wants a `text_tokenizer`.
        imports.append("from transformers import AutoTokenizer")
        base = [*base, f'tokenizer = AutoTokenizer.from_pretrained({place}, subfolder="tokenizer")']
        more = f", text_tokenizer=tokenizer{more}"
    lines = [
        *first,
        *imports,
        "",
        *base,
        f"pipe = {name}.from_pretrained({place}, torch_dtype=torch.{trained.value('model.dtype')}{more})",
    ]
    return "\n".join([*lines, *([_load(contract.family, adapter)] if adapter else [])])


def _packaged(base_name: str) -> str:
    """The packaged set that a base of this name is of, or empty."""
    return next((name for name in EMBEDDED_SETS if public_name(f"{EMBEDDED}:{name}") == base_name), "")


def _inside(packaged: str) -> str:
    """Where a packaged base lies in the package."""
    return (EMBEDDED_SETS[packaged] / "base").relative_to(PACKAGE).as_posix()


def _packaged_lines(base_name: str) -> tuple[list[str], list[str]]:
    """Lines before the imports of diffusers and after them that find a packaged base; none for any other."""
    packaged = _packaged(base_name)
    if not packaged:
        return [], []
    return ["from importlib.resources import files", ""], [f'base = files("nftctl") / "{_inside(packaged)}"']


def _from_base(base_name: str) -> str:
    """How to name the base to `from_pretrained`: a hub id as it is, a packaged one where it lies, any other by a word
    to put a path for.
    """
    if _packaged(base_name):
        return "base"
    name, _, revision = base_name.partition("@")
    return f"{json.dumps(name)}, revision={json.dumps(revision)}" if "/" in name and revision else '"BASE"'


def _load(family: str, folder: str) -> str:
    return LOAD_ADAPTER[family].format(folder=folder)


def _is_adapter(trained: Trained) -> bool:
    return bool(trained.adapted("policy"))


def _front_matter(to: str, base_name: str) -> str:
    """What a model hub reads. Only a hub id can be named as a base there, and only a packaged licence is known."""
    packaged = _packaged(base_name)
    lines = ["---", *([f"license: {_packaged_licence(packaged)}"] if packaged else [])]
    lines += ["library_name: diffusers", "pipeline_tag: text-to-image"]
    if "/" in base_name and "@" in base_name:
        lines.append(f"base_model: {base_name.partition('@')[0]}")
    tags = ["nftctl", "diffusion-nft", "reinforcement-learning", *(["lora"] if to == "lora" else [])]
    return "\n".join([*lines, f"tags: [{', '.join(tags)}]", "---\n"])


def _title(trained: Trained, to: str) -> str:
    name = trained.run.name if trained.run is not None else f"run {trained.manifest.run_id}"
    return f"{name}, step {trained.manifest.step}" + (" (LoRA)" if to == "lora" else "")


def _what(trained: Trained, to: str, weights: str, base_name: str) -> str:
    kind = {
        "lora": "A LoRA adapter for the denoiser of",
        "merged": "A whole pipeline: the trained adapter folded into the denoiser of",
        "diffusers": f"A whole pipeline: the untouched base and, in `{ADAPTER_FOLDER}/`, the trained adapter for",
    }[to]
    if not _is_adapter(trained):
        kind = "A whole pipeline with the trained denoiser, begun from"
    which = WEIGHTS[weights]
    return (
        f"{kind} **{base_name}**, trained by online reinforcement learning (DiffusionNFT) with "
        f"nftctl for {trained.manifest.step} steps. These are the weights of {which}.\n"
    )


def _sampling(trained: Trained) -> str:
    steps, shift, guidance = (trained.value(f"rl.{key}") for key in ("sample_steps", "sampler_shift", "guidance"))
    text = (
        f"It was sampled in training with UniPC (flow), {steps} steps, shift {shift:g} and guidance {guidance:g}, "
        "where guidance g means v_uncond + g (v_cond - v_uncond)."
    )
    if trained.contract.family == "sd3" and trained.manifest.identity.get("model.t5") is False:
        text += " Prompts were read without T5: load the pipeline with `text_encoder_3=None, tokenizer_3=None`."
    if trained.contract.family == "cosmos3" and trained.contract.needs_vae:
        # Both are on in the pipeline where nothing is said.
        off = [
            f"{theirs}=False"
            for ours, theirs in (
                ("system_prompt", "use_system_prompt"),
                ("resolution_template", "add_resolution_template"),
            )
            if trained.manifest.identity.get(f"model.{ours}") is False
        ]
        text += f" Prompts were read as they are: call the pipeline with `{', '.join(off)}`." if off else ""
    return text


def _whence(to: str, base_name: str) -> str:
    """Where a packaged base is to be found by who has the adapter alone."""
    packaged = _packaged(base_name)
    if to != "lora" or not packaged:
        return ""
    return (
        f"The base comes with the Python package nftctl (here {__version__}), in its folder `{_inside(packaged)}`; "
        f"profiles call it `{EMBEDDED}:{packaged}`.\n"
    )


def _licence(base_name: str) -> str:
    packaged = _packaged(base_name)
    if not packaged:
        return (
            "The base's licence and terms of use go with these weights. nftctl adds none of its own and could not "
            "check them."
        )
    return (
        f"The base is under {_packaged_licence(packaged)}, which goes with these weights; its own card, in nftctl's "
        f"folder `{_inside(packaged)}`, says what it was made of. nftctl adds no other."
    )


def _packaged_licence(packaged: str) -> str:
    """As the front matter of the packaged base's own card has it."""
    lines = (EMBEDDED_SETS[packaged] / "base" / "README.md").read_text().splitlines()
    return next(line.removeprefix("license: ") for line in lines if line.startswith("license: "))


def _rounding(trained: Trained, to: str, weights: str, folder: Path) -> str:
    """What the base's own dtype took from weights that are float32 in the checkpoint; empty where it took nothing."""
    if to == "lora" or (to == "diffusers" and _is_adapter(trained)) or not (folder / COMPONENT).is_dir():
        return ""
    trains = {f"{name}.weight" for name in trained.adapted(weights)} or set(trained.copy(weights))
    infos = [read_header(file)[0] for file in weight_files(folder / COMPONENT)]
    stored = {info.dtype for file in infos for name, info in file.items() if name in trains}
    names = sorted(ours for ours, theirs in DTYPE_NAMES.items() if theirs in stored - {"F32", "F64"})
    if not names:
        return ""
    what = (
        "The adapter was added in float32, and the sum" if _is_adapter(trained) else "Trained in float32, each weight"
    )
    return (
        f"{what} was rounded once to the base's {' and '.join(names)}: pictures differ a little from those that "
        "the run made of the same noise.\n"
    )


def _copy_pictures(trained: Trained, folder: Path) -> list[tuple[str, str]]:
    """The reward curve, and the grids before and after where they are of this step: (caption, file)."""
    if trained.run is None:
        return []
    found = []
    evaluated = _evaluations(trained, through=None)
    last = bool(evaluated) and evaluated[-1]["step"] == trained.manifest.step
    for caption, path, fits in (
        ("reward over the run's steps", trained.run.path / "reward.svg", True),
        ("the same prompts and noise before and after", trained.run.samples / "before_after.png", last),
    ):
        if fits and path.is_file():
            copy_file(path, folder / path.name)
            found.append((caption, path.name))
    return found


def _rewards(trained: Trained, weights: str, pictures: Iterable[tuple[str, str]]) -> str:
    revisions = {str(entry.get("name")): str(entry.get("revision")) for entry in trained.manifest.reward}
    rows = [
        (f"`{name}`", _show(trained.manifest.identity.get(f"reward.providers.{name}.weight")), f"`{revision}`")
        for name, revision in revisions.items()
    ]
    text = _table("Reward", ("provider", "weight", "revision"), rows)
    evaluated = _evaluations(trained, through=trained.manifest.step)
    if len(evaluated) > 1:
        before, after = evaluated[0], evaluated[-1]
        counts = ("eval/samples", "eval/std")
        names = [name for name in after if name.startswith("eval/") and name not in counts and name in before]
        held_out = [(f"`{name}`", f"{before[name]:.4f}", f"{after[name]:.4f}") for name in names]
        head = ("held-out, fixed noise", f"step {before['step']}", f"step {after['step']}")
        text += f"\n{_rows(head, held_out)}\n{after.get('eval/samples')} images of held-out prompts.\n"
        scored = str(trained.section("eval").get("weights") or "policy")
        if weights != scored:
            text += f"These are scores of {WEIGHTS[scored]}, not of {WEIGHTS[weights]} in this folder.\n"
    else:
        text += "\nIt was not evaluated on held-out prompts.\n"
    return text + "".join(f"\n![{caption}]({name})\n" for caption, name in pictures)


def _evaluations(trained: Trained, through: int | None) -> list[dict[str, Any]]:
    """Rows of evaluations.jsonl up to a step; a last line cut off by a crash is left out."""
    path = trained.run.path / "evaluations.jsonl" if trained.run is not None else None
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path is not None and path.is_file() else []:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            break
        if through is None or row["step"] <= through:
            rows.append(row)
    return rows


def _recipe(trained: Trained) -> list[tuple[str, str]]:
    identity: Mapping[str, Any] = trained.manifest.identity
    # Without an adapter its settings are keys that nothing read.
    read = [row for row in RECIPE if _is_adapter(trained) or not row[1].startswith("model.lora.")]
    rows = [(title, ", ".join(_show(identity[key]) for key in keys if key in identity)) for title, *keys in read]
    return rows if _is_adapter(trained) else [*rows[:2], ("trained", "all weights of the denoiser"), *rows[2:]]


def _provenance(trained: Trained, weights: str) -> list[tuple[str, str]]:
    manifest = trained.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return [
        ("run", f"`{manifest.run_id}`"),
        ("step", f"{manifest.step}, {manifest.state['optimizer_steps']} optimizer steps"),
        ("weights", weights),
        ("identity", f"`{manifest.identity_hash}`"),
        ("base fingerprint", f"`{trained.fingerprint}`"),
        ("trained with", versions),
        ("written", f"{manifest.created}, exported by nftctl {__version__}"),
    ]


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return f"## {title}\n\n{_rows(head, rows)}"


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _show(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
