"""Bases with random weights, in diffusers layout and at a production model's true shape, to rehearse a run with.

Written tensor by tensor in files of a bounded size, so that neither the machine that writes nor the one that loads has
to hold the model. Nothing can be learned from such a base; times, memory and resumes are those of the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.tensorfile import STEM

FILE_BYTES = 4 << 30
"""A weight file is closed once it is this long."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A base by the configs of its parts. `transformer` holds what differs from the class's defaults."""

    transformer: dict[str, Any] = field(default_factory=dict)
    vae: dict[str, Any] = field(default_factory=dict)


WAN_2_2 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
_NARROW = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 4}
_SMALL_VAE = {"base_dim": 32, "z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}

SHAPES = {
    "cosmos3-nano": Shape({}, WAN_2_2),
    "cosmos3-2b": Shape({**_NARROW, "num_hidden_layers": 22, "vocab_size": 32768}, _SMALL_VAE),
    "cosmos3-tiny": Shape(
        {**_NARROW, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 300, "rope_axes_dim": [4, 2, 2]},
        {**_SMALL_VAE, "base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    ),
}
"""`cosmos3-nano` is NVIDIA's geometry (15.2 B parameters, 6.97 B of them denoising); the others are narrower kin."""


def write_base(shape: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the base named `shape` into the new or empty `folder` and return it.

    Raises UsageRefused for an unknown shape, CheckpointUnusable when the folder holds something.
    """
    if shape not in SHAPES:
        raise UsageRefused(f"no shape {shape!r} of a base", hint=f"shapes: {', '.join(sorted(SHAPES))}")
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointUnusable(f"{folder} is not empty", hint="give a folder that does not exist yet")
    _write_cosmos3(SHAPES[shape], folder, seed, dtype)
    return folder


def _write_cosmos3(shape: Shape, folder: Path, seed: int, dtype: torch.dtype) -> None:
    from diffusers import AutoencoderKLWan, Cosmos3OmniTransformer, UniPCMultistepScheduler

    with torch.device("meta"):
        modules: dict[str, Any] = {
            "transformer": Cosmos3OmniTransformer(**shape.transformer),
            "vae": AutoencoderKLWan(**shape.vae),
        }
    for name, module in modules.items():
        module.save_config(folder / name)
        write_random(module, folder / name, seed=seed, dtype=dtype, keep_fp32=("time_embedder.",))
    scheduler: Any = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    scheduler.save_pretrained(folder / "scheduler")
    byte_tokenizer().save_pretrained(folder / "text_tokenizer")
    parts = {
        "transformer": ["diffusers", "Cosmos3OmniTransformer"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "sound_tokenizer": [None, None],
    }
    index = {"_class_name": "Cosmos3OmniPipeline", "enable_safety_checker": False, **parts}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_random(
    module: nn.Module, folder: Path, *, seed: int, dtype: torch.dtype, keep_fp32: tuple[str, ...] = ()
) -> None:
    """Fill `folder` with a value for every parameter of a meta module: matrices N(0, 1/fan-in), scales 1, biases 0."""
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(name, p.shape, torch.float32 if name.startswith(keep_fp32) else dtype)
              for name, p in module.named_parameters()]  # fmt: skip
    files = list(_files(shapes))
    where: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = STEM if len(files) == 1 else f"{Path(STEM).stem}-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {key: _value(key, size, kind, device, generator) for key, size, kind in part}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(size.numel() * kind.itemsize for _, size, kind in shapes)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / f"{STEM}.index.json").write_text(json.dumps(index, indent=2) + "\n")


_Entry = tuple[str, torch.Size, torch.dtype]


def _files(shapes: list[_Entry]) -> Iterator[list[_Entry]]:
    part: list[_Entry] = []
    held = 0
    for entry in shapes:
        part.append(entry)
        held += entry[1].numel() * entry[2].itemsize
        if held >= FILE_BYTES:
            yield part
            part, held = [], 0
    if part:
        yield part


def _value(
    name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2 or name.endswith("gamma"):
        return torch.ones(shape, dtype=dtype)
    drawn = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    fan_in = 1.0 if "embed" in name and len(shape) == 2 and "time" not in name else shape[1:].numel()
    return (drawn * fan_in**-0.5).cpu()


def byte_tokenizer() -> Any:
    """Bytes as tokens, and a plain chat template: any prompt has an encoding, of about a token per character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={character: n for n, character in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|vision_start|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
