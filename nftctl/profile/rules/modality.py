"""What is generated: the modality, and the named text-to-image contract that an image run is held to."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace

from nftctl.profile.rules.lora import targets
from nftctl.profile.rules.rule import Facts, Problem, Rule
from nftctl.profile.t2i import T2I_PROFILES
from nftctl.profile.targets import malformed

_SUPPORTED = f"supported: {', '.join(T2I_PROFILES)}"


def _video(facts: Facts) -> Iterator[Problem]:
    if facts.profile.rl.modality == "video":
        left_out = " (the default)" if facts.modality_left_out else ""
        message = f'rl.modality = "video"{left_out} is not in this release'
        yield Problem("rl.modality", message, 'rl.modality = "image"')


def _video_profile(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    if rl.modality == "video" and not facts.modality_left_out and rl.profile:
        message = f'rl.profile must be empty for video, got "{rl.profile}"'
        yield Problem("rl.profile", message, against=("rl.modality",))


def _skip_keys_video(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    if rl.modality == "video" and not facts.modality_left_out and rl.init_keys_to_skip_loading:
        yield Problem("rl.init_keys_to_skip_loading", "rl.init_keys_to_skip_loading must be empty for video")


def _missing(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    if rl.modality == "image" and not rl.profile:
        yield Problem("rl.profile", "rl.profile must name a text-to-image contract", _SUPPORTED)


def _unknown(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    if rl.modality == "image" and rl.profile and facts.contract is None:
        close = difflib.get_close_matches(rl.profile, T2I_PROFILES, n=1)
        help = f"did you mean {close[0]}? {_SUPPORTED}" if close else _SUPPORTED
        yield Problem("rl.profile", f'rl.profile = "{rl.profile}" is not a known text-to-image contract', help)


def _contradicted(facts: Facts) -> Iterator[Problem]:
    return (replace(problem, against=("rl.profile",)) for problem in _outside(facts))


def _outside(facts: Facts) -> Iterator[Problem]:
    contract, rl, model = facts.contract, facts.profile.rl, facts.profile.model
    if contract is None:
        return
    says = f'the contract "{contract.name}" allows'
    smallest, largest, multiple = contract.sides
    for key, side in (("model.height", model.height), ("model.width", model.width)):
        if not smallest <= side <= largest or side % multiple:
            allowed = f"{smallest}" if smallest == largest else f"multiples of {multiple} from {smallest} to {largest}"
            nearest = round(min(max(side, smallest), largest) / multiple) * multiple
            yield Problem(key, f"{says} {allowed} for {key}, got {side}", f"the nearest is {key} = {nearest}")
    for key, value, (low, high) in (
        ("rl.sample_steps", rl.sample_steps, contract.sample_steps),
        ("rl.sampler_shift", rl.sampler_shift, contract.sampler_shift),
        ("rl.guidance", rl.guidance, contract.guidance),
    ):
        if not low <= value <= high:
            help = f"the nearest is {key} = {min(max(value, low), high):g}"
            yield Problem(key, f"{says} {low:g} to {high:g} for {key}, got {value:g}", help)
    if model.dtype not in contract.dtypes:
        message = f'{says} {" or ".join(contract.dtypes)} for model.dtype, got "{model.dtype}"'
        yield Problem("model.dtype", message, f'model.dtype = "{contract.dtypes[0]}"')
    for key, on in (
        ("model.system_prompt", model.system_prompt),
        ("model.resolution_template", model.resolution_template),
    ):
        if on and not contract.templates:
            yield Problem(key, f"{says} only false for {key}: prompts are read as they are", f"{key} = false")
    if contract.text_parts and model.tokenizer:
        message = f"{says} no model.tokenizer: the tokenizers come with the text encoders of rl.init_from"
        yield Problem("model.tokenizer", message, "remove the key")
    if not contract.text_parts and not model.t5:
        yield Problem("model.t5", f"{says} only true for model.t5: its bases have no T5", "remove the key")
    for target in model.lora.targets:
        known = contract.lora.in_denoiser(target) or contract.lora.touches_prompt_encoder(target)
        if not known and not malformed(target):
            yield Problem("model.lora.targets", f'{says} no LoRA target "{target}"', targets(facts))
    if not model.lora.targets:
        yield Problem("model.lora.targets", f"{says} no empty list of LoRA targets", targets(facts))


def _shift(facts: Facts) -> Iterator[Problem]:
    contract, rl, model = facts.contract, facts.profile.rl, facts.profile.model
    if contract is None or not contract.sampler_shift[0] <= rl.sampler_shift <= contract.sampler_shift[1]:
        return
    short = min(model.height, model.width)
    own = contract.shift_for(short)
    if own is not None and own != rl.sampler_shift:
        tiers = ", ".join(f"{shift:g} at {side}" for side, shift in contract.shifts)
        known = f" (its sizes: {tiers})" if len(contract.shifts) > 1 else ""
        message = (
            f"rl.sampler_shift = {rl.sampler_shift:g}, and this family's own is {own:g} for a short side of {short}"
        )
        yield Problem("rl.sampler_shift", message + known, f"rl.sampler_shift = {own:g}, unless the other is meant")


RULES = (
    Rule("video-not-in-release", "This release generates images only.", _video),
    Rule("video-profile", "Video takes no text-to-image contract.", _video_profile),
    Rule("skip-keys-video", "The video contract loads the whole base.", _skip_keys_video),
    Rule("rl-profile-missing", "An image run names the contract it is held to.", _missing),
    Rule("rl-profile-unknown", "An image run names a contract that exists.", _unknown),
    Rule("rl-profile-contradicted", "No value lies outside what the named contract allows.", _contradicted),
    Rule("shift-for-size", "A family is sampled with the shift that it learned at that size.", _shift, "warning"),
)
