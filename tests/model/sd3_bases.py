"""Small random Stable Diffusion 3 bases, tokenizers and all, and the stock pipeline to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WIDTH = 24
# Head count and inner sizes are such that shards over two ranks are uneven where they can be.
SMALL: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 32,
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 12,
}
SD35: dict[str, Any] = {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
VARIANTS: dict[str, dict[str, Any]] = {"sd3": {}, "sd35": SD35}
VAE: dict[str, Any] = {
    "block_out_channels": (4, 4, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "sample_size": 64,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def randomise(module: torch.nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """Random everything: a swapped norm or a forgotten bias must show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            value = 0.2 * noise + name.endswith("weight")  # of a norm
        else:
            value = 1.2 * noise * (parameter.numel() // parameter.shape[0]) ** -0.5
        parameter.data = value.to(dtype)
    return module.eval()


def build_sd3(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> SD3Transformer2DModel:
    """A stock transformer; its table of positions stays float32."""
    with torch.random.fork_rng(devices=[]):
        stock: Any = SD3Transformer2DModel(**{**SMALL, **changes})
    randomise(stock, seed, dtype)
    return stock


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-level, without merges: every character is a token or two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(c + "</w>" for c in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[], model_max_length=20)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte and an end token, padded with another."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<pad>", "</s>", *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", pad_token="<pad>", model_max_length=512)


def build_clip(seed: int, hidden: int, projection: int) -> Any:
    config = CLIPTextConfig(
        vocab_size=514, hidden_size=hidden, intermediate_size=20, projection_dim=projection, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=20, bos_token_id=512, eos_token_id=513, pad_token_id=513,
    )  # fmt: skip
    return randomise(CLIPTextModelWithProjection(config), seed)


def build_t5(seed: int) -> Any:
    config = T5Config(
        vocab_size=258, d_model=32, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return randomise(T5EncoderModel(config), seed)


def build_pipeline(variant: str = "sd35", *, t5: bool = True, shift: float = 3.0, **changes: Any) -> Any:
    """A whole stock pipeline with UniPC in place of its Euler scheduler."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae: Any = AutoencoderKL(**VAE)
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
        pipeline: Any = StableDiffusion3Pipeline(
            transformer=build_sd3(**VARIANTS[variant], **changes),
            scheduler=scheduler,
            vae=vae.eval(),
            text_encoder=build_clip(1, 12, 8),
            tokenizer=clip_tokenizer(),
            text_encoder_2=build_clip(2, 16, 12),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=build_t5(3) if t5 else None,
            tokenizer_3=t5_tokenizer() if t5 else None,
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_sd3_base(folder: Path, variant: str = "sd35", *, t5: bool = True, **changes: Any) -> Path:
    """What diffusers itself writes for the pipeline; `changes` are the transformer's."""
    build_pipeline(variant, t5=t5, **changes).save_pretrained(folder)
    return folder
