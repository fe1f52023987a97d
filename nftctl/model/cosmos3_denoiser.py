"""Cosmos3's denoiser: the generation tower, reading a prompt's cached keys and values.

Built from diffusers' own modules under their own names, batched over samples and guidance branches; prompts of other
lengths in a batch keep their own positions, and their padding is never read: on a GPU in half precision the keys are
packed end to end, elsewhere they are masked; on a Hopper GPU or later prompts are filled up with repeats of their last
key, and what those add is taken off again. Latents have one frame or several, all of them noisy. Refuses shapes that do
not belong together.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import get_3d_mrope_ids_vae_tokens
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from nftctl.model import rows
from nftctl.model.adapters import reads_exact, together
from nftctl.model.cosmos3_encoder import PromptCache, rotate, split_heads
from nftctl.model.family import Conditioning, Denoiser, Reading
from nftctl.model.rows import Rounded
from nftctl.staging import send

# Of the whole transformer: heads for sound and action, which belong to neither tower.
OTHER_MODALITIES = ("audio_", "action_")


def patchify(x: Tensor, patch: int) -> Tensor:
    """[B, C, T, H, W] -> [B, T * h * w, patch * patch * C], zero-padded to whole patches, channel fastest."""
    x = F.pad(x, (0, -x.shape[-1] % patch, 0, -x.shape[-2] % patch))
    batch, channels, frames, height, width = x.shape
    x = x.reshape(batch, channels, frames, height // patch, patch, width // patch, patch)
    return x.permute(0, 2, 3, 5, 4, 6, 1).flatten(4).flatten(1, 3)


def unpatchify(tokens: Tensor, patch: int, shape: torch.Size) -> Tensor:
    """Inverse of `patchify`: crop to `shape` = [B, C, T, H, W]."""
    batch, channels, frames, height, width = shape
    rows, columns = -(-height // patch), -(-width // patch)
    x = tokens.reshape(batch, frames, rows, columns, patch, patch, channels)
    x = x.permute(0, 6, 1, 2, 4, 3, 5).reshape(batch, channels, frames, rows * patch, columns * patch)
    # Never a view: FSDP hangs its backward hook on what the denoiser returns.
    return x if x.shape == shape else x[..., :height, :width].contiguous()


# Later versions want to be told of grouped keys; earlier ones take them without a word.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

_LENGTHS = 256
"""The kernel is told the longest row in steps of this many keys, so that few prompts make a graph of their own."""


class Packing(NamedTuple):
    """Where the keys of a ragged batch of B rows lie when they are packed end to end, S in all.

    order    int64 [S], of the image's keys [B * N] and the padded prompts' [B * L], one behind the other, which to take
    own      int64 [B * N], where the image's keys are among the packed ones
    queries  int32 [B + 1], first query of every row
    keys     int32 [B + 1], first key of every row
    longest  no row has more keys
    """

    order: Tensor
    own: Tensor
    queries: Tensor
    keys: Tensor
    longest: int


_PADDED = 128
"""Prompts of recorded batches are padded to whole multiples of this, so that few lengths make a recording."""

_DENSE_SINCE = (9, 0)
"""Compute capability from which on cuDNN's dense kernel beats packed rows by more than its padding costs."""


def pack(lengths: tuple[int, ...], generated: int, device: torch.device, *, padded: int | None = None) -> Packing:
    """The packing of rows with `lengths` prompt tokens, padded to the longest, and `generated` image tokens each.

    `padded` says that they are padded to so many instead, and has S be B * (N + padded): the rest is never read.
    """
    batch, longest = len(lengths), padded or max(lengths)
    order, own, starts = [], [], [0]
    for row, length in enumerate(lengths):
        first = batch * generated + row * longest
        order += [torch.arange(first, first + length), torch.arange(row * generated, (row + 1) * generated)]
        own.append(torch.arange(starts[-1] + length, starts[-1] + length + generated))
        starts.append(starts[-1] + length + generated)
    if padded:
        order.append(torch.zeros(batch * (generated + padded) - starts[-1], dtype=torch.int64))
    return Packing(
        send(torch.cat(order), device),
        send(torch.cat(own), device),
        torch.arange(0, batch * generated + 1, generated, dtype=torch.int32, device=device),
        send(torch.tensor(starts, dtype=torch.int32), device),
        -(-(generated + longest) // _LENGTHS) * _LENGTHS,
    )


class _Packed(torch.autograd.Function):
    """The image's keys [B * N, ...] and the prompts' [B * L, ...] in packed order; only the former get a gradient.

    Every key is taken once, so the gradient is a gather too: plain indexing would add into it, in any order.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, prompt: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return torch.cat((own, prompt)).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None, None


def packs(keys: Tensor, head_dim: int) -> bool:
    """Whether the kernel for packed rows can take these keys."""
    half = keys.dtype in (torch.bfloat16, torch.float16)
    return keys.is_cuda and half and head_dim % 8 == 0 and head_dim <= 256 and not keys.requires_grad


def fills(keys: Tensor) -> bool:
    """Whether the dense kernel can take prompts' keys [..., kv_heads, L, D] that are filled up with repeats.

    Never in a deterministic run: it adds up gradients in any order. All velocities of a run come from one kernel, since
    they are set against one another.
    """
    if torch.are_deterministic_algorithms_enabled() or not packs(keys, keys.shape[-1]):
        return False
    if torch.cuda.get_device_capability(keys.device) < _DENSE_SINCE:
        return False
    one = keys.new_empty(1, keys.shape[-3], _PADDED, keys.shape[-1])
    return torch.backends.cuda.can_use_cudnn_attention(
        torch.backends.cuda.SDPAParams(one, one, one, None, 0.0, False, True)
    )


def fill(keys: Tensor, values: Tensor, lengths: tuple[int, ...], to: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [layers, B, kv_heads, L, D] of prompts with `lengths` tokens, filled up to `to` each.

    What is filled in is a row's last key, of which the value is zero; also returns how often, float32 [B, 1, 1].
    """
    length = torch.tensor(lengths)[:, None]
    place = torch.arange(to)
    which = send(torch.minimum(place, length - 1), keys.device)[None, :, None, :, None]
    true = send(place < length, keys.device)[None, :, None, :, None]
    filled = keys.gather(3, which.expand(*keys.shape[:3], to, keys.shape[-1]))
    padded = F.pad(values, (0, 0, 0, to - values.shape[-2]))
    return filled, torch.where(true, padded, 0), send((to - length).float()[..., None], keys.device)


class GenerationAttention(nn.Module):
    """The image's half of a stock attention: full attention over the prompt's keys and its own."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.head_dim = int(stock.head_dim)
        self.add_q_proj, self.add_k_proj, self.add_v_proj = stock.add_q_proj, stock.add_k_proj, stock.add_v_proj
        self.to_add_out = stock.to_add_out
        self.norm_added_q, self.norm_added_k = stock.norm_added_q, stock.norm_added_k

    def forward(
        self,
        x: Tensor | Rounded,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        packing: Packing | None,
        repeats: Tensor | None,
    ) -> Tensor:
        """x [B, N, width], rounded or not; keys and values [B, kv_heads, L, D] of the prompt -> [B, N, width]."""
        own = [self._heads(part) for part in together(x, self.add_q_proj, self.add_k_proj, self.add_v_proj)]
        own_q = rotate(self.norm_added_q(own[0]).transpose(1, 2), cos, sin)
        own_k = rotate(self.norm_added_k(own[1]).transpose(1, 2), cos, sin)
        own_v = own[2].transpose(1, 2)
        rounds = isinstance(x, Rounded)
        if repeats is not None:
            keeps = reads_exact(self.to_add_out)
            out = _filled(own_q, own_k, own_v, keys, values, repeats, keeps=keeps, rounds=rounds)
        else:
            if packing is None:
                out = _masked(own_q, torch.cat((keys, own_k), dim=2), torch.cat((values, own_v), dim=2), mask)
            else:
                packed = [_packed(own, prompt, packing) for own, prompt in ((own_k, keys), (own_v, values))]
                out = _ragged(own_q, packed[0], packed[1], packing)
            out = rows.rounded(out.flatten(2)) if rounds else out.flatten(2)
        projected: Tensor = self.to_add_out(out)
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.head_dim)


def _masked(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Heads first; returns [B, N, heads, D]."""
    if mask is not None:
        # Of CUDA's fused kernels the one that takes a mask wants as many key heads as query heads.
        repeats = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=mask is None)
    return out.transpose(1, 2)


class _Filled(torch.autograd.Function):
    """Attention over filled prompts and the image's own keys; queries and the latter two get gradients.

    What the repeats add to the denominators is taken off by `rows.true_share`. The kernel's backward computes shares
    anew, as e^(logit - lse), and takes what they are worth from out. Given the true out and the true lse it is exact
    for every true key; the repeats' keys are zeros by then, so whatever share it finds for them adds zero to the
    queries' gradient, and their own is not asked for.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, own_keys: Tensor, own_values: Tensor, keys: Tensor, values: Tensor, repeats: Tensor
    ) -> Tensor:
        every, worth = torch.cat((keys, own_keys), dim=2), torch.cat((values, own_values), dim=2)
        out, normaliser, *state = _dense(queries, every, worth)
        out, normaliser = rows.true_share(out, normaliser, queries, keys, repeats)
        ctx.save_for_backward(queries, every, worth, out, normaliser, repeats, *state)
        ctx.prompt = keys.shape[2]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, out, normaliser, repeats, *state = ctx.saved_tensors
        place = torch.arange(keys.shape[2], device=keys.device)
        repeated = (place >= ctx.prompt - repeats) & (place < ctx.prompt)
        keys = keys.masked_fill(repeated[..., None], 0)
        of_queries, of_keys, of_values = _dense_backward(grads[0], queries, keys, values, out, normaliser, state)
        return of_queries, of_keys[:, :, ctx.prompt :], of_values[:, :, ctx.prompt :], None, None, None


def _filled(
    queries: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    keys: Tensor,
    values: Tensor,
    repeats: Tensor,
    *,
    keeps: bool,
    rounds: bool,
) -> Tensor | Rounded:
    """Heads first; the prompts' last keys occur `repeats` [B, 1, 1] times too often. Returns [B, N, heads * D]."""
    if rounds or (rows.has_kernels(queries) and not torch.is_grad_enabled()):
        every, worth = torch.cat((keys, own_keys), dim=2), torch.cat((values, own_values), dim=2)
        out, normaliser, *_ = _dense(queries, every, worth)
        return rows.finished(out, normaliser, queries, keys, repeats, keeps=keeps, rounds=rounds)
    found: Tensor = _Filled.apply(queries, own_keys, own_values, keys, values, repeats)  # type: ignore[no-untyped-call]
    return found.transpose(1, 2).flatten(2)


def _dense(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Attention [B, heads, N, D] without a mask, and what the public function keeps to itself.

    That is the logarithm of each denominator, float32 [B, heads, N], and its generator's state, for a backward.
    """
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, normaliser, _, _, _, _, seed, offset, _ = attend(queries, keys, values, None, True)
    return out, normaliser.reshape(out.shape[:3]), seed, offset


def _dense_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, normaliser: Tensor, state: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from what the forward left."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lse, lengths = normaliser[..., None], (queries.shape[2], keys.shape[2])
    found: Any = attend(grad, queries, keys, values, out, lse, *state, None, None, None, *lengths, 0.0, False)
    return cast("tuple[Tensor, Tensor, Tensor]", found)


def _packed(own: Tensor, prompt: Tensor, packing: Packing) -> Tensor:
    """[B, kv_heads, N, D] and [B, kv_heads, L, D] -> [S, kv_heads, D]."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (own, prompt)]
    packed: Tensor = _Packed.apply(flat[0], flat[1], packing.order, packing.own)  # type: ignore[no-untyped-call]
    return packed


def _ragged(queries: Tensor, keys: Tensor, values: Tensor, packing: Packing) -> Tensor:
    """Heads first and whole rows of queries, packed keys and values; returns [B, N, heads, D]."""
    batch, _, generated, _ = queries.shape
    flat = queries.transpose(1, 2).flatten(0, 1)
    out: Any = varlen_attn(flat, keys, values, packing.queries, packing.keys, generated, packing.longest, **_GROUPED)
    return cast(Tensor, out).view(batch, generated, *out.shape[1:])


class GenerationLayer(nn.Module):
    """One layer of the image's tower: a unit of sharding and of compilation."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.self_attn = GenerationAttention(stock.self_attn)
        self.mlp_moe_gen = stock.mlp_moe_gen
        self.input_layernorm_moe_gen = stock.input_layernorm_moe_gen
        self.post_attention_layernorm_moe_gen = stock.post_attention_layernorm_moe_gen

    lowered = False
    """Whether its products are FP8's now, which take rows that come rounded."""

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor, *placing: Any) -> Tensor:
        """hidden [B, N, width] -> the same shape. `placing`: cosine, sine, mask, packing and repeats."""
        attn, mlp = self.self_attn, self.mlp_moe_gen
        x = self._normed(hidden, self.input_layernorm_moe_gen, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        hidden = hidden + attn(x, keys, values, *placing)
        if mlp.hidden_act != "silu":
            return hidden + mlp(self.post_attention_layernorm_moe_gen(hidden))
        x = self._normed(hidden, self.post_attention_layernorm_moe_gen, mlp.gate_proj, mlp.up_proj)
        return hidden + self._gated(mlp, x)

    def _normed(self, hidden: Tensor, norm: nn.Module, *readers: nn.Module) -> Tensor | Rounded:
        if self.lowered:
            return rows.normed(hidden, norm, keeps=reads_exact(*readers))
        normed: Tensor = norm(hidden)
        return normed

    def _gated(self, mlp: Any, x: Tensor | Rounded) -> Tensor:
        if not self.lowered:
            moved: Tensor = mlp(x)
            return moved
        gate, up = together(x, mlp.gate_proj, mlp.up_proj)
        rounded: Tensor = mlp.down_proj(rows.gated(gate, up, keeps=reads_exact(mlp.down_proj)))
        return rounded


class Cosmos3Denoiser(Denoiser):
    """The generation tower. Differentiable in its parameters and in the cache; shares them with `stock`."""

    fp32_modules = ("time_embedder",)
    # Along the prompt: keys, values, mask, and the order of a packing.
    open_dims: ClassVar = {(1,): 2, (2,): 2, (5,): 3, (6, 0): 0}
    fps: float = 24.0
    """Frames a second of what is made; places the frames of a base that modulates its positions by it."""

    def __init__(self, stock: Cosmos3OmniTransformer) -> None:
        super().__init__()
        config: Any = stock.config
        self.patch = int(config.latent_patch_size)
        self.channels = int(config.latent_channel)
        self.timestep_scale = float(config.timestep_scale)
        self.margin = int(config.unified_3d_mrope_temporal_modality_margin)
        self.reset_spatial = bool(config.unified_3d_mrope_reset_spatial_ids)
        self.base_fps = float(config.base_fps)
        self.modulated = bool(config.enable_fps_modulation)
        self.proj_in, self.proj_out = stock.proj_in, stock.proj_out
        self.time_proj, self.time_embedder = stock.time_proj, stock.time_embedder
        self.layers = nn.ModuleList(GenerationLayer(layer) for layer in stock.layers)
        self.norm_moe_gen = stock.norm_moe_gen
        self.rotary_emb = copy.deepcopy(stock.rotary_emb)
        self.forwards = 0
        mine = {id(module) for module in self.modules()}
        self.encoder_modules = frozenset(
            name
            for name, m in stock.named_modules()
            if isinstance(m, nn.Linear) and id(m) not in mine and not name.startswith(OTHER_MODALITIES)
        )

    @property
    def width(self) -> int:
        return int(self.proj_in.out_features)

    def tokens(self, latent_shape: tuple[int, int, int, int]) -> int:
        _, frames, height, width = latent_shape
        return frames * -(-height // self.patch) * -(-width // self.patch)

    def shard_units(self) -> list[nn.Module]:
        """The timestep embedder, which stays float32 beside a bfloat16 base, then every layer."""
        return [self.time_embedder, *self.layers]

    def compile_units(self) -> list[nn.Module]:
        return list(self.layers)

    def velocity(self, x: Tensor, sigma: Tensor, reading: Reading) -> Tensor:
        keys, values, cos, sin, mask, repeats, *packed = cast(tuple[Any, ...], reading)
        hidden = self.proj_in(patchify(x.to(self.proj_in.weight.dtype), self.patch))
        hidden = hidden + self._time(sigma).to(hidden.dtype)[:, None]
        placing = (cos, sin, mask, Packing(*packed) if packed else None, repeats)
        for layer, of_layer, values_of_layer in zip(self.layers, keys.unbind(), values.unbind(), strict=True):
            hidden = self.run(layer, hidden, of_layer, values_of_layer, *placing)
        return unpatchify(self.proj_out(self.norm_moe_gen(hidden)), self.patch, x.shape).float()

    def check(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> None:
        if x.dim() != 5 or x.shape[1] != self.channels or x.shape[2] < 1:
            raise ValueError(f"x must be [B, {self.channels}, T, H, W], got {tuple(x.shape)}")
        if sigma.shape != x.shape[:1] or conditioning.rows != x.shape[0]:
            raise ValueError(f"x has {x.shape[0]} rows, sigma {tuple(sigma.shape)}, conditioning {conditioning.rows}")

    def _time(self, sigma: Tensor) -> Tensor:
        scaled = sigma.float() * 1000.0 * self.timestep_scale
        dtype = next(self.time_embedder.parameters()).dtype
        return cast(Tensor, self.call(self.time_embedder, self.time_proj(scaled).to(dtype)))

    def reading(self, x: Tensor, conditioning: Conditioning, *, fixed: bool = False) -> Reading | None:
        """Keys, values, cosine and sine [B, 1, N, D], mask, repeats, and a packing's five parts, if there is one."""
        cache = cast(PromptCache, conditioning)
        dense = fills(cache.keys)
        key = (x.shape[2:], x.device, dense or fixed, dense)
        if key not in cache.memo:
            form = self._dense if dense else self._fixed if fixed else self._ragged_or_masked
            cache.memo[key] = form(x, cache)
        return cast("Reading | None", cache.memo[key])

    def _ragged_or_masked(self, x: Tensor, cache: PromptCache) -> Reading:
        tokens = self._image_tokens(x)
        mask, packing = cache.attention_mask(tokens), None
        if mask is not None and packs(cache.keys, cache.keys.shape[-1]):
            mask, packing = None, pack(cache.lengths, tokens, x.device)
        return (cache.keys, cache.values, *self._rope(cache.lengths, x), mask, None, *(packing or ()))

    def _dense(self, x: Tensor, cache: PromptCache) -> Reading:
        longest = max(cache.lengths)
        keys, values, repeats = fill(cache.keys, cache.values, cache.lengths, longest + -longest % _PADDED)
        return (keys, values, *self._rope(cache.lengths, x), None, repeats)

    def _fixed(self, x: Tensor, cache: PromptCache) -> Reading | None:
        if not packs(cache.keys, cache.keys.shape[-1]):
            return None
        short = -cache.keys.shape[-2] % _PADDED
        keys, values = (F.pad(part, (0, 0, 0, short)) for part in (cache.keys, cache.values))
        packing = pack(cache.lengths, self._image_tokens(x), x.device, padded=keys.shape[-2])
        return (keys, values, *self._rope(cache.lengths, x), None, None, *packing)

    def _image_tokens(self, x: Tensor) -> int:
        return self.tokens((x.shape[1], x.shape[2], x.shape[3], x.shape[4]))

    @torch.no_grad()
    def _rope(self, lengths: tuple[int, ...], x: Tensor) -> tuple[Tensor, Tensor]:
        frames, rows, columns = x.shape[2], -(-x.shape[3] // self.patch), -(-x.shape[4] // self.patch)
        # The image starts a fixed margin after its own prompt ends, so the frames' positions differ between rows. How
        # many frames a latent stands for is in both of upstream's rates, and cancels.
        ids = [
            get_3d_mrope_ids_vae_tokens(
                frames,
                rows,
                columns,
                length + self.margin,
                reset_spatial_indices=self.reset_spatial,
                fps=self.fps if self.modulated else None,
                base_fps=self.base_fps,
            )[0]
            for length in lengths
        ]
        positions = send(torch.stack(ids, dim=1), x.device)
        cos, sin = self.rotary_emb(position_ids=positions, device=x.device, dtype=self.proj_in.weight.dtype)
        return cos[:, None], sin[:, None]
