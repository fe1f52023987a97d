"""The DiffusionNFT objective as per-sample terms, so that any micro-batching gives the same sums.

Time runs from 0 (data) to 1 (noise): x_t = (1 - t) x0 + t eps, and the target velocity is eps - x0. With
e = target - v_old and d = v - v_old, the implicit velocities v_old +- beta d miss x0 by t (e - beta d) and
t (e + beta d); neither they nor the predicted images are ever built. Computes in at least float32, reads no value on
the host, and refuses a missing reference when the penalty has weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_FLOOR = 1e-5
"""Least mean error that normalises a branch."""

METRICS = ("policy_loss", "kl_loss", "positive_error", "negative_error", "old_gap")
"""Order of `Terms.sums`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Per-sample terms [B] of a micro-batch. `policy` and `kl` carry their coefficients and the gradient; the rest are
    detached: mean |x0 error| of both branches before the floor, and the mean squared distance to the old velocity."""

    policy: Tensor
    kl: Tensor
    positive_error: Tensor
    negative_error: Tensor
    old_gap: Tensor

    def loss(self, count: int) -> Tensor:
        """Sum of this micro-batch's terms over `count`, the (row, timestep) pairs of the *whole* optimizer step on this
        rank: the losses of all micro-batches then add up to the mean, however they were cut."""
        return (self.policy + self.kl).sum() / count

    def sums(self) -> Tensor:
        """Detached float64 sums over the micro-batch in the order of `METRICS`: add them over micro-batches and ranks,
        divide once by the number of pairs."""
        terms = (self.policy, self.kl, self.positive_error, self.negative_error, self.old_gap)
        return torch.stack([term.detach().to(torch.float64).sum() for term in terms])


def noisy(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x0 + t eps for x0, eps [B, ...] and t [B]."""
    t = _per_sample(t, x0)
    return (1 - t) * x0 + t * eps


def branch_residuals(v: Tensor, v_old: Tensor, target: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """target - (v_old + beta d) and target - (v_old - beta d), with d = v - v_old."""
    e, step = target - v_old, beta * (v - v_old)
    return e - step, e + step


def nft_terms(
    v: Tensor,
    v_old: Tensor | None,
    v_ref: Tensor | None,
    x0: Tensor,
    eps: Tensor,
    t: Tensor,
    r: Tensor,
    *,
    beta: float,
    kl_beta: float,
    scale: float,
) -> Terms:
    """Terms of B (sample, timestep) pairs; specification of the loss, per sample, means over all other dimensions:

        w+- = max(mean |x0 error of v+-|, 1e-5)             no gradient
        policy = scale [ r mean(error+ ^2)/w+ + (1 - r) mean(error- ^2)/w- ] / beta
        kl = kl_beta mean (v - v_ref)^2                     exactly 0 and without gradient at kl_beta 0

    Args:
        v: policy velocity [B, ...], with gradient.
        v_old: old policy's velocity; None where old and policy are the same weights: v itself, detached.
        v_ref: reference velocity; needed only when kl_beta > 0, else not read.
        x0, eps: final latent of the rollout and the training noise, shaped like v.
        t, r: time in (0, 1) and optimality in [0, 1], [B].
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    v, x0, eps, t, r = (value.to(dtype) for value in (v, x0, eps, t, r))
    anchor = v.detach() if v_old is None else v_old.detach().to(dtype)
    _check_shapes(v, anchor, x0, eps, t, r)
    plus, minus = branch_residuals(v, anchor, eps - x0, beta)
    loss_plus, error_plus = _branch(plus, t)
    loss_minus, error_minus = _branch(minus, t)
    return Terms(
        policy=scale / beta * (r * loss_plus + (1 - r) * loss_minus),
        kl=_penalty(v, v_ref, kl_beta),
        positive_error=error_plus,
        negative_error=error_minus,
        old_gap=_mean(v.detach().sub(anchor).square()),
    )


def _branch(residual: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Self-normalised squared x0 error and the mean absolute x0 error (detached), both [B]."""
    error = t * _mean(residual.detach().abs())
    return t.square() * _mean(residual.square()) / error.clamp_min(WEIGHT_FLOOR), error


def _penalty(v: Tensor, v_ref: Tensor | None, kl_beta: float) -> Tensor:
    if kl_beta == 0:
        return torch.zeros(v.shape[0], dtype=v.dtype, device=v.device)
    if v_ref is None:
        raise ValueError(f"kl_beta {kl_beta} needs the reference velocity")
    if v_ref.shape != v.shape:
        raise ValueError(f"the reference velocity has shape {tuple(v_ref.shape)}, the policy's {tuple(v.shape)}")
    return kl_beta * _mean((v - v_ref.detach().to(v.dtype)).square())


def _check_shapes(v: Tensor, v_old: Tensor, x0: Tensor, eps: Tensor, t: Tensor, r: Tensor) -> None:
    # A batch of shape [B, 1] against [B] would broadcast to [B, B] in silence.
    shapes = {name: tuple(value.shape) for name, value in {"v": v, "v_old": v_old, "x0": x0, "eps": eps}.items()}
    if len(set(shapes.values())) > 1 or v.ndim < 2:
        raise ValueError(f"velocities, x0 and noise must share one shape [B, ...], got {shapes}")
    if t.shape != v.shape[:1] or r.shape != v.shape[:1]:
        raise ValueError(f"t and r must have shape [{v.shape[0]}], got {tuple(t.shape)} and {tuple(r.shape)}")


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
