"""What a run will need on each rank, part by part, worked out from safetensors headers and the profile, without torch.

Owns the formula of every part but those that differ between families; each part says how it was computed and whether it
is exact. Counts tensors only: contexts, communication buffers and fragmentation come on top. Returns None rather than
guess where a base does not say its own geometry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nftctl.profile import estimate_cosmos3, estimate_sd3
from nftctl.profile.adapter import Modules, adapted, adapter_numbers, denoiser_modules
from nftctl.profile.anatomy import ITEM_BYTES, Anatomy, tensor_bytes
from nftctl.profile.artifacts import Base, Weights, local, pixels_per_latent, read_object, read_weights
from nftctl.profile.schema import Model, Profile
from nftctl.profile.t2i import T2iProfile

PROMPT_CACHE_BYTES = 4 << 30
"""Most that a rank keeps of encoded prompts."""
NOT_COUNTED = "CUDA context, NCCL buffers, allocator fragmentation, and the batches of evaluations and grids"

_SOLVER_LATENTS = 6  # UniPC of order 2: state, two outputs, and what one step computes
_DECODED_MAPS = 4  # of the widest full-size layer of a VAE that are alive at once, about
_WAN_TILE = 256  # pixels a side


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
class Decoder:
    """The VAE from outside: numbers in its weights, pixels per latent, its widest full-size layer, a tile's side.

    For a base whose latents are pixels: `Decoder(0, 1, 0, 1, 1)`.
    """

    numbers: int
    scale: int
    channels: int
    patch: int
    tile: int


def read_decoder(base: Base, model: Model, family: str) -> Decoder:
    """The VAE that a run would load; keys that its config.json leaves out have diffusers' defaults."""
    if base.latents_are_pixels():
        return Decoder(0, 1, 0, 1, 1)
    folder = local(model.vae) if model.vae else base.folder / "vae"
    config = read_object(folder / "config.json")

    def count(key: str, otherwise: int) -> int:
        found = config.get(key)
        return found if type(found) is int and found > 0 else otherwise

    numbers, scale = sum(map(math.prod, read_weights(folder).shapes.values())), pixels_per_latent(config, family)
    if family == "sd3":
        blocks = config.get("block_out_channels")
        widths = [n for n in blocks if type(n) is int and n > 0] if isinstance(blocks, list) else []
        # The block before the last leaves its own width at full size.
        widest = widths[1] if len(widths) > 1 else (widths or [64])[0]
        return Decoder(numbers, scale, widest, 1, count("sample_size", 32))
    channels = count("decoder_base_dim", count("base_dim", 96))
    return Decoder(numbers, scale, channels, count("patch_size", 1), _WAN_TILE)


def estimate(
    profile: Profile, base: Base, weights: Weights, contract: T2iProfile, prompts: Sequence[str]
) -> Memory | None:
    """Every part of one rank's memory. `prompts` are all texts that will be encoded; None without a known geometry."""
    decoder = read_decoder(base, profile.model, contract.family)
    if contract.family == "sd3":
        size = estimate_sd3.anatomy(profile, base, weights, decoder.scale, contract.text_parts)
    else:
        size = estimate_cosmos3.anatomy(profile, base, weights, decoder.scale, prompts)
    if size is None:
        return None
    modules = adapted(profile.model.lora.targets, denoiser_modules(weights.shapes, contract.lora))
    return Memory(
        (
            *_base(profile, size),
            Part("prompt encoder", size.encoder, "always", f"whole on each rank, {profile.model.dtype}"),
            _prompt_cache(profile, size, prompts),
            *_adapter(adapter_numbers(modules, profile.model.lora.rank)),
            _activations(profile, size, modules),
            _latents(profile, size),
            *_decode(profile, decoder),
        )
    )


def _adapter(numbers: int) -> Iterator[Part]:
    how = f"policy and old, {numbers:,} float32 numbers each, whole on each rank"
    yield Part("LoRA", 2 * 4 * numbers, "always", how)
    yield Part("gradients", 2 * 4 * numbers, "training", "float32, and the flat bucket that is reduced over the ranks")
    yield Part("optimizer", 2 * 4 * numbers, "always", "two float32 moments of AdamW")


def _base(profile: Profile, size: Anatomy) -> Iterator[Part]:
    model, ranks = profile.model, profile.ranks

    def held(name: str, shape: tuple[int, ...]) -> int:
        return tensor_bytes(name, shape, model.dtype, size.fp32)

    shard = sum(held(name, (-(-shape[0] // ranks), *shape[1:])) for name, shape in size.denoiser.items() if shape)
    yield Part("base shard", shard, "always", f"the denoiser, each tensor cut over {ranks} ranks")
    if model.shard == "reshard":
        units: dict[str, int] = {}
        for name, shape in size.denoiser.items():
            units[size.unit(name)] = units.get(size.unit(name), 0) + held(name, shape)
        two = sum(sorted(units.values())[-2:])
        yield Part("gathered base", two, "always", "the two largest units: one computes, the next is gathered", True)
    else:
        whole = sum(held(name, shape) for name, shape in size.denoiser.items())
        how = "the whole denoiser, kept through the step"
        how += "; where it takes over half of a GPU's free memory, auto gathers layer by layer instead"
        yield Part("gathered base", whole, "always", how if model.shard == "auto" else how.split(";")[0])


def _prompt_cache(profile: Profile, size: Anatomy, prompts: Sequence[str]) -> Part:
    kept = sum(map(size.prompt, set(prompts)))
    longest = max(map(size.prompt, prompts), default=0)
    batched = longest * max(_rollout_rows(profile), _training_rows(profile))
    how = size.prompt_how.format(len(set(prompts)))
    return Part("prompt cache", min(kept, PROMPT_CACHE_BYTES) + batched, "always", how, True)


def _rollout_rows(profile: Profile) -> int:
    rows = min(profile.model.rollout_micro_batch or profile.data.rows_per_step, profile.data.rows_per_step)
    return rows if profile.rl.guidance in (0, 1) else 2 * rows


def _training_rows(profile: Profile) -> int:
    pairs = profile.data.rows_per_step * profile.rl.timesteps_per_sample
    return min(profile.model.train_micro_batch or pairs, pairs)


def _activations(profile: Profile, size: Anatomy, modules: Modules) -> Part:
    training = _training_rows(profile) * (size.saved(modules) + size.working)
    held = max(training, _rollout_rows(profile) * size.working)
    how = f"{_training_rows(profile)} x {size.tokens} tokens kept for the backward, {size.layers} layers, one at work"
    return Part("activations", held, "training", how, True)


def _latents(profile: Profile, size: Anatomy) -> Part:
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
    at_once = pixels // rows if model.decode_slicing else pixels
    if model.decode_tiling:
        at_once = min(at_once, at_once // (model.height * model.width) * decoder.tile**2)
    yield Part("decoder", decoder.numbers * item, "always", f"the VAE, {model.decode_dtype}, whole on each rank")
    maps = _DECODED_MAPS * decoder.channels * at_once // decoder.patch**2 * item
    # Three colours: the decoder's number, its float32 copy, the scaled one, and the byte.
    images = 3 * pixels * (item + 4 + 4 + 1)
    how = f"{rows} images of {model.height} x {model.width}, {_DECODED_MAPS} maps of the widest full-size layer"
    yield Part("decode", maps + images, "rollout", how if decoder.channels else how.split(",")[0], True)
