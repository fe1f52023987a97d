"""The Cosmos3 family: diffusers' transformer split into prompt encoder and denoiser, and a decoder.

Serves every size of `Cosmos3OmniTransformer`, with a Wan VAE or, where the base folder declares that it has none and
its latents are RGB, with pixels as latents. Refuses folders that lack a part, and shapes that the decoder cannot make.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer

from nftctl.errors import CheckpointUnusable, Finding, ProfileRefused
from nftctl.model.cosmos3_denoiser import Cosmos3Denoiser
from nftctl.model.cosmos3_encoder import Cosmos3PromptEncoder, UnderstandingTower
from nftctl.model.cosmos3_tokens import Cosmos3Tokens, load_tokenizer
from nftctl.model.decoder import PixelDecoder, WanDecoder, load_wan
from nftctl.model.family import Family, LoadReport
from nftctl.model.weights import Destination, load_strictly
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
    denoiser_device: torch.device | None = None,
) -> Family:
    """Load a base folder in diffusers layout. `denoiser_device` lets a caller shard before anything is on `device`."""
    stock = empty_transformer(base / "transformer")
    config: Any = stock.config
    decoder: PixelDecoder | WanDecoder
    if is_pixel_base(base, config):
        decoder, scale = PixelDecoder(), 1
    else:
        decoder = load_wan(_part(base, model.vae, "vae", ("vae",)), getattr(torch, model.decode_dtype), device)
        scale = decoder.scale
        _check_channels(decoder, config, base)
    _check_media(model, scale)
    tokenizer = load_tokenizer(_part(base, model.tokenizer, "tokenizer", ("tokenizer", "text_tokenizer")))
    tower, denoiser, report = load_towers(
        base / "transformer",
        stock,
        getattr(torch, model.dtype),
        device,
        denoiser_device or device,
        skip_keys=skip_keys,
        seed=seed,
    )
    tokens = Cosmos3Tokens(
        tokenizer,
        height=model.height,
        width=model.width,
        system_prompt=model.system_prompt,
        resolution_template=model.resolution_template,
    )
    return Family(
        name="cosmos3",
        encoder=Cosmos3PromptEncoder(tower, tokens),
        denoiser=denoiser,
        decoder=decoder,
        latent_shape=(int(config.latent_channel), 1, model.height // scale, model.width // scale),
        clamp_x0=isinstance(decoder, PixelDecoder),
        lora_prefix="transformer",
        report=report,
    )


def load_towers(
    folder: Path,
    stock: Cosmos3OmniTransformer,
    dtype: torch.dtype,
    device: torch.device,
    denoiser_device: torch.device,
    *,
    skip_keys: Sequence[str] = (),
    seed: int = 0,
) -> tuple[UnderstandingTower, Cosmos3Denoiser, LoadReport]:
    """Fill both towers of a meta transformer from its folder; frozen, evaluation mode."""
    tower, denoiser = split(stock)
    report = load_strictly(
        folder,
        stock,
        [Destination(tower, dtype, device), Destination(denoiser, dtype, denoiser_device, KEPT_IN_FP32)],
        optional=UNUSED,
        skip_keys=skip_keys,
        seed=seed,
    )
    # Buffers are not parameters: the rotary frequencies are computed, not loaded.
    tower.rotary_emb.to(device)
    denoiser.rotary_emb.to(denoiser_device)
    return tower, denoiser, report


def empty_transformer(folder: Path) -> Cosmos3OmniTransformer:
    """Build the transformer of `folder/config.json` without memory for its parameters."""
    config = _read_json(folder / "config.json")
    if config.get("_class_name") != Cosmos3OmniTransformer.__name__:
        raise CheckpointUnusable(
            f"{folder} holds a {config.get('_class_name')}, family cosmos3 needs a {Cosmos3OmniTransformer.__name__}"
        )
    with torch.device("meta"):
        stock: Cosmos3OmniTransformer = Cosmos3OmniTransformer.from_config(config)
    made: Any = stock.config
    stock.rotary_emb = type(stock.rotary_emb)(made.head_dim, made.rope_theta, made.rope_axes_dim)
    return stock


def is_pixel_base(base: Path, config: Any) -> bool:
    """True when model_index.json lists the VAE as absent, `"vae": [null, null]`, and latents have three channels."""
    index = _read_json(base / "model_index.json")
    return index.get("vae") == [None, None] and int(config.latent_channel) == 3


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointUnusable(f"{file} cannot be read, so {file.parent} is no diffusers folder") from error
    except ValueError as error:
        raise CheckpointUnusable(f"{file} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointUnusable(f"{file} is not a JSON object")
    return document


def _part(base: Path, given: str, part: str, names: Sequence[str]) -> Path:
    """Folder of the VAE or tokenizer: the profile's, else the base's own."""
    candidates = [Path(given).expanduser()] if given else [base / name for name in names]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise ProfileRefused(
        [
            Finding(
                f"{part}-missing",
                f"model.{part}",
                f"there is no folder {candidates[0]}",
                help=f'set model.{part} = "path/to/{part}"',
            )
        ]
    )


def _check_channels(decoder: WanDecoder, config: Any, base: Path) -> None:
    if decoder.channels != int(config.latent_channel):
        raise CheckpointUnusable(
            f"the VAE has {decoder.channels} latent channels, the transformer in {base} {config.latent_channel}"
        )


def _check_media(model: Model, scale: int) -> None:
    findings = [
        Finding("media-shape", f"model.{key}", f"must be a multiple of {scale}, the VAE's pixels per latent, got {n}")
        for key, n in (("height", model.height), ("width", model.width))
        if n % scale
    ]
    if findings:
        raise ProfileRefused(findings)
