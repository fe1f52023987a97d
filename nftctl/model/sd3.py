"""The Stable Diffusion 3 family: three text encoders, diffusers' SD3 transformer, and a KL VAE.

Serves SD3 and SD3.5, with or without T5. Everything comes from one base folder; `model.vae` may name another VAE.
Refuses folders that lack a part, and shapes that VAE, patches or the position table cannot make.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

from nftctl.errors import CheckpointUnusable, Finding, ProfileRefused
from nftctl.model.basefolder import check_channels, check_media, part_folder, read_json, transformer_config
from nftctl.model.decoder import KlDecoder
from nftctl.model.family import Family
from nftctl.model.sd3_denoiser import Sd3Denoiser
from nftctl.model.sd3_encoder import Sd3PromptEncoder, check_widths, linear_names, load_text_parts
from nftctl.model.weights import Destination, StoredWeights, load_strictly, stored_dtype
from nftctl.profile.artifacts import inspect_folder
from nftctl.profile.schema import Model
from nftctl.tensorfile import weight_files


def load(
    base: Path,
    model: Model,
    device: torch.device,
    *,
    skip_keys: Sequence[str] = (),
    seed: int = 0,
    unread: bool = False,
) -> Family:
    """Load a base folder in diffusers layout. `unread` leaves the denoiser's parameters for `Family.stored` to fill."""
    if inspect_folder(base).kind == "dcp":
        raise CheckpointUnusable(f"{base} holds a transformer alone, and Stable Diffusion 3 needs its text encoders")
    files = weight_files(base / "transformer")
    stock = empty_transformer(base / "transformer")
    config: Any = stock.config
    decoder = KlDecoder.load(part_folder(base, model.vae, "vae", ("vae",)), model, device)
    check_channels(decoder, int(config.in_channels), base)
    check_media(model, decoder.scale * int(config.patch_size), "the pixels of a patch")
    height, width = model.height // decoder.scale, model.width // decoder.scale
    _check_positions(model, decoder.scale * int(config.patch_size) * int(config.pos_embed_max_size))
    dtype = getattr(torch, model.dtype)
    home = model.prompt_encoder
    start = device if home == "resident" else torch.device("cpu")
    parts = load_text_parts(base, t5=model.t5 and has_t5(base), dtype=dtype, device=start)
    check_widths(parts, config, base)
    denoiser = Sd3Denoiser(stock)
    denoiser.encoder_modules = linear_names(parts)
    denoiser.gradient_checkpointing = model.gradient_checkpointing
    place = Destination(denoiser, stored_dtype(model) if unread else dtype, device, unread=unread)
    report = load_strictly(files, stock, [place], skip_keys=skip_keys, seed=seed)
    denoiser.pos_embed.keep_only(height, width, device)
    return Family(
        name="sd3",
        encoder=Sd3PromptEncoder(parts, stock, device, home=home),
        denoiser=denoiser,
        decoder=decoder,
        latent_shape=(int(config.in_channels), 1, height, width),
        clamp_x0=False,
        lora_prefix="transformer",
        report=report,
        stored=StoredWeights(tuple(files), tuple(skip_keys), seed) if unread else None,
    )


def empty_transformer(folder: Path) -> SD3Transformer2DModel:
    """Build the transformer of `folder/config.json` without memory for its parameters."""
    config = transformer_config(folder, SD3Transformer2DModel, "sd3")
    if not config.get("pos_embed_max_size", 96):
        raise CheckpointUnusable(f"{folder} has no table of positions: pos_embed_max_size is not set")
    with torch.device("meta"):
        stock: SD3Transformer2DModel = SD3Transformer2DModel.from_config(config)
    made: Any = stock.config
    if made.in_channels != stock.out_channels:
        raise CheckpointUnusable(f"{folder} makes {stock.out_channels} channels of {made.in_channels}")
    return stock


def has_t5(base: Path) -> bool:
    """False when model_index.json lists the third text encoder as absent, `[null, null]`."""
    return bool(read_json(base / "model_index.json").get("text_encoder_3") != [None, None])


def _check_positions(model: Model, largest: int) -> None:
    findings = [
        Finding("media-shape", f"model.{key}", f"is {n}, and the base has positions for {largest} pixels at most")
        for key, n in (("height", model.height), ("width", model.width))
        if n > largest
    ]
    if findings:
        raise ProfileRefused(findings)
