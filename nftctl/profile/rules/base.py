"""What the run starts from: the base weights, and the VAE and tokenizer that the base may lack."""

from __future__ import annotations

from collections.abc import Iterator

from nftctl.profile.artifacts import exists, is_folder, is_vae, local
from nftctl.profile.rules.rule import Facts, Problem, Rule


def _missing(facts: Facts) -> Iterator[Problem]:
    value = facts.profile.rl.init_from
    if facts.base.kind == "unset":
        message = "rl.init_from is required: training starts from a base, never from scratch"
        yield Problem("rl.init_from", message, "the folder of a base in diffusers layout, or `embedded`")
    elif facts.base.kind == "unreadable":
        help = "a base is a folder with model_index.json and transformer/config.json"
        yield Problem("rl.init_from", f'rl.init_from = "{value}": {facts.base.reason}', help)


def _hub(facts: Facts) -> Iterator[Problem]:
    if facts.base.kind == "hub":
        repository, _, revision = facts.profile.rl.init_from.partition("@")
        message = "rl.init_from names a hub repository, and this release loads local folders only"
        help = f"download {repository} at revision {revision} and give the folder"
        yield Problem("rl.init_from", message, help)


def _dcp(facts: Facts) -> Iterator[Problem]:
    if facts.base.kind == "dcp":
        message = "rl.init_from is a distributed checkpoint, and this release loads bases in diffusers layout only"
        yield Problem("rl.init_from", message, "convert it to a diffusers folder and give that")


def _family(facts: Facts) -> Iterator[Problem]:
    if facts.base.kind != "diffusers" or facts.contract is None:
        return
    found = facts.base.transformer_class()
    if found and found != facts.contract.transformer:
        message = f'rl.init_from holds a {found}, and rl.profile = "{facts.contract.name}" needs a '
        yield Problem("rl.init_from", message + facts.contract.transformer)


def _weights(facts: Facts) -> Iterator[Problem]:
    if facts.weights.reason:
        yield Problem("rl.init_from", f"rl.init_from holds no weights that can be read: {facts.weights.reason}")


def _vae(facts: Facts) -> Iterator[Problem]:
    value = facts.profile.model.vae
    if value and not is_vae(local(value)):
        lacks = "has no config.json" if exists(local(value)) else "is not there"
        yield Problem("model.vae", f'model.vae = "{value}" {lacks}', "the folder of a VAE in diffusers layout")
    contract, base = facts.contract, facts.base
    needed = contract is not None and contract.needs_vae and base.kind in ("unset", "diffusers")
    if not value and (base.kind == "dcp" or (needed and not is_vae(base.folder / "vae"))):
        message = "model.vae is required: there is none in rl.init_from"
        yield Problem("model.vae", message, "the folder of a VAE in diffusers layout")


def _tokenizer(facts: Facts) -> Iterator[Problem]:
    value = facts.profile.model.tokenizer
    if value and not is_folder(local(value)):
        yield Problem("model.tokenizer", f'model.tokenizer = "{value}" is not a folder')
    if not value and facts.base.kind in ("dcp", "diffusers") and not facts.base.has("tokenizer", "text_tokenizer"):
        yield Problem("model.tokenizer", "model.tokenizer is required: there is none in rl.init_from")


RULES = (
    Rule("init-from-missing", "Training starts from a base, never from scratch.", _missing),
    Rule("init-from-hub", "This release loads local folders only.", _hub),
    Rule("init-from-dcp", "This release loads bases in diffusers layout only.", _dcp),
    Rule("init-from-family", "The base is of the family that the named contract is for.", _family),
    Rule("init-from-weights", "The base's weights are whole safetensors files.", _weights),
    Rule("vae-missing", "Latents are decoded by a VAE, the base's own or a named one.", _vae),
    Rule("tokenizer-missing", "Prompts are read through a tokenizer, the base's own or a named one.", _tokenizer),
)
