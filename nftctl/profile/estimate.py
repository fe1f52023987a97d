"""What a run will need on each rank, part by part, worked out from safetensors headers and the profile, without torch.

Owns the split of a Cosmos3 transformer into towers by tensor name, and the formula of every part; each part says how it
was computed and whether it is exact. Counts tensors only: contexts, communication buffers and fragmentation come on
top. Returns None rather than guess where a base does not say its own geometry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nftctl.profile.adapter import Modules, Shapes, adapted, adapter_numbers, denoiser_modules
from nftctl.profile.artifacts import Base, Weights, local, read_object, read_weights
from nftctl.profile.schema import Model, Profile
from nftctl.profile.t2i import LoraScope

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
PROMPT_CACHE_BYTES = 4 << 30
"""Most that a rank keeps of encoded prompts."""
NOT_COUNTED = "CUDA context, NCCL buffers, allocator fragmentation, and the batches of evaluations and grids"

_TEMPLATE_TOKENS = 64  # a system prompt and a resolution sentence, about
_SOLVER_LATENTS = 6  # UniPC of order 2: state, two outputs, and what one step computes
_DECODED_MAPS = 4  # of the widest full-size layer of a VAE that are alive at once, about

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
class Part:
    """One part of a rank's memory. `when` says in which phase it is there; `how` is the formula in words."""

    name: str
    bytes: int
    when: Literal["always", "rollout", "training"]
    how: str
    rough: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """All parts of one rank. The peak is what is always there and the larger of the two phases."""

    parts: tuple[Part, ...]

    @property
    def always(self) -> int:
        """Bytes held through the whole step."""
        return self._during("always")

    @property
    def peak(self) -> int:
        """Bytes in the fuller of rollout and training."""
        return self.always + max(self._during("rollout"), self._during("training"))

    def _during(self, when: str) -> int:
        return sum(part.bytes for part in self.parts if part.when == when)


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


@dataclass(frozen=True, slots=True)
class Decoder:
    """The VAE from outside: numbers in its weights, pixels per latent, and its widest full-size layer.

    For a base whose latents are pixels: `Decoder(0, 1, 0, 1)`.
    """

    numbers: int
    scale: int
    channels: int
    patch: int


def read_decoder(base: Base, model: Model) -> Decoder:
    """The VAE that a run would load; keys that its config.json leaves out have diffusers' defaults."""
    if base.latents_are_pixels():
        return Decoder(0, 1, 0, 1)
    folder = local(model.vae) if model.vae else base.folder / "vae"
    config = read_object(folder / "config.json")

    def count(key: str, otherwise: int) -> int:
        found = config.get(key)
        return found if type(found) is int and found > 0 else otherwise

    numbers = sum(map(math.prod, read_weights(folder).shapes.values()))
    channels = count("decoder_base_dim", count("base_dim", 96))
    return Decoder(numbers, count("scale_factor_spatial", 8), channels, count("patch_size", 1))


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


def estimate(profile: Profile, base: Base, weights: Weights, scope: LoraScope, prompts: Sequence[str]) -> Memory | None:
    """Every part of one rank's memory. `prompts` are all texts that will be encoded; None without a known geometry."""
    shapes, decoder = weights.shapes, read_decoder(base, profile.model)
    size = geometry(shapes, base.transformer_config(), profile.model, decoder.scale)
    if size is None:
        return None
    modules = adapted(profile.model.lora.targets, denoiser_modules(shapes, scope))
    numbers = adapter_numbers(modules, profile.model.lora.rank)
    return Memory(
        (
            *_base(profile, shapes),
            _prompt_encoder(profile, shapes, size.layers),
            _prompt_cache(profile, size, prompts),
            *_adapter(numbers),
            _activations(profile, size, modules, _longest(profile, prompts)),
            _latents(profile, size),
            *_decode(profile, decoder),
        )
    )


def _adapter(numbers: int) -> Iterator[Part]:
    how = f"policy and old, {numbers:,} float32 numbers each, whole on each rank"
    yield Part("LoRA", 2 * 4 * numbers, "always", how)
    yield Part("gradients", 2 * 4 * numbers, "training", "float32, and the flat bucket that is reduced over the ranks")
    yield Part("optimizer", 2 * 4 * numbers, "always", "two float32 moments of AdamW")


def _base(profile: Profile, shapes: Shapes) -> Iterator[Part]:
    model, ranks = profile.model, profile.ranks
    tower = {name: shape for name, shape in shapes.items() if in_denoiser(name)}
    shard = sum(_bytes(name, (-(-shape[0] // ranks), *shape[1:]), model) for name, shape in tower.items() if shape)
    yield Part("base shard", shard, "always", f"the denoiser, each tensor cut over {ranks} ranks")
    if model.shard == "reshard":
        units: dict[str, int] = {}
        for name, shape in tower.items():
            unit = name[: found.end()] if (found := _LAYER.match(name)) else name.split(".")[0]
            units[unit] = units.get(unit, 0) + _bytes(name, shape, model)
        held = sum(sorted(units.values())[-2:])
        yield Part("gathered base", held, "always", "the two largest units: one computes, the next is gathered", True)
    else:
        whole = sum(_bytes(name, shape, model) for name, shape in tower.items())
        how = "the whole denoiser, kept through the step"
        how += "; where it takes over half of a GPU's free memory, auto gathers layer by layer instead"
        yield Part("gathered base", whole, "always", how if model.shard == "auto" else how.split(";")[0])


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


def _bytes(name: str, shape: tuple[int, ...], model: Model) -> int:
    return math.prod(shape) * (4 if name.startswith(_FP32_ROOT) else ITEM_BYTES[model.dtype])


def _prompt_encoder(profile: Profile, shapes: Shapes, layers: int) -> Part:
    held = sum(_bytes(n, shape, profile.model) for n, shape in shapes.items() if in_prompt_encoder(n, layers))
    return Part("prompt encoder", held, "always", f"whole on each rank, {profile.model.dtype}")


def prompt_tokens(profile: Profile, text: str) -> int:
    """About how many tokens a prompt has: three UTF-8 bytes each, and the family's own sentences."""
    templates = profile.model.system_prompt or profile.model.resolution_template
    return -(-len(text.encode("utf-8", "replace")) // 3) + (_TEMPLATE_TOKENS if templates else 2)


def _longest(profile: Profile, prompts: Sequence[str]) -> int:
    return max((prompt_tokens(profile, text) for text in prompts), default=0)


def _prompt_cache(profile: Profile, size: Geometry, prompts: Sequence[str]) -> Part:
    per_token = 2 * size.layers * size.keys * ITEM_BYTES[profile.model.dtype]
    kept = per_token * sum(prompt_tokens(profile, text) for text in set(prompts))
    batched = per_token * _longest(profile, prompts) * max(_rollout_rows(profile), _training_rows(profile))
    how = f"keys and values of {len(set(prompts))} prompts, at most 4 GiB, and one padded batch; 3 bytes a token"
    return Part("prompt cache", min(kept, PROMPT_CACHE_BYTES) + batched, "always", how, True)


def _rollout_rows(profile: Profile) -> int:
    rows = min(profile.model.rollout_micro_batch or profile.data.rows_per_step, profile.data.rows_per_step)
    return rows if profile.rl.guidance in (0, 1) else 2 * rows


def _training_rows(profile: Profile) -> int:
    pairs = profile.data.rows_per_step * profile.rl.timesteps_per_sample
    return min(profile.model.train_micro_batch or pairs, pairs)


def saved_activations(size: Geometry, modules: Modules, rank: int, item: int, prompt: int) -> int:
    """Bytes that autograd keeps of one sample: frozen layers of `item` bytes a number, adapters in float32.

    `prompt` is the number of prompt tokens. Derived from the layers' own operations: a norm keeps its input (and a
    float32 copy of a bfloat16 one), attention its queries, keys, values and output, the MLP three inner products, and
    an adapter its input in float32 and its inner product.
    """
    norm = item + (4 if item == 2 else 0)
    layer = size.tokens * (2 * size.hidden + size.queries + size.keys) * norm
    layer += size.tokens * 2 * 4 + size.tokens * size.heads * 4  # scale of each norm
    layer += size.tokens * size.queries * item + (size.tokens + prompt) * 2 * size.keys * item
    layer += size.tokens * size.queries // size.head * 4  # log-sum-exp
    layer += 3 * size.tokens * size.inner * item
    total = size.layers * layer + 2 * size.tokens * size.head * item
    return total + size.tokens * _adapter_inputs(size, modules, rank, item)


def _adapter_inputs(size: Geometry, modules: Modules, rank: int, item: int) -> int:
    """Bytes per token, over all layers, of what adapters keep, and of the attention's output, which one may share."""
    kept = 4 * rank * len(modules)
    outputs = sum(name.endswith(".to_add_out") for name in modules)
    if item == 2:  # each adapter casts for itself
        return kept + sum(4 * into for _, into in modules.values()) + size.layers * size.queries * item
    # In float32 nothing is cast, so modules that read the same tensor share it.
    read = {(name.rpartition(".")[0], _source(name)): into for name, (_, into) in modules.items()}
    return kept + sum(4 * into for into in read.values()) + (size.layers - outputs) * size.queries * item


def _source(name: str) -> str:
    leaf = name.rpartition(".")[2]
    return "input" if leaf in ("add_q_proj", "add_k_proj", "add_v_proj", "gate_proj", "up_proj") else leaf


def _activations(profile: Profile, size: Geometry, modules: Modules, prompt: int) -> Part:
    item = ITEM_BYTES[profile.model.dtype]
    saved = saved_activations(size, modules, profile.model.lora.rank, item, prompt)
    working = size.tokens * (4 * size.hidden + 2 * size.queries + 2 * size.keys + 3 * size.inner) * item
    training = _training_rows(profile) * (saved + working)
    held = max(training, _rollout_rows(profile) * working)
    how = f"{_training_rows(profile)} x {size.tokens} tokens kept for the backward, {size.layers} layers, one at work"
    return Part("activations", held, "training", how, True)


def _latents(profile: Profile, size: Geometry) -> Part:
    rl, rows = profile.rl, profile.data.rows_per_step
    per_update = 2 + rl.old.build_old + (rl.kl_beta > 0)
    stacked = rows * rl.timesteps_per_sample * (1 + rl.updates_per_rollout * per_update)
    count = rows + stacked + _SOLVER_LATENTS * _rollout_rows(profile)
    how = "float32: samples, noise, noisy latents and anchor velocities of a step, and the solver's state"
    return Part("latents", 4 * size.latent * count, "always", how, True)


def _decode(profile: Profile, decoder: Decoder) -> Iterator[Part]:
    model = profile.model
    item, rows = (
        ITEM_BYTES[model.decode_dtype],
        min(model.rollout_micro_batch or profile.data.rows_per_step, profile.data.rows_per_step),
    )
    pixels = rows * model.height * model.width
    yield Part("decoder", decoder.numbers * item, "always", f"the VAE, {model.decode_dtype}, whole on each rank")
    maps = _DECODED_MAPS * decoder.channels * pixels // decoder.patch**2 * item
    # Three colours: the decoder's number, its float32 copy, the scaled one, and the byte.
    images = 3 * pixels * (item + 4 + 4 + 1)
    how = f"{rows} images of {model.height} x {model.width}, {_DECODED_MAPS} maps of the widest full-size layer"
    yield Part("decode", maps + images, "rollout", how if decoder.channels else how.split(",")[0], True)
