"""Training: what needs no reward is drawn early, then forward and backward, one reduction and one optimizer step.

Owns the optimizer, the trained adapter and the refresh of the moving old policy. Refuses to step on a loss or gradient
that is not finite; the refusal is collective, because every rank sees the terms of all ranks, and one reduced gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from nftctl.algorithm import draws, objective, schedule
from nftctl.algorithm.plan import ForwardPlan, expected_forwards, plan_forwards
from nftctl.errors import TrainingFailed
from nftctl.model.copies import Weights, copies_of
from nftctl.model.family import Conditioning, Family
from nftctl.profile.schema import Profile
from nftctl.roles import stage
from nftctl.roles.trajectory import Trajectory
from nftctl.run.state import RunState
from nftctl.staging import send


@dataclass(slots=True)
class Pairs:
    """The (sample, timestep) pairs of one optimizer step on this rank, sample by sample.

    Tensors are [rows * T, ...] on the device; v_old and v_ref are None where the plan needs no such forward. `v`, with
    its graph, is there where the policy's forward was made before the rewards were.
    """

    plan: ForwardPlan
    t: Tensor
    x0: Tensor
    eps: Tensor
    x_t: Tensor
    v_old: Tensor | None = None
    v_ref: Tensor | None = None
    v: Tensor | None = None


class PolicyRole:
    """Prepares and trains."""

    def __init__(
        self, family: Family, profile: Profile, *, rank: int, device: torch.device, control: dist.ProcessGroup
    ) -> None:
        self._family = family
        self._rl = profile.rl
        self._settings = profile.optimizer
        self._rows = profile.data.rows_per_step
        self._micro_batch = profile.model.train_micro_batch
        self._rank = rank
        self._device = device
        self._control = control
        self._grid = schedule.sigmas(profile.rl.sample_steps, profile.rl.sampler_shift)
        self.copies = copies_of(family.denoiser)
        self.parameters = self.copies.parameters
        s = profile.optimizer
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=s.lr,
            betas=(s.betas[0], s.betas[1]),
            eps=s.eps,
            weight_decay=s.weight_decay,
            # On a GPU the counts of steps then stay there, and a step is few kernels.
            **({"fused": True} if device.type == "cuda" and profile.model.train == "lora" else {"foreach": True}),
        )
        self._prepared: list[Pairs] = []
        self._order: dict[int, int] = {}
        self._conditions: list[Conditioning] = []
        self._forwards_before = 0

    # -- before the rewards are there ---------------------------------------------------------------------------

    def prepare(self, trajectories: Sequence[Trajectory], state: RunState) -> None:
        """Draw t and eps of every optimizer step of this rollout, and run the forwards that need no reward.

        These are old's and the reference's, and the policy's of the first optimizer step where all its pairs are one
        micro-batch: a reward weighs what the backward starts from, and nothing before it.
        """
        rl = self._rl
        self._order = {t.row.number: i for i, t in enumerate(trajectories)}
        self._conditions = [t.conditioning for t in trajectories for _ in range(rl.timesteps_per_sample)]
        x0 = torch.stack([t.x0 for t in trajectories]).repeat_interleave(rl.timesteps_per_sample, dim=0)
        self._prepared = [self._draw(trajectories, x0, k, self._plan(state, k)) for k in range(rl.updates_per_rollout)]
        for pairs in self._prepared:
            if pairs.plan.old:
                pairs.v_old = self._velocities(pairs, "old")
            if pairs.plan.reference:
                pairs.v_ref = self._velocities(pairs, "reference")
        first = self._prepared[0]
        if self._micro_batch is None or len(first.t) <= self._micro_batch:
            with self.copies.use("policy"):
                first.v = self._velocity(first, list(range(len(first.t))))

    def _plan(self, state: RunState, update: int) -> ForwardPlan:
        return plan_forwards(
            kl_beta=self._rl.kl_beta,
            build_old=self._rl.old.build_old,
            policy_version=state.policy_version + update,
            old_version=-1 if state.old_blended else state.old_version,
        )

    def _draw(self, trajectories: Sequence[Trajectory], x0: Tensor, update: int, plan: ForwardPlan) -> Pairs:
        rl, count = self._rl, self._rl.timesteps_per_sample
        rows = [t.row.number for t in trajectories]
        t = send(torch.cat([self._times(row, update) for row in rows]), self._device)
        keys = [(row, draws.train_index(update, count, k)) for row in rows for k in range(count)]
        noise = draws.train_noise(self._family.latent_shape, seed=rl.seed, rank=self._rank, pairs=keys)
        eps = send(noise, self._device)
        return Pairs(plan, t=t, x0=x0, eps=eps, x_t=objective.noisy(x0, eps, t))

    def _times(self, row: int, update: int) -> Tensor:
        rl = self._rl
        return schedule.draw_timesteps(
            seed=rl.seed,
            row=row,
            rank=self._rank,
            update=update,
            count=rl.timesteps_per_sample,
            source=rl.timestep_source,
            uniform_law=rl.uniform_timestep,
            shift=rl.sampler_shift if rl.train_shift is None else rl.train_shift,
            t_range=rl.train_t_range,
            grid=self._grid,
        )

    @torch.no_grad()
    def _velocities(self, pairs: Pairs, which: Weights) -> Tensor:
        with self.copies.use(which):
            parts = [self._velocity(pairs, part) for part in self._chunks(list(range(len(pairs.t))))]
        return torch.cat(parts)

    def _velocity(self, pairs: Pairs, part: list[int]) -> Tensor:
        batch = self._family.batch([self._conditions[i] for i in part])
        v: Tensor = self._family.denoiser(_rows(pairs.x_t, part), _rows(pairs.t, part), batch)
        return v

    def _chunks(self, indices: list[int]) -> Iterator[list[int]]:
        size = self._micro_batch or len(indices)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]

    # -- with rewards ---------------------------------------------------------------------------------------------

    def train(self, kept: Sequence[Trajectory], state: RunState) -> tuple[dict[str, float], RunState]:
        """Every optimizer step of the rollout, on the kept samples. Collective. Returns metrics and new counters."""
        indices, r = self._select(kept)
        state = replace(state)
        plans = [pairs.plan for pairs in self._prepared]
        planned = self._planned(plans, len(kept))
        sums, norms, updates = [], [], len(self._prepared)
        for k, pairs in enumerate(self._prepared):
            stage.begin(state.step + 1, "backward", k, updates)
            terms = self._of_all_ranks(self._accumulate(pairs, indices, r))
            self._refuse_non_finite(terms / len(indices), pairs.x0[indices], r, state)
            sums.append(terms)
            stage.begin(state.step + 1, "optimizer", k, updates)
            norms.append(self._step(state))
        eta = self._refresh(state)
        row = self._means(torch.stack(sums).sum(dim=0), len(indices) * updates)
        row |= {
            "train/grad_norm": sum(norms) / len(norms),
            "train/lr": float(self.optimizer.param_groups[0]["lr"]),
            "old/share": eta,
            "old/refreshes": float(state.old_refreshes),
            "forwards/planned": float(planned),
            "forwards/executed": float(self._executed()),
            "forwards/skipped": float(len(indices) * sum(plan.skipped_per_pair for plan in plans)),
        }
        row |= self._distance() | self._age(state)
        self._prepared, self._conditions, self._order = [], [], {}
        return row, state

    def _planned(self, plans: Sequence[ForwardPlan], kept_rows: int) -> int:
        """Denoiser rows this step must cost this rank. Some ran before anyone knew what would be kept."""
        rl = self._rl
        count = expected_forwards(
            plans,
            rows=self._rows,
            kept_rows=kept_rows,
            steps=rl.sample_steps,
            guidance=rl.guidance,
            timesteps=rl.timesteps_per_sample,
        )
        early = sum(plan.old + plan.reference for plan in plans) + (self._prepared[0].v is not None)
        return count.total + early * rl.timesteps_per_sample * (self._rows - kept_rows)

    def _select(self, kept: Sequence[Trajectory]) -> tuple[list[int], Tensor]:
        count = self._rl.timesteps_per_sample
        indices = [self._order[t.row.number] * count + k for t in kept for k in range(count)]
        r = torch.tensor([t.optimality for t in kept for _ in range(count)], dtype=torch.float32)
        return indices, send(r, self._device)

    def _accumulate(self, pairs: Pairs, indices: list[int], r: Tensor) -> Tensor:
        """Backward over all micro-batches; returns the sums of the terms, float64 on the CPU."""
        self.optimizer.zero_grad(set_to_none=True)
        sums, done = torch.zeros(len(objective.METRICS), dtype=torch.float64, device=self._device), 0
        with self.copies.use("policy"):
            for part in self._chunks(indices):
                terms = objective.nft_terms(
                    self._velocity(pairs, part) if pairs.v is None else _rows(pairs.v, part),
                    None if pairs.v_old is None else _rows(pairs.v_old, part),
                    None if pairs.v_ref is None else _rows(pairs.v_ref, part),
                    _rows(pairs.x0, part),
                    _rows(pairs.eps, part),
                    _rows(pairs.t, part),
                    r[done : done + len(part)],
                    beta=self._rl.beta,
                    kl_beta=self._rl.kl_beta,
                    scale=self._rl.policy_loss_scale,
                )
                terms.loss(len(indices)).backward()
                done += len(part)
                sums += terms.sums()
        return sums.cpu()

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """[ranks, ...] in rank order, so that every rank adds up the same bits."""
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._control))]
        dist.all_gather(parts, mine, group=self._control)
        return torch.stack(parts)

    def _refuse_non_finite(self, terms: Tensor, x0: Tensor, r: Tensor, state: RunState) -> None:
        """Raise on every rank alike, before the gradients meet, when one rank's mean terms are not finite."""
        bad = (~torch.isfinite(terms)).nonzero()
        if not len(bad):
            return
        rank, term = bad[0].tolist()
        around = torch.stack([x0.abs().max(), r.min(), r.max()]).to("cpu", torch.float64)
        largest, low, high = self._of_all_ranks(around)[rank].tolist()
        means = terms[rank].tolist()
        listed = ", ".join(f"{name} {value:.4g}" for name, value in zip(objective.METRICS, means, strict=True))
        raise TrainingFailed(
            f"step {state.step + 1}: {objective.METRICS[term]} of rank {rank} is {means[term]} ({listed}; "
            f"max |x0| {largest:.4g}, r from {low:.4g} to {high:.4g}) at learning rate {self._settings.lr}; "
            "this optimizer step was not made and nothing of it was saved",
            rank=rank,
            hint="lower optimizer.lr, or resume from the last checkpoint",
        )

    def _step(self, state: RunState) -> float:
        norm = self.copies.reduce_and_clip(self._settings.grad_clip)
        if not torch.isfinite(torch.tensor(norm)):
            raise TrainingFailed(
                f"step {state.step + 1}: the gradient norm is {norm} at learning rate {self._settings.lr}; "
                "this optimizer step was not made and nothing was saved",
                rank=self._rank,
                hint="lower optimizer.lr, or resume from the last checkpoint",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = schedule.learning_rate(self._settings.lr, self._settings.warmup_steps, state.optimizer_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copies.stepped()
        state.optimizer_steps += 1
        self.copies.average(schedule.ema_share(self._rl.ema_decay, state.optimizer_steps))
        state.policy_version += 1
        return norm

    def _refresh(self, state: RunState) -> float:
        """Move old when it is due; returns the share of old weights kept, 1 when nothing moved."""
        old = self._rl.old
        if not old.build_old or old.update_every is None or state.optimizer_steps % old.update_every:
            return 1.0
        eta = schedule.old_share(old.decay, state.optimizer_steps, old.constant)
        self.copies.refresh_old(eta)
        state.old_version = state.policy_version
        state.old_blended = int(eta > 0)
        state.old_refreshes += 1
        return eta

    def _distance(self) -> dict[str, float]:
        """How far the policy's weights are from the reference's, relative to these; empty where there is no reference.

        Collective. Added up from all ranks in rank order: products on GPUs need not round alike on each of them.
        """
        drift = self.copies.drift()
        if drift is None:
            return {}
        moved, base = self._of_all_ranks(torch.tensor(drift, dtype=torch.float64)).sum(dim=0).tolist()
        # The last digits of the base's norm depend on how it is cut.
        return {"policy/distance": math.sqrt(moved / float(f"{base:.9g}"))}

    def _age(self, state: RunState) -> dict[str, float]:
        """Which policy old was last refreshed from, and how many optimizer steps ago."""
        if not self._rl.old.build_old:
            return {}
        age = state.policy_version - state.old_version
        return {"old/version": float(state.old_version), "old/age": float(age)}

    def _means(self, sums: Tensor, pairs: int) -> dict[str, float]:
        """Means over all (row, timestep) pairs of all ranks; `sums` [ranks, terms], `pairs` of one rank."""
        means = (sums.sum(dim=0) / (pairs * len(sums))).tolist()
        row = {f"train/{name}": value for name, value in zip(objective.METRICS, means, strict=True)}
        row["train/loss"] = row["train/policy_loss"] + row["train/kl_loss"]
        return row

    def _executed(self) -> int:
        total = self._family.denoiser.forwards
        executed, self._forwards_before = total - self._forwards_before, total
        return executed

    def skip_forwards(self) -> None:
        """Leave the forwards made so far (an evaluation's) out of the next step's count."""
        self._forwards_before = self._family.denoiser.forwards


def _rows(values: Tensor, part: list[int]) -> Tensor:
    """The rows of a part; all of them, in order, without a copy, and without a wait for the device to be told which."""
    return values if part == list(range(len(values))) else values[part]
