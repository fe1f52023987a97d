"""Whether the packaged scorers that a profile names can judge what its run will send them, before there is a run.

Owns the one rule of preflight that needs the scorers' own reading of a prompt. A scorer's module is imported only where
prompts are others than those it was made for. Silent about services, which alone know what they can judge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nftctl.profile.artifacts import EMBEDDED_SETS
from nftctl.profile.rules.rule import Facts, Problem, PromptFile, Rule
from nftctl.profile.schema import Model

MADE_FOR = {"tiny_digits": "digits", "scenes": "scenes", "colour_shape": "scenes"}
"""Scorer -> the packaged set whose every prompt it can judge."""
SIDES = {"tiny_digits": 8, "scenes": 32}
"""Scorer -> the only side, in pixels, of images that it judges."""


def _unfit(facts: Facts) -> Iterator[Problem]:
    """Told once for each scorer and prompt file, at the first prompt that it would refuse."""
    reward, judges = facts.profile.reward.providers, facts.profile.eval.providers
    files = {file.key: file for file in facts.prompt_files}
    asked = [("reward", reward, "data.prompt_file")]
    asked += [("eval", judges, "eval.prompt_file")] if judges else [("reward", reward, "eval.prompt_file")]
    problems = (
        problem
        for table, providers, name in asked
        for index, provider in enumerate(providers if name in files else ())
        if provider.kind == "embedded"
        for problem in _refused(f"{table}.providers.{index}.scorer", provider.scorer, files[name], facts.profile.model)
    )
    yield from dict.fromkeys(problems)  # a wrong size is the same one for both files


def _refused(key: str, scorer: str, file: PromptFile, model: Model) -> Iterator[Problem]:
    says, side = f'{key} = "{scorer}"', SIDES.get(scorer)
    refused = _refused_prompts(scorer, file)
    if refused:
        line, reason, _ = refused[0]
        kind = "reward_prompt" if all(own for _, _, own in refused) else "prompt"
        count = f"{len(refused)} of the {len(file.rows)} {kind}s" if len(refused) > 1 else f"a {kind}"
        made = [name for name, packaged in MADE_FOR.items() if EMBEDDED_SETS[packaged] == file.path.parent]
        help = f"these are prompts for {' or '.join(made)}" if made else "another scorer, or other prompts"
        at = None if made else (str(file.path), line, 1)
        yield Problem(
            key, f"{says} cannot judge {count} of {file.key}; line {line}: {reason}", help, at, (file.key, "rl.profile")
        )
    elif side is not None and (model.width, model.height) != (side, side):
        message = f"{says} judges images of {side}x{side} pixels, and this profile makes {model.width}x{model.height}"
        yield Problem(key, message, "another scorer", against=("model.height", "model.width", "rl.profile"))


def _refused_prompts(scorer: str, file: PromptFile) -> list[tuple[int, str, bool]]:
    """Line and reason of each prompt that the scorer refuses, and whether it is a `reward_prompt` of its own."""
    made_for = EMBEDDED_SETS.get(MADE_FOR.get(scorer, ""))
    read = None if file.path.parent == made_for else _reader(scorer)
    if read is None:
        return []
    refused = []
    for line, prompt in file.rows:
        own = prompt.reward_text != prompt.text
        try:
            read(prompt.reward_text)
        except ValueError as error:
            reason = re.sub(r"\b(the|a) prompt\b", r"\1 reward_prompt", str(error), count=1) if own else str(error)
            refused.append((line, reason, own))
    return refused


def _reader(scorer: str) -> Callable[[str], object] | None:
    """What raises ValueError for a prompt that the scorer refuses; None for one that takes any."""
    if scorer == "tiny_digits":
        from nftctl.reward.scorers import tiny_digits

        return tiny_digits.parse_prompt
    if scorer in ("scenes", "colour_shape"):
        from nftctl.reward.scorers.scene import grammar

        return grammar.parse_prompt
    if scorer == "ocr":
        from nftctl.reward.scorers import ocr

        return ocr.quoted_text
    return None


RULE = Rule("reward-scorer-unfit", "A packaged scorer can judge the prompts and images that it is sent.", _unfit)
