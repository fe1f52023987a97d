"""Stable Diffusion 3's prompt encoder: CLIP-L, CLIP-G and, where there is one, T5, run by diffusers' own pipeline.

All prompts get the same number of tokens, so a batch needs neither padding nor mask. Refuses encoders whose widths the
transformer does not read, tokenizers that make other ids than their encoder embeds, and files other than safetensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPTextModelWithProjection, T5EncoderModel

from nftctl.errors import CheckpointUnusable
from nftctl.model.family import Conditioning
from nftctl.model.remembered import CACHE_BYTES, RememberingEncoder
from nftctl.model.residence import InHostMemory, ReadAnew, Residence, forget
from nftctl.model.weights import load_component
from nftctl.tensorfile import TRANSFORMERS_STEM, weight_files

T5_TOKENS = 256
"""Tokens of the T5 part, as many as the pipeline's default; without T5 they are zeros, as upstream has it."""


@dataclass(frozen=True, eq=False)
class PromptEmbeds(Conditioning):
    """What the transformer reads of prompts: embeds [B, L, width] and pooled [B, pooled width].

    tail   how many of the last tokens are known to be equal, in every row: the zeros in place of a missing T5, or 1
    """

    embeds: Tensor
    pooled: Tensor
    tail: int = 1

    @property
    def rows(self) -> int:
        return self.embeds.shape[0]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.embeds.shape[1],) * self.rows

    @property
    def nbytes(self) -> int:
        return self.embeds.nbytes + self.pooled.nbytes

    @classmethod
    def batch(cls, parts: Sequence[Self]) -> Self:
        embeds, pooled = torch.cat([part.embeds for part in parts]), torch.cat([part.pooled for part in parts])
        return cls(embeds, pooled, min(part.tail for part in parts))


@dataclass(frozen=True)
class TextParts:
    """Text encoders, each with its tokenizer, in the pipeline's order. `t5` is None where the base or run has none."""

    clip_l: tuple[Any, Any]
    clip_g: tuple[Any, Any]
    t5: tuple[Any, Any] | None

    def encoders(self) -> list[Any]:
        """The encoders that there are."""
        return [pair[0] for pair in (self.clip_l, self.clip_g, self.t5) if pair is not None]


class Sd3PromptEncoder(RememberingEncoder[str, PromptEmbeds]):
    """The frozen encoders behind `StableDiffusion3Pipeline.encode_prompt`. A negative prompt is a prompt.

    `home` is `model.prompt_encoder`; wherever the encoders are to live, they are given on the device or in host memory.
    """

    def __init__(
        self,
        parts: TextParts,
        transformer: Any,
        device: torch.device,
        *,
        home: str = "resident",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(_residence(home, parts, device), cache_bytes)
        self.parts = parts
        for module in parts.encoders():
            module.requires_grad_(False).eval()
        t5, t5_tokenizer = parts.t5 or (None, None)
        pipeline: Any = StableDiffusion3Pipeline
        # Of the transformer it reads one number, the width of the zeros that stand in for a missing T5.
        self.pipeline = pipeline(
            transformer=transformer, scheduler=None, vae=None,
            text_encoder=parts.clip_l[0], tokenizer=parts.clip_l[1],
            text_encoder_2=parts.clip_g[0], tokenizer_2=parts.clip_g[1],
            text_encoder_3=t5, tokenizer_3=t5_tokenizer,
        )  # fmt: skip
        self.device = device

    def _key(self, prompt: str, negative: bool) -> str:
        return prompt

    def _bytes(self, prompt: str, negative: bool) -> int:
        read: Any = self.pipeline.transformer.config
        tokens = self.pipeline.tokenizer_max_length + T5_TOKENS
        return int(tokens * read.joint_attention_dim + read.pooled_projection_dim) * self.parts.clip_l[0].dtype.itemsize

    def _run(self, prompts: Sequence[str], negative: bool) -> list[PromptEmbeds]:
        return [self._embeds(prompt) for prompt in prompts]

    @torch.no_grad()
    def _embeds(self, prompt: str) -> PromptEmbeds:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=[prompt], prompt_2=None, prompt_3=None, device=self.device, do_classifier_free_guidance=False,
            max_sequence_length=T5_TOKENS,
        )  # fmt: skip
        return PromptEmbeds(embeds, pooled, tail=1 if self.parts.t5 else T5_TOKENS)


def _residence(home: str, parts: TextParts, device: torch.device) -> Residence:
    encoders = parts.encoders()
    if home == "offload":
        return InHostMemory(encoders, device)
    if home != "per-step":
        return Residence()
    sources = {encoder: (Path(encoder.name_or_path), encoder.dtype) for encoder in encoders}

    def read(encoder: nn.Module) -> None:
        folder, dtype = sources[encoder]
        fresh = load_component(type(encoder), folder, dtype=dtype).to(device)
        encoder.load_state_dict(fresh.state_dict(), assign=True)

    for encoder in encoders:
        for buffer in encoder.buffers():
            buffer.data = buffer.data.to(device)
        forget(encoder)
    files = [file for folder, _ in sources.values() for file in weight_files(folder, TRANSFORMERS_STEM)]
    return ReadAnew(encoders, read, files, device)


def load_text_parts(base: Path, *, t5: bool, dtype: torch.dtype, device: torch.device) -> TextParts:
    """The text encoders and tokenizers of a base folder; without the third pair where `t5` is false."""
    clip: Any = CLIPTextModelWithProjection
    return TextParts(
        _pair(base, "", clip, dtype, device),
        _pair(base, "_2", clip, dtype, device),
        _pair(base, "_3", T5EncoderModel, dtype, device) if t5 else None,
    )


def _pair(base: Path, suffix: str, model: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    encoder = load_component(model, base / f"text_encoder{suffix}", dtype=dtype).to(device)
    folder = base / f"tokenizer{suffix}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointUnusable(f"no tokenizer can be read from {folder}: {error}") from error
    if len(tokenizer) > encoder.config.vocab_size:
        raise CheckpointUnusable(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, its encoder embeds {encoder.config.vocab_size}",
            hint="take tokenizer and text encoder from the same base folder",
        )
    return encoder, tokenizer


def check_widths(parts: TextParts, transformer: Any, base: Path) -> None:
    """Refuse encoders that do not fit the transformer: upstream would crop wider embeddings without a word."""
    clips = [parts.clip_l[0].config, parts.clip_g[0].config]
    joint, pooled = int(transformer.joint_attention_dim), int(transformer.pooled_projection_dim)
    wrong = []
    if sum(clip.hidden_size for clip in clips) > joint:
        wrong.append(
            f"the CLIP encoders give {sum(clip.hidden_size for clip in clips)} numbers a token, at most {joint}"
        )
    if sum(clip.projection_dim for clip in clips) != pooled:
        wrong.append(f"the CLIP encoders pool {sum(clip.projection_dim for clip in clips)} numbers, not {pooled}")
    if parts.t5 is not None and parts.t5[0].config.d_model != joint:
        wrong.append(f"T5 gives {parts.t5[0].config.d_model} numbers a token, not {joint}")
    positions = min(clip.max_position_embeddings for clip in clips)
    if parts.clip_l[1].model_max_length > positions:
        wrong.append(
            f"the tokenizer pads to {parts.clip_l[1].model_max_length} tokens, the CLIP encoders read {positions}"
        )
    if wrong:
        raise CheckpointUnusable(f"{base}: the transformer cannot read these text encoders: {'; '.join(wrong)}")


def linear_names(parts: TextParts) -> frozenset[str]:
    """Names of the linear modules of the encoders, which no adapter may go into."""
    return frozenset(
        name
        for encoder in parts.encoders()
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear)
    )
