"""What a Stable Diffusion 3 base costs: its transformer, its text encoders, and what one block keeps for the backward.

Returns None rather than guess where a base does not say its own geometry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nftctl.profile.adapter import Modules, Shapes
from nftctl.profile.anatomy import ITEM_BYTES, Anatomy, tensor_bytes
from nftctl.profile.artifacts import Base, Weights, read_object, read_weights
from nftctl.profile.schema import Model, Profile
from nftctl.tensorfile import TRANSFORMERS_STEM

T5_TOKENS = 256
_CLIP_TOKENS = 77
TABLE = "pos_embed.pos_embed"
_LAYER = re.compile(r"transformer_blocks\.(\d+)\.")
_SHARED = ("shared.weight", "encoder.embed_tokens.weight")  # T5's one embedding under two names


@dataclass(frozen=True, slots=True)
class Geometry:
    """Widths of the blocks and the sizes of their two streams; numbers, not bytes."""

    layers: int
    dual: int
    """Layers with a second attention over the image alone."""
    hidden: int
    inner: int
    heads: int
    normed: bool
    """Whether queries and keys are normed."""
    image: int
    prompt: int
    joint: int
    pooled: int
    latent: int


def geometry(shapes: Shapes, config: Mapping[str, Any], model: Model, scale: int, clip_tokens: int) -> Geometry | None:
    """Widths from the headers, patch and heads from transformer/config.json; None where they do not say."""
    block = "transformer_blocks.0."
    try:
        hidden, joint = shapes["context_embedder.weight"]
        inner, _ = shapes[f"{block}ff.net.0.proj.weight"]
        _, pooled = shapes["time_text_embed.text_embedder.linear_1.weight"]
        patch, channels, heads = (int(config[key]) for key in ("patch_size", "in_channels", "num_attention_heads"))
    except (KeyError, TypeError, ValueError):
        return None
    if not all((hidden, joint, inner, pooled)) or min(patch, channels, heads) < 1:
        return None
    height, width = -(-model.height // scale), -(-model.width // scale)
    layers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    return Geometry(
        layers=1 + max(layers),
        dual=sum(f"transformer_blocks.{n}.attn2.to_q.weight" in shapes for n in layers),
        hidden=hidden,
        inner=inner,
        heads=heads,
        normed=f"{block}attn.norm_q.weight" in shapes,
        image=-(-height // patch) * -(-width // patch),
        prompt=clip_tokens + T5_TOKENS,
        joint=joint,
        pooled=pooled,
        latent=channels * height * width,
    )


def anatomy(
    profile: Profile, base: Base, weights: Weights, scale: int, text_parts: Sequence[tuple[str, str]]
) -> Anatomy | None:
    """The base as the estimate sees it. `scale` is pixels per latent."""
    model = profile.model
    size = geometry(weights.shapes, base.transformer_config(), model, scale, clip_tokens(base))
    if size is None:
        return None
    item, rank = ITEM_BYTES[model.dtype], model.lora.rank
    encoders = [folder for folder, _ in base.used_text_parts(text_parts, t5=model.t5)]
    per_prompt = (size.prompt * size.joint + size.pooled) * item
    return Anatomy(
        denoiser={name: shape for name, shape in weights.shapes.items() if name != TABLE},
        fp32="",
        layer=_LAYER,
        encoder=sum(_encoder_bytes(base, folder, model.dtype) for folder in encoders),
        prompt=lambda text: per_prompt,
        prompt_how="embeddings of {} prompts, at most 4 GiB, and one batch; all are of one length",
        tokens=size.image,
        width=size.hidden,
        layers=size.layers,
        latent=size.latent,
        saved=lambda modules: saved_activations(size, modules, rank, item, checkpointing=model.gradient_checkpointing),
        working=(size.image + size.prompt) * (8 * size.hidden + size.inner) * item,
    )


def clip_tokens(base: Base) -> int:
    """Tokens that the CLIP encoders make of every prompt."""
    found = read_object(base.folder / "tokenizer" / "tokenizer_config.json").get("model_max_length")
    return found if type(found) is int and 0 < found < 10_000 else _CLIP_TOKENS


def _encoder_bytes(base: Base, folder: str, dtype: str) -> int:
    shapes = dict(read_weights(base.folder / folder, TRANSFORMERS_STEM).shapes)
    if all(name in shapes for name in _SHARED):
        del shapes[_SHARED[1]]
    return sum(tensor_bytes(name, shape, dtype) for name, shape in shapes.items())


def saved_activations(
    size: Geometry, modules: Modules | None, rank: int, item: int, *, checkpointing: bool = False
) -> int:
    """Bytes that autograd keeps of one sample, layers and adapters of `item` bytes a number.

    Without `modules` all weights are trained: every linear layer keeps its input, and every product with a modulation
    or a norm's scale keeps what is scaled.
    With `checkpointing` that is one layer's share, while the backward is in it, and every layer's input.
    Derived from a block's own operations: a norm keeps its input, attention its queries, keys, values and output,
    a GELU its input, a norm of queries or keys its input (and a float32 copy of a bfloat16 one), and an adapter its
    input and its inner product.
    """
    both = size.image + size.prompt
    stream = 2 * (size.hidden * item + 2 * 4) + size.inner * item  # two norms and a GELU, per token
    attention = 4 * size.hidden * item + size.heads * 4
    normed = 2 * (size.hidden * (item + (4 if item == 2 else 0)) + size.heads * 4) if size.normed else 0
    total = size.layers * both * (stream + attention + normed) + size.dual * size.image * (attention + normed)
    # The last block leaves the prompt after its attention; the output's norm is one more.
    total -= size.prompt * (stream - (size.hidden * item + 2 * 4))
    ends = size.image * (size.hidden * item + 2 * 4)
    if modules is None:
        inside = total + _whole_inputs(size) * item
        ends += (2 * size.image * size.hidden + size.latent) * item
    else:
        inside = total + _adapter_inputs(size, modules, rank, item)
    if checkpointing:
        inside = inside // size.layers + size.layers * both * size.hidden * item
    return inside + ends


def _whole_inputs(size: Geometry) -> int:
    """Numbers that all blocks keep of a sample besides, where every weight is trained."""
    both, queries_keys = size.image + size.prompt, 2 * size.hidden if size.normed else 0
    # Two normed inputs, two gated outputs, what attention and MLP read and what attention leaves; the MLP's middle.
    block = 7 * size.hidden + size.inner + queries_keys
    last = 5 * size.hidden + size.inner  # of which the last block makes nothing for the prompt
    # The second attention reads an input and is gated; what it leaves is counted.
    return size.layers * both * block - size.prompt * last + size.dual * size.image * (2 * size.hidden + queries_keys)


def _adapter_inputs(size: Geometry, modules: Modules, rank: int, item: int) -> int:
    low = 0
    read: dict[tuple[str, str], int] = {}
    for name, (_, into) in modules.items():
        tokens = size.prompt if _of_prompt(name) else size.image
        low += rank * tokens
        # Modules that read the same tensor share it. What attention leaves is cut in two streams, which copies it.
        read[name.rpartition(".")[0], _source(name)] = into * tokens
    return (low + sum(read.values())) * item


def _of_prompt(name: str) -> bool:
    return ".add_" in name or name.endswith(".to_add_out") or ".ff_context." in name


def _source(name: str) -> str:
    leaf = name.rpartition(".")[2]
    return {"to_q": "image", "to_k": "image", "to_v": "image"}.get(leaf) or (
        "prompt" if leaf in ("add_q_proj", "add_k_proj", "add_v_proj") else leaf
    )
