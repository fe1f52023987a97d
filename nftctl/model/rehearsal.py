"""Bases with random weights, in diffusers layout and at a production model's true shape, to rehearse a run with.

Written tensor by tensor in files of a bounded size, so that neither the machine that writes nor the one that loads has
to hold the model. Nothing can be learned from such a base; times, memory and resumes are those of the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model.shapes import SHAPES, Shape
from nftctl.tensorfile import STEM, TRANSFORMERS_STEM

FILE_BYTES = 4 << 30
"""A weight file is closed once it is this long."""


def write_base(shape: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the base named `shape` into the new or empty `folder` and return it.

    Raises UsageRefused for an unknown shape, CheckpointUnusable when the folder holds something.
    """
    if shape not in SHAPES:
        raise UsageRefused(f"no shape {shape!r} of a base", hint=f"shapes: {', '.join(sorted(SHAPES))}")
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointUnusable(f"{folder} is not empty", hint="give a folder that does not exist yet")
    write = _write_cosmos3 if SHAPES[shape].family == "cosmos3" else _write_sd3
    write(SHAPES[shape], folder, seed, dtype)
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
    _write_index(folder, "Cosmos3OmniPipeline", {"enable_safety_checker": False, **parts})


def _write_index(folder: Path, pipeline: str, parts: dict[str, Any]) -> None:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, **parts}, indent=2) + "\n")


def _write_sd3(shape: Shape, folder: Path, seed: int, dtype: torch.dtype) -> None:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    from nftctl.model.sd3_denoiser import PatchEmbedding

    scheduler: Any = FlowMatchEulerDiscreteScheduler
    scheduler(shift=3.0).save_pretrained(folder / "scheduler")
    with torch.device("meta"):
        vae: Any = AutoencoderKL(**shape.vae)
    vae.save_config(folder / "vae")
    write_random(vae, folder / "vae", seed=seed, dtype=dtype)
    transformer: Any = SD3Transformer2DModel
    with torch.device("meta"):
        stock = transformer(**shape.transformer)
    stock.save_config(folder / "transformer")
    table = {"pos_embed.pos_embed": PatchEmbedding(stock.pos_embed).computed("pos_embed").to(dtype)}
    write_random(stock, folder / "transformer", seed=seed, dtype=dtype, buffers=table)
    parts: dict[str, Any] = {
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    for n, suffix in enumerate(("", "_2", "_3")):
        classes = [None, None]
        if n < len(shape.text):
            classes = _write_text(shape.text[n], folder, suffix, seed + n, dtype)
        parts[f"text_encoder{suffix}"], parts[f"tokenizer{suffix}"] = (
            [None if name is None else "transformers", name] for name in classes
        )
    _write_index(folder, "StableDiffusion3Pipeline", parts)


def _write_text(config: dict[str, Any], folder: Path, suffix: str, seed: int, dtype: torch.dtype) -> list[Any]:
    """A text encoder and its tokenizer; returns their class names."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    is_t5 = "d_model" in config
    tokenizer = t5_tokenizer() if is_t5 else clip_tokenizer(config["max_position_embeddings"])
    end = tokenizer.eos_token_id
    with torch.device("meta"):
        encoder: Any = (
            T5EncoderModel(T5Config(**config, eos_token_id=end, pad_token_id=tokenizer.pad_token_id))
            if is_t5
            else CLIPTextModelWithProjection(
                CLIPTextConfig(**config, bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end)
            )
        )
    where = folder / f"text_encoder{suffix}"
    encoder.config.architectures = [type(encoder).__name__]
    encoder.config.save_pretrained(where)
    write_random(encoder, where, seed=seed, dtype=dtype, stem=TRANSFORMERS_STEM)
    tokenizer.save_pretrained(folder / f"tokenizer{suffix}")
    return [type(encoder).__name__, type(tokenizer).__name__]


def write_random(
    module: nn.Module,
    folder: Path,
    *,
    seed: int,
    dtype: torch.dtype,
    keep_fp32: tuple[str, ...] = (),
    buffers: Mapping[str, Tensor] | None = None,
    stem: str = STEM,
) -> None:
    """Fill `folder` with a value for every parameter of a meta module: matrices N(0, 1/fan-in), scales 1, biases 0.

    Tables N(0, 1). `buffers` are written as they are given; `stem` is the name that a single file has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    given = buffers or {}
    tables = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    shapes = [(name, p.shape, torch.float32 if name.startswith(keep_fp32) else dtype)
              for name, p in module.named_parameters()]  # fmt: skip
    shapes += [(name, table.shape, table.dtype) for name, table in given.items()]
    files = list(_files(shapes))
    where: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = stem if len(files) == 1 else f"{Path(stem).stem}-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {
            key: given[key] if key in given else _value(key, size, kind, device, generator, table=key in tables)
            for key, size, kind in part
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(size.numel() * kind.itemsize for _, size, kind in shapes)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / f"{stem}.index.json").write_text(json.dumps(index, indent=2) + "\n")


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
    name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator, *, table: bool
) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2 or name.endswith("gamma"):
        return torch.ones(shape, dtype=dtype)
    drawn = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    fan_in = 1.0 if table else shape[1:].numel()
    return (drawn * fan_in**-0.5).cpu()


def clip_tokenizer(longest: int) -> Any:
    """Bytes as tokens between CLIP's own two marks: any prompt has an encoding, cut after `longest` tokens."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(c + "</w>" for c in alphabet), "<|startoftext|>", "<|endoftext|>"]
    made: Any = CLIPTokenizer
    return made(vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=longest)


def t5_tokenizer() -> Any:
    """Bytes as tokens and an end, padded with another token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(["<pad>", "</s>", *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", pad_token="<pad>", model_max_length=512)


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
