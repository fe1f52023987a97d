"""What the run starts from: the base weights, its text encoders, and the VAE and tokenizer that it may lack."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from nftctl.profile.artifacts import (
    exists,
    hub_id,
    is_file,
    is_folder,
    is_vae,
    local,
    pixels_per_latent,
    read_object,
    read_weights,
    unknown_set,
)
from nftctl.profile.hub import is_offline
from nftctl.profile.rules.rule import Facts, Problem, Rule
from nftctl.profile.t2i import T2I_PROFILES
from nftctl.tensorfile import TRANSFORMERS_STEM

READABLE = ("diffusers", "dcp")
"""Kinds of base whose files lie here."""


def _missing(facts: Facts) -> Iterator[Problem]:
    value = facts.profile.rl.init_from
    if facts.base.kind == "unset":
        message = "rl.init_from is required: training starts from a base, never from scratch"
        packaged = facts.contract is not None and facts.contract.embedded
        help = "the folder of a base in diffusers layout" + (", or `embedded`" if packaged else "")
        yield Problem("rl.init_from", message, help)
    elif facts.base.kind == "unreadable":
        reason, help = unknown_set(value)
        help = help or "a base is a folder with model_index.json and transformer/config.json"
        yield Problem("rl.init_from", f'rl.init_from = "{value}": {reason or facts.base.reason}', help)


def _hub(facts: Facts) -> Iterator[Problem]:
    value = facts.profile.rl.init_from
    hub = hub_id(value)
    if facts.base.kind == "hub" and hub is not None:
        lacks = "is not in the local cache of downloads"
        if facts.base.reason:
            lacks = f"is not whole in the local cache of downloads: {facts.base.reason}"
        way = "HF_HUB_OFFLINE is set; without it" if is_offline() else "nftctl launch downloads it, or now"
        yield Problem("rl.init_from", f'rl.init_from = "{value}" {lacks}', f"{way}: {hub.command()}")


def _dcp(facts: Facts) -> Iterator[Problem]:
    if facts.base.kind != "dcp":
        return
    convert = f"{_convert(facts)}; then name what it writes"
    if facts.base.is_pickled:
        message = (
            "rl.init_from is a distributed checkpoint with a pickled .metadata, which a run never opens: "
            "only nftctl convert has the reader in which nothing of it can run"
        )
        yield Problem("rl.init_from", message, convert)
    elif not is_file(facts.base.config_folder / "config.json"):
        message = "rl.init_from is a distributed checkpoint without a config.json: nothing says what its tensors are"
        config = local(facts.profile.rl.init_from) / "transformer" / "config.json"
        yield Problem("rl.init_from", message, f"copy the transformer's to {config}; or {convert}")


def _convert(facts: Facts) -> str:
    """The command that makes a diffusers folder of the distributed checkpoint that the profile names."""
    value = facts.profile.rl.init_from
    source, target = shlex.quote(value), shlex.quote(f"{value.rstrip('/')}-diffusers")
    return f"nftctl convert {source} {target} --like BASE, where BASE is the base that it came from"


def _family(facts: Facts) -> Iterator[Problem]:
    if facts.base.kind not in READABLE or facts.contract is None or facts.other_set:
        return
    if facts.other_family:
        found = facts.base.transformer_class()
        message = f'rl.init_from holds a {found}, and rl.profile = "{facts.contract.name}" needs a '
        fitting = [contract.name for contract in T2I_PROFILES.values() if contract.transformer == found]
        help = f"for this base rl.profile is one of {', '.join(fitting)}" if fitting else ""
        yield Problem("rl.init_from", message + facts.contract.transformer, help)


def _other_contract(facts: Facts) -> Iterator[Problem]:
    """What a base that was made for one contract lacks under another is then not asked for."""
    contract, packaged = facts.contract, facts.other_set
    if contract is None or not packaged:
        return
    own = next(known.name for known in T2I_PROFILES.values() if known.embedded == packaged)
    value = facts.profile.rl.init_from
    message = (
        f'rl.init_from = "{value}" is the packaged base of {packaged}, made for rl.profile = "{own}", '
        f'and this profile has rl.profile = "{contract.name}"'
    )
    other = f'rl.init_from = "embedded:{contract.embedded}"' if contract.embedded else "name a base of your own"
    yield Problem("rl.init_from", message, f"{other}; or begin with the bundled profile {own}")


def _weights(facts: Facts) -> Iterator[Problem]:
    if facts.weights.reason:
        hub = hub_id(facts.profile.rl.init_from)
        message = f"rl.init_from holds no weights that can be read: {facts.weights.reason}"
        yield Problem("rl.init_from", message, hub.command() if hub else "")


def _vae(facts: Facts) -> Iterator[Problem]:
    value = facts.profile.model.vae
    if value and not is_vae(local(value)):
        lacks = "has no config.json" if exists(local(value)) else "is not there"
        yield Problem("model.vae", f'model.vae = "{value}" {lacks}', "the folder of a VAE in diffusers layout")
    contract, base = facts.contract, facts.base
    # A base that brings its text encoders brings its VAE as well, so nothing is asked for before there is a base.
    asked = ("diffusers",) if contract is not None and contract.text_parts else ("unset", "diffusers")
    needed = contract is not None and contract.needs_vae and base.kind in asked and not is_vae(base.folder / "vae")
    needed = needed and not facts.other_set
    if base.kind == "dcp":
        channels = base.transformer_config().get("latent_channel", 3)
        pixels = contract is not None and not contract.needs_vae and channels == 3
        # One that needs text encoders as well is refused as a whole.
        needed = not pixels and not (contract is not None and contract.text_parts)
    if not value and needed:
        message = "model.vae is required: there is none in rl.init_from"
        yield Problem("model.vae", message, "the folder of a VAE in diffusers layout")


def _decode_mode(facts: Facts) -> Iterator[Problem]:
    model = facts.profile.model
    if facts.base.kind not in READABLE or not facts.base.latents_are_pixels(model.vae):
        return
    for key, asked in (("model.decode_slicing", model.decode_slicing), ("model.decode_tiling", model.decode_tiling)):
        if asked:
            message = f"{key} is for a VAE, and the latents of rl.init_from are pixels: nothing is decoded"
            yield Problem(key, message, "remove the key")


def _media(facts: Facts) -> Iterator[Problem]:
    """Sides that the contract allows and this base cannot make."""
    contract, base, model = facts.contract, facts.base, facts.profile.model
    vae = local(model.vae) if model.vae else base.folder / "vae"
    if contract is None or base.kind not in READABLE or facts.other_family or not is_vae(vae):
        return
    multiple = pixels_per_latent(read_object(vae / "config.json"), contract.family)
    smallest, largest, step = contract.sides
    if contract.family == "sd3":
        config = base.transformer_config()
        patch, table = config.get("patch_size", 2), config.get("pos_embed_max_size", 96)
        if type(patch) is int and type(table) is int:
            multiple, largest = multiple * patch, min(largest, multiple * patch * table)
    for key, side in (("model.height", model.height), ("model.width", model.width)):
        if side < smallest or side > contract.sides[1] or side % step:
            continue  # the contract's own word
        if side % multiple:
            yield Problem(key, f"{key} must be a multiple of {multiple} for this base and its VAE, got {side}")
        elif side > largest:
            yield Problem(key, f"{key} = {side}, and this base has positions for {largest} pixels at most")


def _tokenizer(facts: Facts) -> Iterator[Problem]:
    value, base = facts.profile.model.tokenizer, facts.base
    if facts.contract is not None and facts.contract.text_parts:
        lacking = [folder for _, folder in facts.text_parts if not base.has(folder)]
        if base.kind == "diffusers" and lacking:
            message = f"rl.init_from has no {' and no '.join(lacking)}: each text encoder needs its tokenizer"
            yield Problem("rl.init_from", message)
        return
    if value and not is_folder(local(value)):
        yield Problem("model.tokenizer", f'model.tokenizer = "{value}" is not a folder')
    if not value and base.kind in READABLE and not base.has("tokenizer", "text_tokenizer"):
        yield Problem("model.tokenizer", "model.tokenizer is required: there is none in rl.init_from")


def _text_encoder(facts: Facts) -> Iterator[Problem]:
    if facts.base.kind == "dcp" and facts.text_parts and not facts.base.is_pickled:
        message = (
            "rl.init_from is a distributed checkpoint, which holds a transformer alone, and prompts of this family are "
            "read by the text encoders of the base"
        )
        yield Problem("rl.init_from", message, f"{_convert(facts)}; then name what it writes")
    if facts.base.kind != "diffusers":
        return
    for part, _ in facts.text_parts:
        folder = facts.base.folder / part
        reason = read_weights(folder, TRANSFORMERS_STEM).reason
        if not is_file(folder / "config.json"):
            reason = f"{folder} has no config.json"
        if reason:
            help = "model.t5 = false runs without it" if part == "text_encoder_3" else ""
            yield Problem("rl.init_from", f"rl.init_from lacks a text encoder: {reason}", help)


RULES = (
    Rule("init-from-missing", "Training starts from a base, never from scratch.", _missing),
    Rule("init-from-hub", "A base on the hub is read from the local cache of downloads.", _hub),
    Rule(
        "init-from-dcp",
        "A distributed checkpoint says what its tensors are, and none of it is a pickle.",
        _dcp,
    ),
    Rule("init-from-family", "The base is of the family that the named contract is for.", _family),
    Rule("init-from-contract", "A packaged base is trained under the contract that it was made for.", _other_contract),
    Rule("init-from-weights", "The base's weights are whole safetensors files.", _weights),
    Rule("vae-missing", "Latents are decoded by a VAE, the base's own or a named one.", _vae),
    Rule(
        "media-shape", "An image is whole latents and patches, and no larger than the base has positions for.", _media
    ),
    Rule("decode-mode", "What is decoded by no VAE is neither sliced nor tiled.", _decode_mode),
    Rule("text-encoder-missing", "Prompts are read by the text encoders that come with the base.", _text_encoder),
    Rule("tokenizer-missing", "Prompts are read through a tokenizer, the base's own or a named one.", _tokenizer),
)
