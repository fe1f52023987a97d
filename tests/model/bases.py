"""Small random Cosmos3 bases written to disk, and the stock forward to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer, UniPCMultistepScheduler
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# No width is divisible by 4, so that shards are uneven.
SMALL: dict[str, Any] = {
    "hidden_size": 30,
    "head_dim": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 46,
    "num_hidden_layers": 3,
    "latent_channel": 3,
    "latent_patch_size": 2,
    "patch_latent_dim": 12,
    "rope_axes_dim": (2, 2, 2),
    "rope_theta": 1e4,
    "vocab_size": 300,
    "unified_3d_mrope_temporal_modality_margin": 64,
}

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_transformer(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Cosmos3OmniTransformer:
    """A stock transformer whose norms and biases are random too: a swapped one must show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        stock = Cosmos3OmniTransformer(**{**SMALL, **changes})
    for parameter in stock.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
        parameter.data = (1.0 if parameter.dim() == 1 else 0.0) + noise * scale
    kept = set(stock.time_embedder.parameters())
    for parameter in stock.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter in kept else dtype)
    return stock.eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without merges: any text has an encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|vision_start|>", "<|system|>", "<|user|>", "<|assistant|>"]
    raw.add_special_tokens([AddedToken(text, special=True) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", chat_template=CHAT)


def write_pixel_base(folder: Path, stock: Cosmos3OmniTransformer) -> Path:
    """A base folder without VAE, whose latents are pixels."""
    stock.save_pretrained(folder / "transformer")
    build_tokenizer().save_pretrained(folder / "tokenizer")
    index = {"_class_name": "Cosmos3OmniPipeline", "vae": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def write_vae_base(folder: Path) -> Path:
    """What diffusers itself writes for a whole pipeline with a Wan VAE of 16 channels."""
    vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    stock = build_transformer(latent_channel=16, patch_latent_dim=64)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    pipeline = Cosmos3OmniPipeline(stock, build_tokenizer(), vae, scheduler, enable_safety_checker=False)
    pipeline.save_pretrained(folder)
    return folder


class FloatTimesteps(UniPCMultistepScheduler):
    """Upstream's solver, feeding the model the sigmas that it integrates over, not their integer parts."""

    def set_timesteps(self, *arguments: Any, **options: Any) -> None:
        super().set_timesteps(*arguments, **options)
        self.timesteps = self.sigmas[:-1] * 1000


def stock_velocity(
    stock: Cosmos3OmniTransformer, ids: list[int], x: torch.Tensor, t: float, fps: float = 24.0, compression: int = 4
) -> torch.Tensor:
    """diffusers' own forward of one sample: x [1, C, T, H, W], t in [0, 1000]."""
    pipeline = Cosmos3OmniPipeline.__new__(Cosmos3OmniPipeline)
    object.__setattr__(pipeline, "transformer", stock)
    object.__setattr__(pipeline, "vae_scale_factor_temporal", compression)
    text = pipeline._prepare_text_segment(ids, "cpu")
    vision = pipeline._prepare_vision_segment(
        x, False, text["vision_start_temporal_offset"], fps, len(ids), torch.device("cpu")
    )
    tokens = vision["num_vision_tokens"]
    sample, _, _ = stock(
        input_ids=text["input_ids"],
        text_indexes=text["text_indexes"],
        position_ids=torch.cat([text["text_mrope_ids"], vision["vision_mrope_ids"]], dim=1),
        und_len=len(ids),
        sequence_length=len(ids) + tokens,
        vision_tokens=[x.to(stock.dtype)],
        vision_token_shapes=vision["vision_token_shapes"],
        vision_sequence_indexes=vision["vision_sequence_indexes"],
        vision_mse_loss_indexes=vision["vision_mse_loss_indexes"],
        vision_timesteps=torch.full((tokens,), t),
        vision_noisy_frame_indexes=vision["vision_noisy_frame_indexes"],
        return_dict=False,
    )
    return sample[0].float()
