"""What a Cosmos3 transformer costs: its towers by tensor name, and what one generation layer keeps for the backward.

Returns None rather than guess where a base does not say its own geometry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nftctl.profile.adapter import Modules, Shapes
from nftctl.profile.anatomy import ITEM_BYTES, Anatomy, tensor_bytes
from nftctl.profile.artifacts import Base, Weights
from nftctl.profile.schema import Model, Profile

_TIMESTEP = 256  # sines and cosines of a timestep
_TEMPLATE_TOKENS = 64  # a system prompt and a resolution sentence, about

_LAYER = re.compile(r"layers\.(\d+)\.")
_IN_DENOISER = re.compile(r"(?:^|\.)(?:add_[qkv]_proj|to_add_out|norm_added_[qk]|\w+_moe_gen)(?:\.|$)")
_DENOISER_ROOTS = ("proj_in.", "proj_out.", "time_embedder.")
_FP32_ROOT = "time_embedder."
_UNUSED_ROOTS = ("lm_head.", "norm.", "audio_", "action_")
# The last prompt layer leaves keys and values only.
_IN_LAST_PROMPT_LAYER = (
    "input_layernorm.",
    "self_attn.to_k.",
    "self_attn.to_v.",
    "self_attn.norm_k.",
    "self_attn.k_norm_und_for_gen.",
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Widths of one generation layer and the size of its image. `tokens` are patches; sizes in numbers, not bytes."""

    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    head: int
    tokens: int
    latent: int

    @property
    def heads(self) -> int:
        """Query and key heads together."""
        return (self.queries + self.keys) // self.head


def geometry(shapes: Shapes, config: Mapping[str, Any], model: Model, scale: int) -> Geometry | None:
    """Widths from the headers, patch and channels from transformer/config.json; None where they do not say."""
    layer = "layers.0."
    try:
        queries, hidden = shapes[f"{layer}self_attn.add_q_proj.weight"]
        keys, _ = shapes[f"{layer}self_attn.add_k_proj.weight"]
        (head,) = shapes[f"{layer}self_attn.norm_added_q.weight"]
        inner, _ = shapes[f"{layer}mlp_moe_gen.up_proj.weight"]
        patch, channels = int(config["latent_patch_size"]), int(config["latent_channel"])
    except (KeyError, TypeError, ValueError):
        return None
    if not all((queries, hidden, keys, head, inner)) or patch < 1 or channels < 1:
        return None
    height, width = -(-model.height // scale), -(-model.width // scale)
    return Geometry(
        layers=1 + max(int(found[1]) for name in shapes if (found := _LAYER.match(name))),
        hidden=hidden,
        queries=queries,
        keys=keys,
        inner=inner,
        head=head,
        tokens=-(-height // patch) * -(-width // patch),
        latent=channels * height * width,
    )


def anatomy(profile: Profile, base: Base, weights: Weights, scale: int, prompts: Sequence[str]) -> Anatomy | None:
    """The base as the estimate sees it. `scale` is pixels per latent."""
    shapes, model = weights.shapes, profile.model
    size = geometry(shapes, base.transformer_config(), model, scale)
    if size is None:
        return None
    item, rank = ITEM_BYTES[model.dtype], model.lora.rank
    per_token = 2 * size.layers * size.keys * item
    longest = max((prompt_tokens(profile, text) for text in prompts), default=0)
    held = {name: shape for name, shape in shapes.items() if in_prompt_encoder(name, size.layers)}
    return Anatomy(
        denoiser={name: shape for name, shape in shapes.items() if in_denoiser(name)},
        fp32=_FP32_ROOT,
        layer=_LAYER,
        encoder=sum(tensor_bytes(name, shape, model.dtype, _FP32_ROOT) for name, shape in held.items()),
        prompt=lambda text: per_token * prompt_tokens(profile, text),
        prompt_how="keys and values of {} prompts, at most 4 GiB, and one padded batch; 3 bytes a token",
        tokens=size.tokens,
        width=size.hidden,
        layers=size.layers,
        latent=size.latent,
        saved=lambda modules: saved_activations(
            size, modules, rank, item, longest, checkpointing=model.gradient_checkpointing
        ),
        working=size.tokens * (4 * size.hidden + 2 * size.queries + 2 * size.keys + 3 * size.inner) * item,
    )


def in_denoiser(name: str) -> bool:
    """Whether a tensor of the transformer belongs to the tower that is sharded and trained."""
    return name.startswith(_DENOISER_ROOTS) or _IN_DENOISER.search(name) is not None


def in_prompt_encoder(name: str, layers: int) -> bool:
    """Whether a tensor belongs to the tower that encodes prompts; what no image needs belongs to neither."""
    if in_denoiser(name) or name.startswith(_UNUSED_ROOTS):
        return False
    found = _LAYER.match(name)
    last = found is not None and int(found[1]) == layers - 1
    return not last or name[found.end() if found else 0 :].startswith(_IN_LAST_PROMPT_LAYER)


def largest_encoder_unit(shapes: Shapes, dtype: str) -> int:
    """Bytes of the largest unit in which the prompt encoder comes and goes: one of its layers, or its embedding."""
    layers = 1 + max((int(found[1]) for name in shapes if (found := _LAYER.match(name))), default=0)
    units: dict[str, int] = {}
    for name, shape in shapes.items():
        if in_prompt_encoder(name, layers):
            found = _LAYER.match(name)
            unit = found[0] if found else name
            units[unit] = units.get(unit, 0) + tensor_bytes(name, shape, dtype, _FP32_ROOT)
    return max(units.values(), default=0)


def prompt_tokens(profile: Profile, text: str) -> int:
    """About how many tokens a prompt has: three UTF-8 bytes each, and the family's own sentences."""
    templates = profile.model.system_prompt or profile.model.resolution_template
    return -(-len(text.encode("utf-8", "replace")) // 3) + (_TEMPLATE_TOKENS if templates else 2)


def saved_activations(
    size: Geometry, modules: Modules | None, rank: int, item: int, prompt: int, *, checkpointing: bool = False
) -> int:
    """Bytes that autograd keeps of one sample, layers and adapters of `item` bytes a number.

    Without `modules` all weights are trained: every linear layer keeps its input, and every norm what it scales.
    With `checkpointing` that is one layer's share, while the backward is in it, and every layer's input.
    `prompt` is the number of prompt tokens. Derived from the layers' own operations: a norm keeps its input (and a
    float32 copy of a bfloat16 one), attention its queries, keys, values and output, the MLP three inner products, and
    an adapter its input and its inner product.
    """
    norm = item + (4 if item == 2 else 0)
    layer = size.tokens * (2 * size.hidden + size.queries + size.keys) * norm
    layer += size.tokens * 2 * 4 + size.tokens * size.heads * 4  # scale of each norm
    layer += size.tokens * size.queries * item + (size.tokens + prompt) * 2 * size.keys * item
    layer += size.tokens * size.queries // size.head * 4  # log-sum-exp
    layer += 3 * size.tokens * size.inner * item
    ends = size.tokens * (2 * size.head * item + size.hidden * norm + 4)  # positions, and the last norm
    if modules is None:
        scaled, read = 2 * size.hidden + size.queries + size.keys, 2 * size.hidden + size.queries + size.inner
        inside = size.layers * (layer + size.tokens * (scaled + read) * item)
        # What the two projections read, and the timestep's embedder.
        ends += size.tokens * 2 * size.hidden * item + size.latent * item
        ends += (_TIMESTEP + 2 * size.hidden) * 4
    else:
        inside = size.layers * layer + size.tokens * _adapter_inputs(size, modules, rank, item)
    if checkpointing:
        inside = inside // size.layers + size.layers * size.tokens * size.hidden * item
    return inside + ends


def _adapter_inputs(size: Geometry, modules: Modules, rank: int, item: int) -> int:
    """Bytes per token, over all layers, of what adapters keep, and of the attention's output, which one may share."""
    outputs = sum(name.endswith(".to_add_out") for name in modules)
    # Modules that read the same tensor share it.
    read = {(name.rpartition(".")[0], _source(name)): into for name, (_, into) in modules.items()}
    kept = rank * len(modules) + sum(read.values()) + (size.layers - outputs) * size.queries
    return kept * item


def _source(name: str) -> str:
    leaf = name.rpartition(".")[2]
    return "input" if leaf in ("add_q_proj", "add_k_proj", "add_v_proj", "gate_proj", "up_proj") else leaf
