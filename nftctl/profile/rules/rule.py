"""What a rule is, and the facts it may look at.

Rules run independently, so each says exactly what is its own and stays silent where another rule has the word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.adapter import denoiser_modules
from nftctl.profile.artifacts import (
    EMBEDDED_SETS,
    Base,
    Weights,
    embedded_set,
    inspect_base,
    known_words,
    local,
    unknown_set,
)
from nftctl.profile.load import Resolved
from nftctl.profile.prompts import MISSING, Prompt, read_rows, resolve_prompt_file
from nftctl.profile.schema import Profile
from nftctl.profile.t2i import T2I_PROFILES, T2iProfile

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a rule has against one key. `at` points into another file than the profile: (file, line, column).

    `against` are keys whose values make that of `key` wrong: where one of them was typed beside the profile and `key`
    was not, the finding is at the one that was typed.
    """

    key: str
    message: str
    help: str = ""
    at: tuple[str, int | None, int | None] | None = None
    against: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A code, the reason for it in one sentence, and the function that looks."""

    code: str
    reason: str
    function: Callable[[Facts], Iterable[Problem]]
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A prompt file as read: its prompts, or what is wrong with it.

    rows    line number and prompt of every line that is one, also where others are wrong
    """

    key: str
    path: Path
    rows: list[tuple[int, Prompt]]
    findings: list[Finding]

    @property
    def prompts(self) -> list[Prompt]:
        """What a run would read; none where a line is wrong."""
        return [] if self.findings else [prompt for _, prompt in self.rows]


class Facts:
    """The resolved profile and what lies where it points, each file read at most once per preflight."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.profile: Profile = resolved.profile

    @property
    def contract(self) -> T2iProfile | None:
        """The named text-to-image contract, if the name is known."""
        return T2I_PROFILES.get(self.profile.rl.profile)

    @property
    def modality_left_out(self) -> bool:
        """Whether `video` is only the default; then nothing that follows from it is the person's fault."""
        return self.resolved.origins["rl.modality"].source == "default"

    @cached_property
    def base(self) -> Base:
        """What `rl.init_from` names."""
        return inspect_base(self.profile.rl.init_from)

    @cached_property
    def weights(self) -> Weights:
        """The base's transformer by its headers; empty, without a reason, where there is none that a run would read."""
        readable = self.base.kind in ("diffusers", "dcp") and not self.base.is_pickled
        return self.base.weights() if readable else Weights()

    @cached_property
    def denoiser_modules(self) -> dict[str, tuple[int, int]]:
        """Linear modules of the base's denoiser, name -> (out, in); empty where they cannot be known."""
        return denoiser_modules(self.weights.shapes, self.contract.lora) if self.contract else {}

    @property
    def other_family(self) -> bool:
        """Whether the base declares a transformer that the contract is not for; then nothing else in it is judged."""
        found = self.base.transformer_class()
        return bool(found) and self.contract is not None and found != self.contract.transformer

    @property
    def other_set(self) -> str:
        """The packaged set whose base `rl.init_from` names although the contract is not for it; else empty."""
        folder = embedded_set(self.profile.rl.init_from)
        name = next((name for name, known in EMBEDDED_SETS.items() if known == folder), "")
        return "" if self.contract is None or self.contract.embedded == name else name

    @cached_property
    def words(self) -> tuple[str, ...]:
        """All words that prompts may have; empty where the base's tokenizer takes any, or cannot be looked at."""
        # Contracts without a packaged set are for bases that read all there is to write: megabytes, read for nothing.
        if self.contract is None or not self.contract.embedded or self.other_set:
            return ()
        given = self.profile.model.tokenizer
        names = [local(given)] if given else [self.base.folder / part for part in ("tokenizer", "text_tokenizer")]
        return next(filter(None, map(known_words, names)), ())

    @property
    def text_parts(self) -> list[tuple[str, str]]:
        """Folders of the text encoders that the run uses, with their tokenizers'."""
        if self.contract is None or self.other_family:
            return []
        return self.base.used_text_parts(self.contract.text_parts, t5=self.profile.model.t5)

    @cached_property
    def prompt_files(self) -> list[PromptFile]:
        """The training prompts and, if there are any, the evaluation prompts."""
        files = []
        if self.profile.data.prompt_file:
            files.append(_read("data.prompt_file", self.profile.data.prompt_file, "train"))
        if self.profile.eval.prompt_file:
            files.append(_read("eval.prompt_file", self.profile.eval.prompt_file, "test"))
        return files


def _read(key: str, value: str, split: Literal["train", "test"]) -> PromptFile:
    path = resolve_prompt_file(value, split)
    reason, help = unknown_set(value)
    if reason:
        return PromptFile(key, path, [], [Finding(MISSING, key, reason, help, origin=value)])
    try:
        return PromptFile(key, path, *read_rows(path))
    except ProfileRefused as refused:
        return PromptFile(key, path, [], refused.findings)
