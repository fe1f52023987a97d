"""Which prompts are trained on, tuned by and tested by: three lists that have no prompt in common.

The test split is the profile's held-out file. The tuning split is the packaged one where the training prompts are
packaged and have one, else it is taken out of the training file at even distances, and trained on by nobody, neither
while settings are chosen nor afterwards. Refuses files that overlap or are too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.artifacts import embedded_set
from nftctl.profile.prompts import Prompt, read_prompts, resolve_prompt_file
from nftctl.profile.schema import Profile

Split = Literal["tuning", "test"]
TUNING_FILE = "prompts_tuning.txt"
"""The tuning split of a packaged set that has one."""
TUNING_SHARE = 6
"""One of so many training prompts is tuned by, at most `MOST_TUNING`."""
MOST_TUNING = 24


@dataclass(frozen=True, slots=True)
class Splits:
    """Prompts by what they are for."""

    train: list[Prompt]
    tuning: list[Prompt]
    test: list[Prompt]

    def held_out(self, split: Split) -> list[Prompt]:
        """The prompts that a run is looked at with."""
        return self.test if split == "test" else self.tuning


def split_prompts(profile: Profile) -> Splits:
    """Cut the profile's two prompt files. Raises ProfileRefused."""
    if not profile.eval.prompt_file:
        raise _refused("eval.prompt_file", "there are no held-out prompts to test with", "name a file of prompts")
    given = read_prompts(resolve_prompt_file(profile.data.prompt_file, "train"))
    test = read_prompts(resolve_prompt_file(profile.eval.prompt_file, "test"))
    _refuse_shared(given, test, "held-out prompts are trained on as well", "eval.prompt_file")
    packaged = embedded_set(profile.data.prompt_file)
    if packaged is not None and (packaged / TUNING_FILE).is_file():
        tuning = read_prompts(packaged / TUNING_FILE)
        for others, where in ((given, "trained on"), (test, "tested")):
            _refuse_shared(others, tuning, f"prompts of {TUNING_FILE} are {where} as well", "data.prompt_file")
        return Splits(given, tuning, test)
    count = min(MOST_TUNING, len(given) // TUNING_SHARE)
    if not count:
        message = f"{len(given)} prompts are too few: one of {TUNING_SHARE} is kept for tuning"
        raise _refused("data.prompt_file", message, "name a longer file")
    return Splits(*_cut(given, count), test)


def _refuse_shared(prompts: Sequence[Prompt], others: Sequence[Prompt], what: str, key: str) -> None:
    found = {prompt.text for prompt in others}
    if shared := [prompt.text for prompt in prompts if prompt.text in found]:
        raise _refused(key, f"{len(shared)} {what}, {shared[0][:60]!r} for one", "take them out of data.prompt_file")


def _cut(given: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """What is left, and `count` prompts at even distances; a prompt that is there twice is on one side alone."""
    chosen = {given[(2 * i + 1) * len(given) // (2 * count)].text for i in range(count)}
    tuning = list({prompt.text: prompt for prompt in given if prompt.text in chosen}.values())
    return [prompt for prompt in given if prompt.text not in chosen], tuning


def _refused(key: str, message: str, help: str) -> ProfileRefused:
    return ProfileRefused([Finding("learning-prompts", key, message, help=help)])
