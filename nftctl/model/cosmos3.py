"""The Cosmos3 family: diffusers' transformer split into prompt encoder and denoiser, and a decoder.

Serves every size of `Cosmos3OmniTransformer`, with a Wan VAE or, where the base folder declares that it has none and
its latents are RGB, with pixels as latents. Refuses folders that lack a part, and shapes that the decoder cannot make.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from torch import nn

from nftctl.model.basefolder import check_channels, check_media, part_folder, transformer_config
from nftctl.model.cosmos3_denoiser import Cosmos3Denoiser
from nftctl.model.cosmos3_encoder import Cosmos3PromptEncoder, UnderstandingTower
from nftctl.model.cosmos3_tokens import Cosmos3Tokens, load_tokenizer
from nftctl.model.decoder import PixelDecoder, WanDecoder, pixel_decoder
from nftctl.model.family import Family, LoadReport
from nftctl.model.residence import InHostMemory, ReadAnew, Residence
from nftctl.model.weights import Destination, StoredWeights, load_strictly, stored_dtype
from nftctl.profile.artifacts import Base, inspect_folder
from nftctl.profile.schema import Model

# Heads for text, sound and action: no image passes through them.
UNUSED = ("lm_head.", "audio_", "action_")
KEPT_IN_FP32 = ("time_embedder.",)


def split(stock: Cosmos3OmniTransformer) -> tuple[UnderstandingTower, Cosmos3Denoiser]:
    """Re-house a transformer as its two towers. Parameters are shared with `stock` and stay differentiable."""
    return UnderstandingTower(stock), Cosmos3Denoiser(stock)


def load(
    base: Path,
    model: Model,
    device: torch.device,
    *,
    skip_keys: Sequence[str] = (),
    seed: int = 0,
    unread: bool = False,
) -> Family:
    """Load a base: a diffusers folder, or a distributed checkpoint of the transformer, with VAE and tokenizer named.

    `unread` leaves the denoiser's parameters for `Family.stored` to fill.
    """
    source = inspect_folder(base)
    files = source.weight_files()
    stock = empty_transformer(source.config_folder)
    config: Any = stock.config
    decoder: PixelDecoder | WanDecoder
    if is_pixel_base(source, config, model):
        decoder, scale = pixel_decoder(model), 1
    else:
        decoder = WanDecoder.load(part_folder(base, model.vae, "vae", ("vae",)), model, device)
        scale = decoder.scale
        check_channels(decoder, int(config.latent_channel), base)
    check_media(model, scale, "the VAE's pixels per latent")
    tokenizer = load_tokenizer(part_folder(base, model.tokenizer, "tokenizer", ("tokenizer", "text_tokenizer")))
    tower, denoiser, report = load_towers(
        files,
        stock,
        getattr(torch, model.dtype),
        device,
        unread=stored_dtype(model) if unread else None,
        home=model.prompt_encoder,
        skip_keys=skip_keys,
        seed=seed,
    )
    stored = StoredWeights(tuple(files), tuple(skip_keys), seed)
    denoiser.gradient_checkpointing = model.gradient_checkpointing
    tokens = Cosmos3Tokens(
        tokenizer,
        height=model.height,
        width=model.width,
        system_prompt=model.system_prompt,
        resolution_template=model.resolution_template,
    )
    return Family(
        name="cosmos3",
        encoder=Cosmos3PromptEncoder(tower, tokens, residence=_residence(model.prompt_encoder, tower, stored, device)),
        denoiser=denoiser,
        decoder=decoder,
        latent_shape=(int(config.latent_channel), 1, model.height // scale, model.width // scale),
        clamp_x0=isinstance(decoder, PixelDecoder),
        lora_prefix="transformer",
        report=report,
        stored=stored if unread else None,
    )


def load_towers(
    files: Sequence[Path],
    stock: Cosmos3OmniTransformer,
    dtype: torch.dtype,
    device: torch.device,
    *,
    unread: torch.dtype | None = None,
    home: str = "resident",
    skip_keys: Sequence[str] = (),
    seed: int = 0,
) -> tuple[UnderstandingTower, Cosmos3Denoiser, LoadReport]:
    """Fill both towers of a meta transformer from its weight files; frozen, evaluation mode.

    `unread` leaves the denoiser on the meta device, its parameters of that precision. `home` is `model.prompt_encoder`:
    the prompt's tower goes to the device, to host memory, or is checked and left unread.
    """
    tower, denoiser = split(stock)
    here = torch.device("cpu") if home == "offload" else device
    generation = Destination(denoiser, unread or dtype, device, KEPT_IN_FP32, unread is not None)
    report = load_strictly(
        files,
        stock,
        [Destination(tower, dtype, here, unread=home == "per-step"), generation],
        optional=UNUSED,
        skip_keys=skip_keys,
        seed=seed,
    )
    # Buffers are not parameters: the rotary frequencies are computed, not loaded.
    tower.rotary_emb.to(device)
    denoiser.rotary_emb.to(device)
    return tower, denoiser, report


def _residence(home: str, tower: UnderstandingTower, stored: StoredWeights, device: torch.device) -> Residence:
    if home == "offload":
        return InHostMemory(tower.units, device, one_by_one=True)
    if home != "per-step":
        return Residence()
    units = {unit: _under(name, unit) for name, unit in tower.named_modules() if unit in tower.units}
    return ReadAnew(units, lambda unit: stored.fill(units[unit], device), stored.files, device, one_by_one=True)


def _under(path: str, module: nn.Module) -> nn.Module:
    """Something that holds nothing but a module under that path, so that its tensors have the names of the files."""
    for name in reversed(path.split(".")):
        module = nn.ModuleDict({name: module})
    return module


def empty_transformer(folder: Path) -> Cosmos3OmniTransformer:
    """Build the transformer of `folder/config.json` without memory for its parameters."""
    config = transformer_config(folder, Cosmos3OmniTransformer, "cosmos3")
    with torch.device("meta"):
        stock: Cosmos3OmniTransformer = Cosmos3OmniTransformer.from_config(config)
    made: Any = stock.config
    stock.rotary_emb = type(stock.rotary_emb)(made.head_dim, made.rope_theta, made.rope_axes_dim)
    return stock


def is_pixel_base(base: Base, config: Any, model: Model) -> bool:
    """True when the base declares that it has no VAE and latents have three channels."""
    return base.latents_are_pixels(model.vae) and int(config.latent_channel) == 3
