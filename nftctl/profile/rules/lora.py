"""Which modules the adapter may go into: those that the base's denoiser has, and none of the prompt encoder."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nftctl.profile.adapter import selected
from nftctl.profile.rules.rule import Facts, Problem, Rule
from nftctl.profile.targets import is_pattern, malformed

_LAYER = re.compile(r"(?:layers|transformer_blocks)\.(\d+|\*)\.")


def _nothing(facts: Facts) -> Iterator[Problem]:
    """Against the names in the base's headers; what no base of the family has is the contract's word."""
    modules, contract = facts.denoiser_modules, facts.contract
    if contract is None or facts.other_family or not facts.weights.shapes:
        return
    for target in facts.profile.model.lora.targets:
        allowed = contract.lora.in_denoiser(target) and not contract.lora.touches_prompt_encoder(target)
        if allowed and not selected(target, modules):
            does = "is in full" if is_pattern(target) else "ends"
            message = f'LoRA target "{target}" {does} no module\'s name in the denoiser of {facts.base.folder}'
            yield Problem("model.lora.targets", message, targets(facts))


def _scope(facts: Facts) -> Iterator[Problem]:
    if facts.contract is None:
        return
    for target in facts.profile.model.lora.targets:
        if found := facts.contract.lora.in_prompt_encoder(target):
            message = f'LoRA target "{target}" selects {found} of the prompt encoder, whose output is computed once'
            yield Problem("model.lora.targets", message, targets(facts))


def _pattern(facts: Facts) -> Iterator[Problem]:
    for target in facts.profile.model.lora.targets:
        if reason := malformed(target):
            message = f'LoRA target "{target}" is no regular expression: {reason}'
            help = "write '/regex/' for whole names, or the end of a name without slashes"
            yield Problem("model.lora.targets", message, help)


def _unused(facts: Facts) -> Iterator[Problem]:
    given = [
        key
        for key, origin in facts.resolved.origins.items()
        if key.startswith("model.lora.") and origin.source != "default"
    ]
    written = facts.resolved.path is not None  # a run that goes on has every key, whoever chose it
    if facts.profile.model.train == "full" and given and written:
        have = "has" if len(given) == 1 else "have"
        message = f'model.train = "full" trains all weights of the denoiser, so {", ".join(given)} {have} no effect'
        yield Problem("model.train", message, 'remove model.lora, or set model.train = "lora"')


def targets(facts: Facts) -> str:
    """The targets that exist: as the base's headers list them, else as the contract does."""
    modules = facts.denoiser_modules
    if not modules:
        names = facts.contract.lora.denoiser if facts.contract else ()
        return f"the denoiser has {', '.join(_LAYER.sub('', name) for name in names)}"
    layers = {int(found[1]) for name in modules if (found := _LAYER.match(name))}
    inside = dict.fromkeys(_LAYER.sub("", name) for name in sorted(modules) if _LAYER.match(name))
    outside = [name for name in sorted(modules) if not _LAYER.match(name)]
    text = ", ".join([*inside, *outside])
    return f"the denoiser has {text}" + (f"; layers 0 to {max(layers)}" if layers else "")


RULES = (
    Rule("lora-pattern", "A LoRA target between slashes is a regular expression on whole module names.", _pattern),
    Rule("lora-matches-nothing", "Every LoRA target is the name of a module that the base has.", _nothing),
    Rule("lora-touches-prompt-encoder", "An adapted prompt encoder would make its cached output stale.", _scope),
    Rule("lora-unused", "What configures an adapter says nothing where none is trained.", _unused, "warning"),
)
