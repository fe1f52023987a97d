"""Prompt text -> token ids, by the chat template and the templates of diffusers' own Cosmos3 pipeline.

Owns the choice of system prompt and resolution sentence. Refuses a tokenizer without chat template, end token or
start-of-image token, and a prompt that the chat template itself refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline
from jinja2 import TemplateError
from transformers import AutoTokenizer

from nftctl.errors import CheckpointUnusable, Finding, ProfileRefused

# Untyped classes of diffusers.
_WAN: Any = AutoencoderKLWan
_PIPELINE: Any = Cosmos3OmniPipeline

START_OF_IMAGE = "<|vision_start|>"
MOST_SHOWN = 80
"""Characters of a refused prompt that its message repeats."""


def load_tokenizer(folder: Path) -> Any:
    """Load a transformers tokenizer from a local folder and check that Cosmos3 can use it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointUnusable(f"no tokenizer can be read from {folder}: {error}") from error
    missing = [
        what
        for what, there in (
            ("a chat template", tokenizer.chat_template is not None),
            ("an end-of-sequence token", tokenizer.eos_token_id is not None),
            (f"the token {START_OF_IMAGE}", START_OF_IMAGE in tokenizer.get_vocab()),
        )
        if not there
    ]
    if missing:
        raise CheckpointUnusable(f"the tokenizer in {folder} has not {', not '.join(missing)}")
    return tokenizer


class Cosmos3Tokens:
    """Callable (prompt, negative) -> token ids of one image prompt at one resolution."""

    def __init__(
        self, tokenizer: Any, *, height: int, width: int, system_prompt: bool, resolution_template: bool
    ) -> None:
        # The pipeline asks its VAE for statistics that tokenizing never touches; a meta one costs nothing.
        with torch.device("meta"):
            vae = _WAN(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
        self.pipeline = _PIPELINE(
            transformer=None, text_tokenizer=tokenizer, vae=vae, scheduler=None, enable_safety_checker=False
        )
        self.options = {
            "num_frames": 1,
            "height": height,
            "width": width,
            "use_system_prompt": system_prompt,
            "add_resolution_template": resolution_template,
        }

    def __call__(self, prompt: str, negative: bool) -> list[int]:
        """Token ids of `prompt`; the negative branch states the resolution in its negated form."""
        try:
            positive_ids, negative_ids = self.pipeline.tokenize_prompt(prompt, prompt, **self.options)
        except TemplateError as error:
            raise self._refused(prompt, negative, str(error)) from None
        return [int(token) for token in (negative_ids if negative else positive_ids)]

    def _refused(self, prompt: str, negative: bool, words: str) -> ProfileRefused:
        if not self.options["add_resolution_template"]:
            # The tiny base's template cannot see that its first advice is followed already.
            words = words.replace("set model.resolution_template = false; ", "")
        # Both packaged templates say so, and their text is part of what a run was trained on.
        words = words.replace("the tiny base", "this base")
        shown = prompt if len(prompt) <= MOST_SHOWN else prompt[:MOST_SHOWN] + "..."
        message = f'the base\'s tokenizer refuses the prompt "{shown}": {words}'
        key = "rl.negative_prompt" if negative else "data.prompt_file"
        return ProfileRefused([Finding("prompt-refused", key, message)], message=message)
