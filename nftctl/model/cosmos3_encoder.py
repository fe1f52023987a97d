"""Cosmos3's prompt encoder: the understanding tower, run once per prompt, leaves per-layer keys and values.

The tower reads the prompt causally and never sees latents or timesteps, so what the generation tower needs of it is a
function of the prompt alone. Prompts may pass it unit by unit, the embedding and then each layer, where the weights of
no more than one unit are to be there. Built from diffusers' own modules. Refuses token ids that the embedding lacks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from torch import Tensor, nn

from nftctl.errors import CheckpointUnusable
from nftctl.model.family import Conditioning
from nftctl.model.remembered import CACHE_BYTES, RememberingEncoder
from nftctl.model.residence import Residence


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [B, heads, N, D] with cos and sin [B or 1, 1, N, D], halves paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, N, heads * D] -> [B, N, heads, D]."""
    return x.view(*x.shape[:-1], -1, head_dim)


@dataclass(frozen=True, eq=False)
class PromptCache(Conditioning):
    """Keys (normed for generation, roped) and values of every layer: [layers, B, kv_heads, L, head_dim] each.

    Row b holds `lengths[b]` true positions; what is beyond them is never attended to.
    """

    keys: Tensor
    values: Tensor
    lengths: tuple[int, ...]
    memo: dict[object, object] = field(default_factory=dict, repr=False)
    """Positions and masks that depend on the lengths and the grid alone, computed once per batch."""

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.lengths

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @classmethod
    def batch(cls, parts: Sequence[Self]) -> Self:
        longest = max(part.keys.shape[-2] for part in parts)
        padded = [
            (
                F.pad(p.keys, (0, 0, 0, longest - p.keys.shape[-2])),
                F.pad(p.values, (0, 0, 0, longest - p.values.shape[-2])),
            )
            for p in parts
        ]
        keys, values = (torch.cat(tensors, dim=1) for tensors in zip(*padded, strict=True))
        return cls(keys, values, tuple(n for part in parts for n in part.lengths))

    def attention_mask(self, generated: int) -> Tensor | None:
        """Bool [B, 1, 1, L + generated], True where a key may be read; None when every row fills its keys."""
        longest = self.keys.shape[-2]
        if all(length == longest for length in self.lengths):
            return None
        lengths = torch.tensor(self.lengths, device=self.keys.device)
        prompt = torch.arange(longest, device=self.keys.device) < lengths[:, None]
        return F.pad(prompt, (0, generated), value=True)[:, None, None, :]


class UnderstandingAttention(nn.Module):
    """The prompt's half of a stock attention: projections, norms and causal self-attention."""

    def __init__(self, stock: Any, *, last: bool) -> None:
        super().__init__()
        self.head_dim = int(stock.head_dim)
        self.to_k, self.to_v, self.norm_k = stock.to_k, stock.to_v, stock.norm_k
        self.k_norm_und_for_gen = stock.k_norm_und_for_gen
        if not last:
            self.to_q, self.to_out, self.norm_q = stock.to_q, stock.to_out, stock.norm_q

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys for the prompt itself, keys for the generation tower, and values: [B, kv_heads, L, D] each."""
        keys = self.norm_k(split_heads(self.to_k(x), self.head_dim)).transpose(1, 2)
        values = split_heads(self.to_v(x), self.head_dim).transpose(1, 2)
        own = rotate(keys, cos, sin)
        if self.k_norm_und_for_gen is None:
            return own, own, values
        return own, rotate(self.k_norm_und_for_gen(keys), cos, sin), values

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        queries = self.norm_q(split_heads(self.to_q(x), self.head_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(rotate(queries, cos, sin), keys, values, is_causal=True, enable_gqa=True)
        projected: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return projected


class UnderstandingLayer(nn.Module):
    """One layer of the prompt's tower. The last one only leaves keys and values: its output reaches no pixel."""

    def __init__(self, stock: Any, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.self_attn = UnderstandingAttention(stock.self_attn, last=last)
        self.input_layernorm = stock.input_layernorm
        if not last:
            self.mlp, self.post_attention_layernorm = stock.mlp, stock.post_attention_layernorm

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [B, L, width] -> the next hidden, and this layer's keys and values for the generation tower."""
        x = self.input_layernorm(hidden)
        own, keys, values = self.self_attn.keys_values(x, cos, sin)
        if self.last:
            return hidden, keys, values
        hidden = hidden + self.self_attn.attend(x, own, values, cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), keys, values


@dataclass(eq=False)
class Passage:
    """A batch of prompts on its way through the layers, and what those behind it have left."""

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    lengths: tuple[int, ...]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def through(self, layer: nn.Module) -> None:
        self.hidden, keys, values = layer(self.hidden, self.cos, self.sin)
        self.keys.append(keys)
        self.values.append(values)

    def cache(self) -> PromptCache:
        """What all layers left, which is held here no longer: of many prompts, only one is there twice at a time."""
        keys, self.keys = torch.stack(self.keys), []
        values, self.values = torch.stack(self.values), []
        return PromptCache(keys, values, self.lengths)


class UnderstandingTower(nn.Module):
    """Token ids -> PromptCache. Differentiable; shares parameters with the stock transformer it is made from."""

    def __init__(self, stock: Cosmos3OmniTransformer) -> None:
        super().__init__()
        count = len(stock.layers)
        self.embed_tokens = stock.embed_tokens
        self.layers = nn.ModuleList(UnderstandingLayer(s, last=i == count - 1) for i, s in enumerate(stock.layers))
        self.rotary_emb = copy.deepcopy(stock.rotary_emb)

    @property
    def units(self) -> tuple[nn.Module, ...]:
        """Modules that hold all parameters, in the order in which a prompt passes them."""
        return (self.embed_tokens, *self.layers)

    def bytes_per_token(self) -> int:
        """What the cache of a prompt holds per token."""
        layers: Any = self.layers
        weights = [w for layer in layers for w in (layer.self_attn.to_k.weight, layer.self_attn.to_v.weight)]
        return sum(weight.shape[0] * weight.itemsize for weight in weights)

    def forward(self, tokens: Tensor, lengths: Sequence[int]) -> PromptCache:
        """Run tokens [B, L] (int64, right-padded with any id) whose rows have `lengths` true tokens.

        Causal attention lets no true position see the padding behind it, so padding needs no mask here.
        """
        return self._pass([(tokens, lengths)], lambda unit: nullcontext())[0]

    def run(self, prompts: Sequence[Sequence[int]]) -> PromptCache:
        """Pad lists of token ids to the longest and run them as one batch, with gradients if they are enabled."""
        tokens, lengths = self._padded(prompts)
        cache: PromptCache = self(tokens, lengths)
        return cache

    def run_each(
        self, prompts: Sequence[Sequence[int]], unit: Callable[[nn.Module], AbstractContextManager[None]]
    ) -> list[PromptCache]:
        """Run each list of token ids alone, but all of them through one unit before any goes on to the next.

        `unit` has the weights of the unit that it is given there, which need not be elsewhere.
        """
        return self._pass([self._padded([ids]) for ids in prompts], unit)

    def _pass(
        self,
        batches: Sequence[tuple[Tensor, Sequence[int]]],
        unit: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> list[PromptCache]:
        with unit(self.embed_tokens):
            passages = [self._start(tokens, lengths) for tokens, lengths in batches]
        for layer in self.layers:
            with unit(layer):
                for passage in passages:
                    passage.through(layer)
        return [passage.cache() for passage in passages]

    def _start(self, tokens: Tensor, lengths: Sequence[int]) -> Passage:
        hidden = self.embed_tokens(tokens.to(self.embed_tokens.weight.device))
        # Text counts 0, 1, 2, ... on the three rope axes alike.
        positions = torch.arange(tokens.shape[1], device=hidden.device).expand(3, 1, -1)
        cos, sin = self.rotary_emb(position_ids=positions, device=hidden.device, dtype=hidden.dtype)
        return Passage(hidden, cos[:, None], sin[:, None], tuple(int(n) for n in lengths))

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Tokens [B, L] in host memory, and how many of each row are true."""
        limit = self.embed_tokens.num_embeddings
        for ids in prompts:
            if not ids or not all(0 <= token < limit for token in ids):
                raise CheckpointUnusable(
                    f"the tokenizer gave {list(ids)[:8]}..., but the transformer embeds ids 0 to {limit - 1}",
                    hint="take tokenizer and transformer from the same base folder",
                )
        longest = max(len(ids) for ids in prompts)
        rows = [[*ids, *[0] * (longest - len(ids))] for ids in prompts]
        return torch.tensor(rows, dtype=torch.long), [len(ids) for ids in prompts]


class Cosmos3PromptEncoder(RememberingEncoder[tuple[str, bool], PromptCache]):
    """The frozen tower behind a tokenizer. Where its weights come and go, they do so unit by unit."""

    def __init__(
        self,
        tower: UnderstandingTower,
        tokenize: Callable[[str, bool], list[int]],
        *,
        residence: Residence | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(residence or Residence(), cache_bytes)
        self.tower = tower.requires_grad_(False)
        self.tokenize = tokenize

    def check(self, prompt: str, *, negative: bool = False) -> None:
        """Refuse a prompt that the chat template refuses."""
        self.tokenize(prompt, negative)

    def _key(self, prompt: str, negative: bool) -> tuple[str, bool]:
        return prompt, negative

    def _bytes(self, prompt: str, negative: bool) -> int:
        return len(self.tokenize(prompt, negative)) * self.tower.bytes_per_token()

    @torch.no_grad()
    def _run(self, prompts: Sequence[str], negative: bool) -> list[PromptCache]:
        return self.tower.run_each([self.tokenize(prompt, negative) for prompt in prompts], self._residence.unit)
