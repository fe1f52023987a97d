"""Flow-GRPO, written from its paper's formulas: a policy gradient on the steps of a stochastic sampler.

Owns the rollout that remembers its states and log-probabilities, and the clipped objective over them. Log-probabilities
and the penalty are sums over the dimensions of a sample. Every step with noise is trained on, at each update.
Advantages are the package's: (R - mean) / (spread + 1e-4) of the row's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nftctl.algorithm import advantage, draws, schedule
from nftctl.learning.methods.method import Learner, Method, Settings, Taken
from nftctl.learning.methods.sde import SdeStep, clipped_objective, divergence, log_probability, sde_steps
from nftctl.learning.task import Group, Task
from nftctl.model.family import Conditioning
from nftctl.roles.trajectory import SourceRow


@dataclass(frozen=True, slots=True)
class Path:
    """States [steps + 1, N, ...] of a rollout, and log-probabilities [noisy steps, N] of the steps with noise."""

    states: Tensor
    log_probabilities: Tensor


class FlowGrpo(Method):
    """Settings: `lr`; `noise`, the level a; `clip`; `updates` per rollout; `kl`, weight of the penalty to the base."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self._task, self._settings = task, settings
        self._learner = Learner(task, settings["lr"])
        self._steps = sde_steps(schedule.sigmas(task.how.steps, task.how.shift), settings["noise"])
        self._noisy = [i for i, step in enumerate(self._steps) if step.std > 0]
        self.largest_ratio = 1.0
        """Largest ratio of the last step's first update: 1 but for rounding."""

    def step(self, rows: Sequence[SourceRow]) -> Taken:
        group, path = self.roll(rows)
        kept = torch.ones(len(rows), dtype=torch.bool)
        found = advantage.advantages(group.rewards, kept, self._task.profile.rl.advantage_std)
        advantages = found.flatten().to(torch.float32)
        updates = int(self._settings["updates"])
        losses = [self._update(group, path, advantages, update) for update in range(updates)]
        pairs = len(group.x0) * len(self._noisy)
        return Taken(float(group.rewards.mean()), pairs * updates, losses[-1])

    @torch.no_grad()
    def roll(self, rows: Sequence[SourceRow]) -> tuple[Group, Path]:
        """Sample with the policy, with noise at every step but the last; all methods start from the same states."""
        task = self._task
        conditions, _ = task.conditions(rows)
        x = task.noise(rows, self._learner.steps)
        states, logs = [x], []
        with task.copies.use("policy"):
            velocity = task.guided(conditions, task.how)
            for i, step in enumerate(self._steps):
                mean = step.mean(x, velocity(x, torch.full((len(x),), step.t)))
                x = mean + step.std * self._noise(rows, i) if step.std > 0 else mean
                if step.std > 0:
                    logs.append(log_probability(x, mean, torch.full((len(x),), step.std)))
                states.append(x)
        x0 = x.clamp(-1.0, 1.0) if task.family.clamp_x0 else x
        rewards = task.rewards(task.family.decoder.decode(x0), rows)
        return Group(rows, x0, conditions, rewards), Path(torch.stack(states), torch.stack(logs))

    def _noise(self, rows: Sequence[SourceRow], step: int) -> Tensor:
        """What one step adds, keyed like every other draw: [rows * group, C, T, H, W]."""
        shape, ranks = self._task.family.latent_shape, range(self._task.group_size)
        keys = [(self._task.seed, "learning/sde", row.number, rank, step) for row in rows for rank in ranks]
        return torch.stack([draws.normal(shape, *key) for key in keys])

    def _update(self, group: Group, path: Path, advantages: Tensor, update: int) -> float:
        """One optimizer step over all (sample, noisy step) pairs; returns the mean loss."""
        samples, noisy = len(group.x0), self._noisy
        count, total, largest = samples * len(noisy), 0.0, 0.0
        self._learner.clear()
        for part in self._task.parts(count):
            at = [(pair % samples, pair // samples) for pair in part]
            loss, ratio = self._loss(group.conditions, path, advantages, at)
            (loss / count).backward()
            total, largest = total + float(loss.detach()), max(largest, ratio)
        if update == 0:
            self.largest_ratio = largest
        self._learner.step()
        return total / count

    def _loss(
        self, conditions: Sequence[Conditioning], path: Path, advantages: Tensor, at: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, float]:
        """Summed loss of (sample, place among the noisy steps) pairs, and the largest ratio among them."""
        task, who = self._task, [sample for sample, _ in at]
        steps = [self._steps[self._noisy[place]] for _, place in at]
        x = torch.stack([path.states[self._noisy[place], sample] for sample, place in at])
        after = torch.stack([path.states[self._noisy[place] + 1, sample] for sample, place in at])
        before = torch.stack([path.log_probabilities[place, sample] for sample, place in at])
        t, std = (torch.tensor([getattr(step, name) for step in steps]) for name in ("t", "std"))
        batch = [conditions[sample] for sample in who]
        with task.copies.use("policy"):
            mean = _means(steps, x, task.guided(batch, task.how)(x, t))
        log_ratio = log_probability(after, mean, std) - before
        gained = clipped_objective(log_ratio, advantages[who], self._settings["clip"])
        loss = -gained.sum()
        if self._settings["kl"] > 0:
            with torch.no_grad(), task.copies.use("reference"):
                base = _means(steps, x, task.guided(batch, task.how)(x, t))
            loss = loss + self._settings["kl"] * divergence(mean, base, std).sum()
        return loss, float(log_ratio.detach().exp().max())


def _means(steps: Sequence[SdeStep], x: Tensor, v: Tensor) -> Tensor:
    """Where each sample's own step leads without its noise."""
    keep, move = (torch.tensor([getattr(step, name) for step in steps]) for name in ("keep", "move"))
    shape = (-1, *[1] * (x.ndim - 1))
    return x * (1 + keep.view(shape)) + v * move.view(shape)


def make(task: Task, settings: Settings) -> FlowGrpo:
    """The method at its first step."""
    return FlowGrpo(task, settings)
