"""Stable Diffusion 3's denoiser: the stock transformer's blocks under their own names, read at float timesteps.

Serves SD3 and SD3.5 (dual attention layers, normed queries and keys). Every row of a batch brings its own prompt and
its own sigma. Refuses more than one frame, and latents that are no whole patches or larger than the position table.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

from nftctl.model.family import Conditioning, Denoiser, Reading
from nftctl.model.sd3_encoder import PromptEmbeds


class PatchEmbedding(nn.Module):
    """Latents -> tokens, and positions cut from the middle of a square table, as stock does for every size.

    The table of SD3.5-medium is as large as a fifth of its weights, and a run needs one cut of it: see `keep_only`.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.proj = stock.proj
        self.patch = int(stock.patch_size)
        self.side = int(stock.pos_embed_max_size)
        self.scaling = (int(stock.base_size), float(stock.interpolation_scale))
        self.register_buffer("pos_embed", stock.pos_embed)
        self.kept: tuple[int, int] | None = None

    def computed(self, leaf: str) -> Tensor:
        """The table as a new transformer has it, float32 [1, side * side, width]."""
        base_size, scale = self.scaling
        width = self.proj.out_channels
        table: Tensor = get_2d_sincos_pos_embed(
            width, self.side, base_size=base_size, interpolation_scale=scale, output_type="pt"
        )
        return table.float()[None]

    def keep_only(self, height: int, width: int, device: torch.device) -> None:
        """Drop the table but for the positions of latents [.., height, width], kept in float32 on `device`."""
        kept = self._cut(height, width).to(device, torch.float32, copy=True)
        del self.pos_embed
        self.register_buffer("pos_embed", kept, persistent=False)
        self.kept = (height, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, H, W] -> [B, N, width]."""
        tokens = self.proj(x.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)
        return (tokens + self._positions(x.shape[-2], x.shape[-1])).to(tokens.dtype).contiguous()

    def _positions(self, height: int, width: int) -> Tensor:
        if self.kept is None:
            return self._cut(height, width)
        if self.kept != (height, width):
            raise ValueError(f"the denoiser was loaded for latents of {self.kept}, got {(height, width)}")
        return cast(Tensor, self.pos_embed)

    def _cut(self, height: int, width: int) -> Tensor:
        rows, columns = height // self.patch, width // self.patch
        if height % self.patch or width % self.patch or max(rows, columns) > self.side:
            raise ValueError(
                f"latents of {height} x {width} must be whole patches of {self.patch}, {self.side} a side at most"
            )
        top, left = (self.side - rows) // 2, (self.side - columns) // 2
        table = cast(Tensor, self.pos_embed).view(1, self.side, self.side, -1)
        return table[:, top : top + rows, left : left + columns].reshape(1, rows * columns, -1)


class TailAttention(JointAttnProcessor2_0):
    """Stock's attention over image and prompt tokens, and the same where one prompt token stands for many equal ones.

    Equal prompt tokens stay equal in every block, since nothing tells their places apart. So one of them goes through
    the linear layers, and only where it is a key it is as many as it stands for: the same sums, term by term.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        tail: int = 1,
    ) -> Any:
        """Of prompt tokens [B, L, width] the last stands for `tail`; returns what stock does for the tokens given."""
        if encoder_hidden_states is None or tail == 1:
            given: Any = hidden_states
            return super().__call__(attn, given, encoder_hidden_states, attention_mask)
        image, prompt = hidden_states.shape[1], encoder_hidden_states
        q, q_prompt = self._heads(attn, attn.to_q(hidden_states)), self._heads(attn, attn.add_q_proj(prompt))
        k, k_prompt = self._heads(attn, attn.to_k(hidden_states)), self._heads(attn, attn.add_k_proj(prompt))
        v, v_prompt = self._heads(attn, attn.to_v(hidden_states)), self._heads(attn, attn.add_v_proj(prompt))
        if attn.norm_q is not None:
            q, k = attn.norm_q(q), attn.norm_k(k)
        if attn.norm_added_q is not None:
            q_prompt, k_prompt = attn.norm_added_q(q_prompt), attn.norm_added_k(k_prompt)
        mixed = F.scaled_dot_product_attention(
            torch.cat([q, q_prompt], dim=2),
            torch.cat([k, k_prompt, k_prompt[:, :, -1:].expand(-1, -1, tail - 1, -1)], dim=2),
            torch.cat([v, v_prompt, v_prompt[:, :, -1:].expand(-1, -1, tail - 1, -1)], dim=2),
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        of_image, of_prompt = mixed[:, :image], mixed[:, image:]
        return attn.to_out[0](of_image), of_prompt if attn.context_pre_only else attn.to_add_out(of_prompt)

    @staticmethod
    def _heads(attn: Any, x: Tensor) -> Tensor:
        return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)


class Sd3Denoiser(Denoiser):
    """The transformer without what it does not need here. Differentiable; shares parameters with `stock`."""

    def __init__(self, stock: SD3Transformer2DModel) -> None:
        super().__init__()
        config: Any = stock.config
        self.channels = int(config.in_channels)
        self.pos_embed = PatchEmbedding(stock.pos_embed)
        self.time_text_embed = stock.time_text_embed
        self.context_embedder = stock.context_embedder
        self.transformer_blocks = stock.transformer_blocks
        for name, part in self.transformer_blocks.named_modules():
            if name.endswith((".attn", ".attn2")):
                cast(Any, part).set_processor(TailAttention())
        self.norm_out, self.proj_out = stock.norm_out, stock.proj_out
        self.forwards = 0

    @property
    def width(self) -> int:
        return int(self.proj_out.in_features)

    def tokens(self, latent_shape: tuple[int, int, int, int]) -> int:
        return (latent_shape[2] // self.pos_embed.patch) * (latent_shape[3] // self.pos_embed.patch)

    def shard_units(self) -> list[nn.Module]:
        """The blocks. What is left, embedders and output layer, is small and of the same precision."""
        return list(self.transformer_blocks)

    def compile_units(self) -> list[nn.Module]:
        return list(self.transformer_blocks)

    def velocity(self, x: Tensor, sigma: Tensor, reading: Reading) -> Tensor:
        embeds, pooled, tail = cast(tuple[Tensor, Tensor, int], reading)
        hidden = self.pos_embed(x[:, :, 0])
        temb = self.time_text_embed(sigma.float() * 1000.0, pooled.to(hidden.dtype))
        context = self.context_embedder(embeds.to(hidden.dtype))
        attention = {"tail": tail} if tail > 1 else None
        for block in self.transformer_blocks:
            context, hidden = self.run(block, hidden, context, temb, attention)
        return self._unpatchify(self.proj_out(self.norm_out(hidden, temb)), x.shape).float()

    def reading(self, x: Tensor, conditioning: Conditioning, *, fixed: bool = False) -> Reading:
        """Embeddings of the prompt tokens that differ, pooled embeddings, and how many tokens the last one stands for.

        All prompts have one number of tokens, so `fixed` changes nothing.
        """
        prompts = cast(PromptEmbeds, conditioning)
        last = prompts.embeds.shape[1] - prompts.tail + 1
        return prompts.embeds[:, :last], prompts.pooled, prompts.tail

    def check(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> None:
        if x.dim() != 5 or x.shape[1] != self.channels or x.shape[2] != 1:
            raise ValueError(f"x must be [B, {self.channels}, 1, H, W], got {tuple(x.shape)}")
        if sigma.shape != x.shape[:1] or conditioning.rows != x.shape[0]:
            raise ValueError(f"x has {x.shape[0]} rows, sigma {tuple(sigma.shape)}, conditioning {conditioning.rows}")

    def _unpatchify(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """[B, N, patch * patch * C], channel fastest -> [B, C, 1, H, W]. Never a view: FSDP hooks what is returned."""
        batch, channels, _, height, width = shape
        patch = self.pos_embed.patch
        x = tokens.reshape(batch, height // patch, width // patch, patch, patch, channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(shape).clone(memory_format=torch.contiguous_format)
