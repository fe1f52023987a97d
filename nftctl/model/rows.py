"""What lies between two products of a layer, row by row: norms and gates of FP8 rollouts, and the end of attention.

On a GPU each is one kernel that reads a row once; the compiler makes several of it, or reads it twice. Elsewhere, and
where gradients are wanted, the same sums in plain torch. Owns how a row is rounded to e4m3. Nothing here has a
backward. Refuses nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from nftctl.model import rowkernels
except ImportError:  # torch for CPUs comes without Triton
    rowkernels = None  # type: ignore[assignment]

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite e4m3 number."""


class Rounded(NamedTuple):
    """Rows in e4m3, for a product with quantised weights.

    values  e4m3 [rows, n]
    scales  float32 [rows, 1]: what to multiply them by
    exact   the rows before they were rounded, [..., n], for adapters; None where none reads them
    shape   of the rows: what comes out of a product is [*shape, out]
    """

    values: Tensor
    scales: Tensor
    exact: Tensor | None
    shape: tuple[int, ...]


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of x [rows, n] to e4m3 after scaling its largest magnitude to 448; a row of zeros stays zeros.

    Returns e4m3 [rows, n] and its scales, float32 [rows, 1]: x is about their product.
    """
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def rounded(x: Tensor) -> Rounded:
    """x [..., n] as it is, rounded."""
    return Rounded(*quantise(x.flatten(0, -2)), x, tuple(x.shape[:-1]))


def has_kernels(x: Tensor) -> bool:
    """Whether these functions are kernels of their own for numbers like x, of which no gradient is wanted."""
    return rowkernels is not None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def normed(x: Tensor, norm: Any, *, keeps: bool) -> Rounded:
    """x [..., n] through an RMS norm with `weight` and `eps`, rounded. `keeps`: something reads it unrounded too."""
    if not has_kernels(x):
        return rounded(norm(x))
    parts = rowkernels.normed(x.flatten(0, -2), norm.weight, norm.eps, keeps, E4M3, LARGEST)
    return _rounded(parts, x.shape, keeps)


def gated(gate: Tensor, up: Tensor, *, keeps: bool) -> Rounded:
    """silu(gate) * up, both [..., n], rounded."""
    if not has_kernels(gate):
        return rounded(F.silu(gate) * up)
    parts = rowkernels.gated(gate.flatten(0, -2), up.flatten(0, -2), keeps, E4M3, LARGEST)
    return _rounded(parts, gate.shape, keeps)


def finished(
    out: Tensor, normaliser: Tensor, queries: Tensor, keys: Tensor, repeats: Tensor, *, keeps: bool, rounds: bool
) -> Tensor | Rounded:
    """Attention's result without what repeats of a prompt's last key add to its denominator: [B, N, heads * D].

    out and queries [B, heads, N, D], normaliser [B, heads, N] (the logarithm of each denominator, repeats included),
    keys of the filled prompts [B, kv_heads, L, D], repeats float32 [B, 1, 1]. With `rounds` it comes rounded.
    """
    if not has_kernels(out):
        whole = true_share(out, normaliser, queries, keys, repeats)[0].transpose(1, 2).flatten(2)
        return rounded(whole) if rounds else whole
    parts = rowkernels.finished(out, normaliser, queries, keys, repeats, keeps or not rounds, rounds, E4M3, LARGEST)
    shape = (out.shape[0], out.shape[2], out.shape[1] * out.shape[3])
    return _rounded(parts, shape, keeps) if rounds else parts[2].view(shape)


def true_share(
    out: Tensor, normaliser: Tensor, queries: Tensor, keys: Tensor, repeats: Tensor
) -> tuple[Tensor, Tensor]:
    """The corrected result [B, heads, N, D] and its logarithm [B, heads, N]; see `finished`.

    With lse' = log(sum + repeats e^l), l being the last prompt key's logit and sum that over the true keys, a repeat
    adds nothing but e^l to the denominator, since its value is zero: out = out' / (1 - repeats e^(l - lse')). As l is
    a true key's, e^l <= sum, so the divisor is at least 1 / (1 + repeats) and no digits are lost, whatever the logits.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1)).float()
    last = (grouped * keys[:, :, None, -1:].float()).sum(-1).flatten(1, 2) * queries.shape[-1] ** -0.5
    surplus = repeats * torch.exp(last - normaliser)
    return (out / (1 - surplus)[..., None]).to(out.dtype), normaliser + torch.log1p(-surplus)


def _rounded(parts: Any, shape: Any, keeps: bool) -> Rounded:
    values, scales, exact = parts
    return Rounded(values, scales, exact.view(*shape) if keeps else None, tuple(shape[:-1]))
