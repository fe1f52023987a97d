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
from nftctl.profile.batches import rollout_rows
from nftctl.profile.schema import Model, Profile
from nftctl.profile.t2i import T2iProfile

PROMPT_CACHE_BYTES = 4 << 30
"""Most that a rank keeps of encoded prompts."""
NOT_COUNTED = (
    "the process itself (Python, torch and Ray: about 0.5 GiB of the host's memory), CUDA context, NCCL buffers, "
    "allocator fragmentation, and the batches of evaluations and grids"
)

_SOLVER_LATENTS = 4  # besides every velocity: noise, state, and both branches of what one step computes
_DECODED_MAPS = 4  # of the widest full-size layer of a VAE that are alive at once, about
_WAN_TILE = 256  # pixels a side


When = Literal["always", "encoding", "rollout", "training", "rollout and training"]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a rank's memory. `when` names the phases in which it is there; `how` is the formula in words."""

    name: str
    bytes: int
    when: When
    how: str
    rough: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """All parts of one rank. The peak is what is always there and the fullest phase."""

    parts: tuple[Part, ...]

    @property
    def always(self) -> int:
        """Bytes held through the whole step."""
        return self._during("always")

    @property
    def peak(self) -> int:
        """Bytes in the fullest phase of a step: its new prompts are encoded, then it samples, then it trains."""
        return self.always + max(map(self._during, ("encoding", "rollout", "training")))

    def _during(self, phase: str) -> int:
        return sum(part.bytes for part in self.parts if phase in part.when)


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
    if base.latents_are_pixels(model.vae):
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
    # A third more, at the most: the slices of its convolutions that single frames go through.
    return Decoder(numbers * 4 // 3, scale, channels, count("patch_size", 1), _WAN_TILE)


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
    whole = contract.family == "sd3"  # diffusers' pipeline runs its encoders, and wants them all at once
    unit = size.encoder if whole else estimate_cosmos3.largest_encoder_unit(weights.shapes, profile.model.dtype)
    modules = adapted(profile.model.lora.targets, denoiser_modules(weights.shapes, contract.lora))
    return Memory(
        (
            *_shards(profile, size),
            _gathered(profile, size, leaves=whole and _encodes_at(profile) != "always"),
            *_fp8(profile, size),
            _prompt_encoder(profile, size, unit),
            _prompt_cache(profile, size, prompts),
            *_trained(profile, size, adapter_numbers(modules, profile.model.lora.rank)),
            _activations(profile, size, modules),
            _latents(profile, size),
            *_decode(profile, decoder, rollout_rows(profile, size.tokens, size.width)),
        )
    )


def in_denoiser(family: str, name: str) -> bool:
    """Whether a tensor of a family's transformer is one that training all weights would move."""
    return name != estimate_sd3.TABLE if family == "sd3" else estimate_cosmos3.in_denoiser(name)


def _trained(profile: Profile, size: Anatomy, numbers: int) -> Iterator[Part]:
    """Copies of an adapter of that many numbers, and what the optimizer adds to whatever is trained."""
    if profile.model.train == "full":
        shard = _sharded(profile, size, stored=True)
        yield Part("gradients", shard, "training", "float32, each rank's share")
        how = "gradients of the largest unit, whole, and in float32 on their way to their ranks"
        yield Part("reduction", _units(profile, size)[0] + _units(profile, size, stored=True)[0], "training", how, True)
        yield Part("optimizer", 2 * shard, "always", "two float32 moments of AdamW, each rank's share")
        return
    names = ["policy", "old", *(["EMA"] if profile.rl.ema_decay > 0 else [])]
    which = f"{', '.join(names[:-1])} and {names[-1]}"
    how = f"{which}, {numbers:,} float32 numbers each, whole on each rank"
    yield Part("LoRA", len(names) * 4 * numbers, "always", how)
    yield Part("gradients", 2 * 4 * numbers, "training", "float32, and the flat bucket that is reduced over the ranks")
    yield Part("optimizer", 2 * 4 * numbers, "always", "two float32 moments of AdamW")
    if profile.model.dtype != "float32":
        item, how = ITEM_BYTES[profile.model.dtype], f"the active adapter in {profile.model.dtype}"
        yield Part("cast LoRA", item * numbers, "rollout and training", how)


def _shards(profile: Profile, size: Anatomy) -> Iterator[Part]:
    rl, cut = profile.rl, f"each tensor cut over {profile.shard_ranks} ranks"
    if profile.model.shard == "replicate-base":
        return
    if profile.model.train == "lora":
        yield Part("base shard", _sharded(profile, size), "always", f"the denoiser, {cut}")
        return
    copies = {"policy": True, "old": rl.old.build_old, "reference": rl.kl_beta > 0, "EMA": rl.ema_decay > 0}
    for name, kept in copies.items():
        if kept:
            yield Part(name, _sharded(profile, size, stored=True), "always", f"the denoiser, float32, {cut}")


def _sharded(profile: Profile, size: Anatomy, *, stored: bool = False) -> int:
    """Bytes of a rank's rows of every tensor; `stored` counts numbers that an optimizer moves, which are float32."""
    dtype = "float32" if stored else profile.model.dtype
    rows = {name: (-(-shape[0] // profile.shard_ranks), *shape[1:]) for name, shape in size.denoiser.items() if shape}
    return sum(tensor_bytes(name, shape, dtype, size.fp32) for name, shape in rows.items())


def _units(profile: Profile, size: Anatomy, *, stored: bool = False) -> list[int]:
    """Bytes of each unit of sharding, the largest first."""
    units: dict[str, int] = {}
    for name, shape in size.denoiser.items():
        held = tensor_bytes(name, shape, "float32" if stored else profile.model.dtype, size.fp32)
        units[size.unit(name)] = units.get(size.unit(name), 0) + held
    return sorted(units.values(), reverse=True)


def _gathered(profile: Profile, size: Anatomy, *, leaves: bool) -> Part:
    """`leaves`: an encoder that comes whole takes its room."""
    units, model = _units(profile, size), profile.model
    when: When = "rollout and training" if leaves else "always"
    if model.shard == "reshard":
        how = "the two largest units: one computes, the next is gathered"
        return Part("gathered base", sum(units[:2]), when, how, True)
    if model.shard == "replicate-base":
        return Part("gathered base", sum(units), "always", "the whole denoiser, not sharded")
    how = (
        f"the whole denoiser, {model.dtype}, kept through the step"
        if model.train == "full"
        else ("the whole denoiser, kept from step to step")
    )
    if model.shard == "auto":
        how += "; where it takes over half of a GPU's free memory, auto gathers layer by layer instead"
    return Part("gathered base", sum(units), when, how)


def _fp8(profile: Profile, size: Anatomy) -> Iterator[Part]:
    if profile.rl.rollout_precision == "fp8":
        inside = [shape for name, shape in size.denoiser.items() if size.layer.match(name)]
        held = sum(math.prod(shape) for shape in inside if len(shape) == 2)
        yield Part("FP8 weights", held, "always", "the layers' matrices once more, a byte a number", True)


def _encodes_at(profile: Profile) -> When:
    """When the prompt encoder is on the device: in host memory it still is where ranks compute there."""
    home = profile.model.prompt_encoder
    leaves = home == "per-step" or (home == "offload" and profile.grid.device != "cpu")
    return "encoding" if leaves else "always"


def _prompt_encoder(profile: Profile, size: Anatomy, unit: int) -> Part:
    """All of it where it stays; where it comes and goes, `unit` is what is there of it at once."""
    when, home = _encodes_at(profile), profile.model.prompt_encoder
    at_once = unit if when == "encoding" else size.encoder
    what = "whole" if at_once == size.encoder else "one layer or the embedding at a time"
    elsewhere = {"resident": "", "offload": "; otherwise in host memory", "per-step": "; otherwise nowhere"}[home]
    return Part("prompt encoder", at_once, when, f"{what} on each rank, {profile.model.dtype}{elsewhere}")


def _prompt_cache(profile: Profile, size: Anatomy, prompts: Sequence[str]) -> Part:
    kept = sum(map(size.prompt, set(prompts)))
    longest = max(map(size.prompt, prompts), default=0)
    batched = longest * max(_rollout_rows(profile, size), _training_rows(profile))
    how = size.prompt_how.format(len(set(prompts)))
    return Part("prompt cache", min(kept, PROMPT_CACHE_BYTES) + batched, "always", how, True)


def _rollout_rows(profile: Profile, size: Anatomy) -> int:
    """Rows of the denoiser at once, all guidance branches."""
    rows = rollout_rows(profile, size.tokens, size.width)
    return rows if profile.rl.guidance in (0, 1) else 2 * rows


def _training_rows(profile: Profile) -> int:
    pairs = profile.data.rows_per_step * profile.rl.timesteps_per_sample
    return min(profile.model.train_micro_batch or pairs, pairs)


def _activations(profile: Profile, size: Anatomy, modules: Modules) -> Part:
    saved = size.saved(None if profile.model.train == "full" else modules)
    training = _training_rows(profile) * (saved + size.working)
    held = max(training, _rollout_rows(profile, size) * size.working)
    what = (
        "inputs of {} layers kept for the backward, one run again"
        if profile.model.gradient_checkpointing
        else ("kept for the backward, {} layers, one at work")
    )
    how = f"{_training_rows(profile)} x {size.tokens} tokens {what.format(size.layers)}"
    return Part("activations", held, "training", how, True)


def _latents(profile: Profile, size: Anatomy) -> Part:
    rl, rows = profile.rl, profile.data.rows_per_step
    per_update = 2 + rl.old.build_old + (rl.kl_beta > 0)
    stacked = rows * rl.timesteps_per_sample * (1 + rl.updates_per_rollout * per_update)
    solver = (rl.sample_steps + _SOLVER_LATENTS) * rollout_rows(profile, size.tokens, size.width)
    count = rows + stacked + solver
    how = "float32: samples, noise, noisy latents and anchor velocities of a step, and a rollout's velocities"
    return Part("latents", 4 * size.latent * count, "always", how, True)


def _decode(profile: Profile, decoder: Decoder, rows: int) -> Iterator[Part]:
    model, item = profile.model, ITEM_BYTES[profile.model.decode_dtype]
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
