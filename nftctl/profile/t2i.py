"""The named text-to-image contracts: what a profile of each name may say.

Owns the table only; preflight compares profiles with it. Group size is not part of a contract.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from nftctl.profile.targets import is_pattern, selects

_MOST_LAYERS = 128  # of any base: a regular expression is tried on the names that there may be


@dataclass(frozen=True, slots=True)
class LoraScope:
    """Linear modules of a family, layer numbers as `*`.

    Only the denoiser may be adapted: what the prompt encoder computes is kept, and would go stale without notice.
    """

    denoiser: tuple[str, ...]
    prompt_encoder: tuple[str, ...]

    def touches_prompt_encoder(self, target: str) -> bool:
        """Whether the target selects a module of the prompt encoder."""
        return bool(self.in_prompt_encoder(target))

    def in_prompt_encoder(self, target: str) -> str:
        """A module of the prompt encoder that the target selects, or empty."""
        return _selected(target, self.prompt_encoder)

    def in_denoiser(self, target: str) -> bool:
        """Whether the target selects a module of the denoiser."""
        return bool(_selected(target, self.denoiser))


def _selected(target: str, names: tuple[str, ...]) -> str:
    if is_pattern(target):
        return next((name for every in names for name in _numbered(every) if selects(target, name)), "")
    target = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", target)
    return next((name for name in names if selects(target, name)), "")


@lru_cache(maxsize=256)
def _numbered(name: str) -> tuple[str, ...]:
    """The name with numbers for its stars: the first counts layers, any other the few parts of one."""
    return tuple(_fill(name, _MOST_LAYERS))


def _fill(name: str, most: int) -> Iterator[str]:
    if "*" not in name:
        yield name
        return
    for number in range(most):
        yield from _fill(name.replace("*", str(number), 1), 4)


@dataclass(frozen=True, slots=True)
class T2iProfile:
    """One contract. Ranges are inclusive; sides are in pixels."""

    name: str
    family: str
    """Model family in the registry."""
    transformer: str
    """Class that the base's transformer/config.json must declare, where it declares one."""
    sides: tuple[int, int, int]
    """Smallest side, largest side, and what each side must be a multiple of."""
    lora: LoraScope
    scheduler: str = "unipc"
    sample_steps: tuple[int, int] = (1, 100)
    sampler_shift: tuple[float, float] = (1.0, 20.0)
    guidance: tuple[float, float] = (0.0, 20.0)
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    templates: bool = True
    """Whether the family's tokenizer can take a system prompt and a resolution sentence."""
    needs_vae: bool = True
    """Whether latents have to be decoded by a VAE; without one, latents are pixels."""
    text_parts: tuple[tuple[str, str], ...] = ()
    """Folders of the base's text encoders, each with that of its tokenizer; empty: the transformer reads tokens itself,
    and VAE and tokenizer may come from elsewhere."""
    embedded: str = ""
    """The packaged set of base and prompts that `embedded` means in a profile of this name; empty: it has none."""
    shifts: tuple[tuple[int, float], ...] = ()
    """(short side in pixels, sampler shift) that the family was trained with; empty: not known."""

    def shift_for(self, short_side: int) -> float | None:
        """The shift of the tier nearest to this short side."""
        return min(self.shifts, key=lambda tier: abs(tier[0] - short_side))[1] if self.shifts else None


_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_PROMPT_ATTENTION = ("to_q", "to_k", "to_v", "to_out")
_MLP = ("gate_proj", "up_proj", "down_proj")

COSMOS3_LORA = LoraScope(
    denoiser=(
        *(f"layers.*.self_attn.{name}" for name in _ATTENTION),
        *(f"layers.*.mlp_moe_gen.{name}" for name in _MLP),
        *("proj_in", "proj_out", "time_embedder.linear_1", "time_embedder.linear_2"),
    ),
    prompt_encoder=(
        *(f"layers.*.self_attn.{name}" for name in _PROMPT_ATTENTION),
        *(f"layers.*.mlp.{name}" for name in _MLP),
        *("embed_tokens", "lm_head"),
    ),
)


_JOINT = ("to_q", "to_k", "to_v", "to_out.*", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_SECOND = ("to_q", "to_k", "to_v", "to_out.*")
_FEED_FORWARD = ("net.*.proj", "net.*")
_CLIP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
_T5 = (
    *(f"SelfAttention.{name}" for name in "qkvo"),
    *(f"DenseReluDense.{name}" for name in ("wi", "wi_0", "wi_1", "wo")),
)

SD3_LORA = LoraScope(
    denoiser=(
        *(f"transformer_blocks.*.attn.{name}" for name in _JOINT),
        *(f"transformer_blocks.*.attn2.{name}" for name in _SECOND),
        *(f"transformer_blocks.*.{ff}.{name}" for ff in ("ff", "ff_context") for name in _FEED_FORWARD),
        *(f"transformer_blocks.*.{norm}.linear" for norm in ("norm1", "norm1_context")),
        *(f"time_text_embed.{part}.linear_{n}" for part in ("timestep_embedder", "text_embedder") for n in (1, 2)),
        *("context_embedder", "norm_out.linear", "proj_out"),
    ),
    prompt_encoder=(
        *(f"text_model.encoder.layers.*.{name}" for name in _CLIP),
        *(f"encoder.block.*.layer.*.{name}" for name in _T5),
        "text_projection",
    ),
)


def _cosmos3(name: str) -> T2iProfile:
    # The shifts are those of NVIDIA's own training configurations.
    return T2iProfile(
        name,
        "cosmos3",
        "Cosmos3OmniTransformer",
        sides=(256, 1024, 16),
        lora=COSMOS3_LORA,
        shifts=((256, 3.0), (480, 5.0), (720, 10.0)),
    )


def _embedded(name: str, packaged: str, *, side: int, vae: bool) -> T2iProfile:
    # Made for one size on a CPU, with a tokenizer that knows the words of its prompts only.
    return T2iProfile(
        name,
        "cosmos3",
        "Cosmos3OmniTransformer",
        sides=(side, side, side),
        lora=COSMOS3_LORA,
        dtypes=("float32",),
        templates=False,
        needs_vae=vae,
        embedded=packaged,
    )


def _sd35_medium(name: str) -> T2iProfile:
    # Sixteen pixels are a patch; 256 to 1440 are the sizes of its training. Its scheduler shifts by 3 at every size.
    return T2iProfile(
        name,
        "sd3",
        "SD3Transformer2DModel",
        sides=(256, 1440, 16),
        lora=SD3_LORA,
        templates=False,
        text_parts=(
            ("text_encoder", "tokenizer"),
            ("text_encoder_2", "tokenizer_2"),
            ("text_encoder_3", "tokenizer_3"),
        ),
        shifts=((512, 3.0),),
    )


T2I_PROFILES: dict[str, T2iProfile] = {
    profile.name: profile
    for profile in (
        _embedded("tiny_t2i_cpu", "digits", side=8, vae=False),
        _embedded("scenes_t2i_cpu", "scenes", side=32, vae=True),
        _cosmos3("cosmos3_nft_t2i_public"),
        _cosmos3("cosmos3_nft_t2i_public_2gpu"),
        _cosmos3("cosmos3_nft_t2i_public_4gpu"),
        _sd35_medium("sd35m_nft_paper"),
        _sd35_medium("sd35m_nft_paper_2gpu"),
    )
}
"""Every name that `rl.profile` may have for images."""
