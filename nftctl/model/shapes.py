"""The geometry of the bases that `rehearsal` writes: a name, and the configs of the parts. Loads no torch.

Owns the names that the command line lists. What a config leaves out is its class's default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Shape:
    """A base by the configs of its parts. `transformer` holds what differs from the class's defaults.

    text   configs of the text encoders in the order of the base's folders; empty where the transformer reads token ids
    """

    transformer: dict[str, Any] = field(default_factory=dict)
    vae: dict[str, Any] = field(default_factory=dict)
    family: Literal["cosmos3", "sd3"] = "cosmos3"
    text: tuple[dict[str, Any], ...] = ()


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
SMALL_VAE = {"base_dim": 32, "z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
_NARROW = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 4}

SD3_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_SD35_MEDIUM = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "dual_attention_layers": list(range(13)),
}
_CLIP = {"vocab_size": 49408, "max_position_embeddings": 77}
_CLIP_L = {**_CLIP, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_CLIP_G = {**_CLIP, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
_SD3_CLIPS = (
    {**_CLIP_L, "projection_dim": 768, "hidden_act": "quick_gelu"},
    {**_CLIP_G, "projection_dim": 1280, "hidden_act": "gelu"},
)
_T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
_SMALL_CLIP = {"vocab_size": 514, "max_position_embeddings": 77, "num_hidden_layers": 2, "num_attention_heads": 2}

SHAPES = {
    "cosmos3-nano": Shape({}, WAN_2_2),
    "cosmos3-2b": Shape({**_NARROW, "num_hidden_layers": 22, "vocab_size": 32768}, SMALL_VAE),
    "cosmos3-tiny": Shape(
        {**_NARROW, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 300, "rope_axes_dim": [4, 2, 2]},
        {**SMALL_VAE, "base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    ),
    "sd35-medium": Shape(_SD35_MEDIUM, SD3_VAE, "sd3", _SD3_CLIPS),
    "sd35-medium-t5": Shape(_SD35_MEDIUM, SD3_VAE, "sd3", (*_SD3_CLIPS, _T5_XXL)),
    "sd3-tiny": Shape(
        {**_SD35_MEDIUM, "num_layers": 3, "num_attention_heads": 3, "attention_head_dim": 8, "sample_size": 32}
        | {"joint_attention_dim": 32, "caption_projection_dim": 24, "pooled_projection_dim": 20}
        | {"pos_embed_max_size": 24, "dual_attention_layers": [0, 1]},
        {**SD3_VAE, "block_out_channels": [4, 4, 8, 8], "layers_per_block": 1, "norm_num_groups": 2},
        "sd3",
        (
            {**_SMALL_CLIP, "hidden_size": 12, "intermediate_size": 20, "projection_dim": 8},
            {**_SMALL_CLIP, "hidden_size": 16, "intermediate_size": 20, "projection_dim": 12},
        ),
    ),
}
"""`cosmos3-nano` is NVIDIA's geometry (15.2 B parameters, 6.97 B of them denoising), `sd35-medium` that of Stable
Diffusion 3.5 Medium without the T5 encoder, which is optional there (2.24 B denoising; with `-t5` 4.8 B more that read
prompts); the others are narrower kin."""

REHEARSAL_SHAPES = tuple(SHAPES)
"""The names, for help texts."""
