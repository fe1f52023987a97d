"""DiffusionNFT as the product runs it: the package's draws, sampler, advantages, objective, plan and moving old.

Owns nothing but their order; all ranks of a run are one batch here, whose gradient is the mean that the ranks would
agree on. `advantages` is there to be replaced by the control.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nftctl.algorithm import advantage, draws, objective, schedule
from nftctl.algorithm.plan import plan_forwards
from nftctl.learning.methods.method import Learner, Method, Settings, Taken, spread_evenly
from nftctl.learning.task import Group, Task
from nftctl.model.family import Conditioning
from nftctl.roles.trajectory import SourceRow, Weights


class Nft(Method):
    """Settings: `lr`; `timesteps`, training times per sample."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self._task = task
        self._rl = task.profile.rl
        self._count = int(settings["timesteps"])
        self._learner = Learner(task, settings["lr"])
        self._grid = schedule.sigmas(task.how.steps, task.how.shift)
        # Which policy old is an exact copy of; -1 where it is a blend.
        self._old_version = 0
        self.sums = torch.zeros(len(objective.METRICS), dtype=torch.float64)
        """Sums of the objective's terms over the pairs of the last step."""

    @property
    def weights(self) -> Weights:
        """The copy that samples."""
        return "old" if self._rl.old.build_old else "policy"

    def step(self, rows: Sequence[SourceRow]) -> Taken:
        group = self._task.roll(rows, self._learner.steps, self.weights)
        optimality = self.optimality(group)
        pairs = len(group.x0) * self._count
        self.sums = torch.zeros_like(self.sums)
        for update in range(self._rl.updates_per_rollout):
            self._update(group, optimality, update)
        self._refresh()
        updates = self._rl.updates_per_rollout
        loss = float(self.sums[:2].sum()) / (pairs * updates)
        return Taken(float(group.rewards.mean()), pairs * updates, loss)

    def optimality(self, group: Group) -> Tensor:
        """r of each sample, float32 [rows * group]."""
        rl = self._rl
        clamped = advantage.clamp(self.advantages(group), rl.advantage_low, rl.advantage_high)
        r = advantage.optimality(clamped, rl.r_map, tau=rl.r_tau, high=rl.advantage_high)
        return r.flatten().to(torch.float32)

    def advantages(self, group: Group) -> Tensor:
        """Unclamped, float64 [rows, group]."""
        kept = torch.ones(len(group.rows), dtype=torch.bool)
        return advantage.advantages(group.rewards, kept, self._rl.advantage_std)

    def _update(self, group: Group, optimality: Tensor, update: int) -> None:
        """One optimizer step on a rollout."""
        rl, count, steps = self._rl, self._count, self._learner.steps
        plan = plan_forwards(
            kl_beta=rl.kl_beta, build_old=rl.old.build_old, policy_version=steps, old_version=self._old_version
        )
        x0, r = spread_evenly(group.x0, count), spread_evenly(optimality, count)
        t, eps = self._times(group, update), self._noise(group, update)
        x_t = objective.noisy(x0, eps, t)
        self._learner.clear()
        for part in self._task.parts(len(t)):
            pairs = (x_t[part], t[part], [group.conditions[i // count] for i in part])
            terms = objective.nft_terms(
                self._velocity("policy", *pairs),
                self._velocity("old", *pairs) if plan.old else None,
                self._velocity("reference", *pairs) if plan.reference else None,
                x0[part],
                eps[part],
                t[part],
                r[part],
                beta=rl.beta,
                kl_beta=rl.kl_beta,
                scale=rl.policy_loss_scale,
            )
            terms.loss(len(t)).backward()  # type: ignore[no-untyped-call]
            self.sums += terms.sums()
        self._learner.step()

    def _velocity(self, which: Weights, x_t: Tensor, t: Tensor, conditions: Sequence[Conditioning]) -> Tensor:
        with torch.set_grad_enabled(which == "policy"), self._task.copies.use(which):
            return self._task.velocity(x_t, t, conditions)

    def _times(self, group: Group, update: int) -> Tensor:
        return training_times(self._task, group.rows, range(self._task.group_size), self._count, update, self._grid)

    def _noise(self, group: Group, update: int) -> Tensor:
        return training_noise(self._task, group.rows, range(self._task.group_size), self._count, update)

    def _refresh(self) -> None:
        """Move old when it is due."""
        old, steps = self._rl.old, self._learner.steps
        if not old.build_old or old.update_every is None or steps % old.update_every:
            return
        share = schedule.old_share(old.decay, steps, old.constant)
        self._task.copies.refresh_old(share)
        self._old_version = -1 if share > 0 else steps


def training_times(
    task: Task, rows: Sequence[SourceRow], ranks: Sequence[int], count: int, update: int, grid: Sequence[float]
) -> Tensor:
    """The times of each row's samples, row by row and rank by rank: [rows * ranks * count] float32."""
    rl = task.profile.rl
    drawn = [
        schedule.draw_timesteps(
            seed=rl.seed,
            row=row.number,
            rank=rank,
            update=update,
            count=count,
            source=rl.timestep_source,
            uniform_law=rl.uniform_timestep,
            shift=rl.sampler_shift if rl.train_shift is None else rl.train_shift,
            t_range=rl.train_t_range,
            grid=grid,
        )
        for row in rows
        for rank in ranks
    ]
    return torch.cat(drawn)


def training_noise(task: Task, rows: Sequence[SourceRow], ranks: Sequence[int], count: int, update: int) -> Tensor:
    """The noise of the same pairs in the same order: [rows * ranks * count, C, T, H, W]."""
    shape, seed = task.family.latent_shape, task.profile.rl.seed
    numbers = [draws.train_index(update, count, k) for k in range(count)]
    return torch.cat(
        [
            draws.train_noise(shape, seed=seed, rank=rank, pairs=[(row.number, j) for j in numbers])
            for row in rows
            for rank in ranks
        ]
    )


def make(task: Task, settings: Settings) -> Nft:
    """The method at its first step."""
    return Nft(task, settings)
