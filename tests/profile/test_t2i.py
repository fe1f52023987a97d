"""Which modules a LoRA target selects, in the denoiser and in the prompt encoder."""

import pytest

from nftctl.profile.t2i import COSMOS3_LORA


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
