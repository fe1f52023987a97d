"""Which modules a LoRA target selects, in the denoiser and in the prompt encoder."""

import pytest

from nftctl.profile.t2i import COSMOS3_LORA, SD3_LORA


@pytest.mark.parametrize(
    ("target", "denoiser", "encoder"),
    [
        ("add_q_proj", True, False),
        ("self_attn.to_add_out", True, False),
        ("layers.3.self_attn.add_k_proj", True, False),
        ("mlp_moe_gen.up_proj", True, False),
        ("to_q", False, True),
        ("layers.12.mlp.up_proj", False, True),
        ("up_proj", True, True),
        ("q_proj", False, False),
        ("self_attn", False, False),
        ("", False, False),
    ],
)
def test_scope_of_a_target(target: str, denoiser: bool, encoder: bool) -> None:
    assert COSMOS3_LORA.in_denoiser(target) is denoiser
    assert COSMOS3_LORA.touches_prompt_encoder(target) is encoder


@pytest.mark.parametrize(
    ("target", "denoiser", "encoder"),
    [
        ("attn.to_q", True, False),
        ("to_q", True, False),
        ("attn2.to_out.0", True, False),
        ("transformer_blocks.23.attn.add_k_proj", True, False),
        ("ff_context.net.0.proj", True, False),
        ("ff.net.2", True, False),
        ("norm1_context.linear", True, False),
        ("attn.to_out", False, False),
        ("self_attn.q_proj", False, True),
        ("q", False, True),
        ("layer.1.DenseReluDense.wo", False, True),
        ("pos_embed.proj", False, False),
    ],
)
def test_scope_of_a_target_in_the_other_family(target: str, denoiser: bool, encoder: bool) -> None:
    assert SD3_LORA.in_denoiser(target) is denoiser
    assert SD3_LORA.touches_prompt_encoder(target) is encoder


@pytest.mark.parametrize(
    ("target", "denoiser", "encoder"),
    [
        (r"/layers\.\d+\.self_attn\.add_[qkv]_proj/", True, ""),
        (r"/layers\.35\.mlp_moe_gen\..*/", True, ""),
        (r"/layers\.(1|2)\.mlp.*\.up_proj/", True, "layers.1.mlp.up_proj"),
        ("/proj_in|time_embedder.*/", True, ""),
        ("/add_q_proj/", False, ""),
        (r"/layers\.\*\.self_attn\.add_q_proj/", False, ""),
        ("/.*/", True, "layers.0.self_attn.to_q"),
        ("/lm_head/", False, "lm_head"),
        ("/(/", False, ""),
        ("/", False, ""),
    ],
)
def test_scope_of_a_regular_expression(target: str, denoiser: bool, encoder: str) -> None:
    assert COSMOS3_LORA.in_denoiser(target) is denoiser
    assert COSMOS3_LORA.in_prompt_encoder(target) == encoder
    assert COSMOS3_LORA.touches_prompt_encoder(target) is bool(encoder)


def test_scope_of_a_regular_expression_in_the_other_family() -> None:
    assert SD3_LORA.in_denoiser(r"/transformer_blocks\.37\.attn2?\.to_out\.0/")
    assert not SD3_LORA.in_prompt_encoder(r"/.*\.attn\..*/")
    assert SD3_LORA.in_prompt_encoder("/.*wi_1/") == "encoder.block.0.layer.0.DenseReluDense.wi_1"


def test_the_other_table_holds_every_linear_module_of_its_family() -> None:
    import re

    import torch

    from tests.model.sd3_bases import build_clip, build_sd3, build_t5

    def linear(module: torch.nn.Module) -> set[str]:
        names = (name for name, m in module.named_modules() if isinstance(m, torch.nn.Linear))
        return {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names}

    assert linear(build_sd3(dual_attention_layers=(0,))) == {*SD3_LORA.denoiser}
    known = {*SD3_LORA.prompt_encoder}
    assert linear(build_clip(0, 12, 8)) | linear(build_t5(0)) == known - {"encoder.block.*.layer.*.DenseReluDense.wi"}


def test_the_table_holds_every_linear_module_of_the_family() -> None:
    import re

    import torch
    from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer

    with torch.device("meta"):
        model = Cosmos3OmniTransformer(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            intermediate_size=32, latent_channel=3, latent_patch_size=2, patch_latent_dim=12, rope_axes_dim=[4, 2, 2],
            vocab_size=8,
        )  # fmt: skip
    linear = {
        re.sub(r"\.\d+\.", ".*.", name) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    known = {*COSMOS3_LORA.denoiser, *COSMOS3_LORA.prompt_encoder}
    assert linear <= known
    assert known - linear == {"embed_tokens"}  # an embedding, which LoRA could adapt as well
