"""The Triton kernels behind `rows`: one program for each row, which reads it once and keeps it in registers.

Imported only where there is Triton. A kernel takes rows to lie end to end in memory, or is told their strides, in
elements; what lies otherwise is copied first. Numbers that are not finite stay so: a row that has one keeps it,
whatever it is scaled by. A float is always a constant of its kernel: compiled code hands others over in double
precision, and all that they meet becomes that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8
"""Of a row's program. With four, rows of 12,288 no longer fit in the registers of an H200: twice as slow."""


@triton.jit  # type: ignore[untyped-decorator]
def _round(x, row, at, inside, width, rounded, scales, largest: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale a row's largest magnitude to `largest` and store it rounded, with what to multiply it by."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / largest
    tl.store(scales + row, scale)
    # Nothing exceeds the largest by more than division rounds, which the format rounds off again.
    tl.store(rounded + row * width + at, (x / scale).to(rounded.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(  # type: ignore[no-untyped-def]
    x, weight, rounded, scales, exact, width,
    eps: tl.constexpr, keeps: tl.constexpr, largest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = at < width
    numbers = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    result = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps) * factors
    if keeps:
        tl.store(exact + row * width + at, result.to(exact.dtype.element_ty), mask=inside)
    _round(result, row, at, inside, width, rounded, scales, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    gate, up, rounded, scales, exact, width, keeps: tl.constexpr, largest: tl.constexpr, block: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = at < width
    opening = tl.load(gate + row * width + at, mask=inside, other=0.0).to(tl.float32)
    result = opening * tl.sigmoid(opening) * tl.load(up + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if keeps:
        tl.store(exact + row * width + at, result.to(exact.dtype.element_ty), mask=inside)
    _round(result, row, at, inside, width, rounded, scales, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _finished(  # type: ignore[no-untyped-def]
    out, normaliser, queries, keys, repeats, rounded, scales, exact, length, images, heads, grouped, size,
    out_b, out_h, out_n, query_b, query_h, query_n, key_b, key_h, key_l,
    root: tl.constexpr, largest: tl.constexpr, keeps: tl.constexpr, rounds: tl.constexpr,
    over: tl.constexpr, along: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, place = row // images, row % images
    head, at = tl.arange(0, over), tl.arange(0, along)
    inside = (head < heads)[:, None] & (at < size)[None, :]
    query = tl.load(
        queries + batch * query_b + place * query_n + head[:, None] * query_h + at[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    last = keys + batch * key_b + (length - 1) * key_l + (head // grouped)[:, None] * key_h + at[None, :]
    logit = tl.sum(query * tl.load(last, mask=inside, other=0.0).to(tl.float32), 1) * root
    whole = tl.load(normaliser + (batch * heads + head) * images + place, mask=head < heads, other=0.0)
    surplus = tl.load(repeats + batch) * tl.exp(logit - whole)
    result = tl.load(
        out + batch * out_b + place * out_n + head[:, None] * out_h + at[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    result = tl.where(inside, result / (1.0 - surplus)[:, None], 0.0)
    column = head[:, None] * size + at[None, :]
    if keeps:
        tl.store(exact + row * heads * size + column, result.to(exact.dtype.element_ty), mask=inside)
    if rounds:
        scale = tl.maximum(tl.max(tl.max(tl.abs(result), 1), 0), 1e-12) / largest
        tl.store(scales + row, scale)
        tl.store(rounded + row * heads * size + column, (result / scale).to(rounded.dtype.element_ty), mask=inside)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _room(like: Tensor, rows: int, width: int, keeps: bool, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for a row's rounded numbers, its scale, and itself, which is a stand-in where it is not kept."""
    scales = like.new_empty(rows, 1, dtype=torch.float32)
    exact = like.new_empty((rows, width) if keeps else (1, 1))
    return torch.empty(rows, width, dtype=kind, device=like.device), scales, exact


def _side_by_side(x: Tensor) -> Tensor:
    """x, of which the numbers of the last dimension are neighbours in memory: itself or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def normed(x: Tensor, weight: Tensor, eps: float, keeps: bool, kind: torch.dtype, largest: float) -> Any:
    """x [rows, n] -> rounded, scales [rows, 1], exact."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, width = x.shape
    rounded, scales, exact = _room(x, rows, width, keeps, kind)
    _normed[(rows,)](
        x, weight, rounded, scales, exact, width,
        eps=eps, keeps=keeps, largest=largest, block=_power(width), num_warps=WARPS,
    )  # fmt: skip
    return rounded, scales, exact


def gated(gate: Tensor, up: Tensor, keeps: bool, kind: torch.dtype, largest: float) -> Any:
    """Both [rows, n] -> rounded, scales [rows, 1], exact."""
    gate, up = gate.contiguous(), up.contiguous()
    rows, width = gate.shape
    rounded, scales, exact = _room(gate, rows, width, keeps, kind)
    _gated[(rows,)](
        gate, up, rounded, scales, exact, width, keeps=keeps, largest=largest, block=_power(width), num_warps=WARPS
    )
    return rounded, scales, exact


def finished(
    out: Tensor,
    normaliser: Tensor,
    queries: Tensor,
    keys: Tensor,
    repeats: Tensor,
    keeps: bool,
    rounds: bool,
    kind: torch.dtype,
    largest: float,
) -> Any:
    """out and queries [B, heads, N, D], keys [B, kv_heads, L, D] -> rounded, scales, exact of B * N rows."""
    out, queries, keys = _side_by_side(out), _side_by_side(queries), _side_by_side(keys)
    normaliser, repeats = normaliser.contiguous(), repeats.contiguous()
    batch, heads, images, size = out.shape
    rows, width = batch * images, heads * size
    rounded, scales, exact = _room(out, rows if rounds else 1, width if rounds else 1, False, kind)
    if keeps:
        exact = out.new_empty(rows, width)
    _finished[(rows,)](
        out, normaliser, queries, keys, repeats, rounded, scales, exact,
        keys.shape[2], images, heads, heads // keys.shape[1], size,
        out.stride(0), out.stride(1), out.stride(2),
        queries.stride(0), queries.stride(1), queries.stride(2),
        keys.stride(0), keys.stride(1), keys.stride(2),
        root=size**-0.5, largest=largest, keeps=keeps, rounds=rounds, over=_power(heads), along=_power(size),
        num_warps=WARPS,
    )  # fmt: skip
    return rounded, scales, exact
