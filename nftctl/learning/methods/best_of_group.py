"""Supervised training on the best sample of each group: flow matching on what the policy itself made and was liked.

Groups whose samples are all scored alike have no best sample and are left out. Samples come from the policy as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nftctl.algorithm import advantage, objective, schedule
from nftctl.learning.methods.method import Learner, Method, Settings, Taken, spread_evenly
from nftctl.learning.methods.nft import training_noise, training_times
from nftctl.learning.task import Group, Task
from nftctl.roles.trajectory import SourceRow


class BestOfGroup(Method):
    """Settings: `lr`; `timesteps`, training times per chosen sample."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self._task = task
        self._count = int(settings["timesteps"])
        self._learner = Learner(task, settings["lr"])
        self._grid = schedule.sigmas(task.how.steps, task.how.shift)

    def step(self, rows: Sequence[SourceRow]) -> Taken:
        group = self._task.roll(rows, self._learner.steps, "policy")
        best = best_samples(group.rewards)
        reward = float(group.rewards.mean())
        if not best:
            return Taken(reward, 0, 0.0)
        loss = self._update(group, best)
        return Taken(reward, len(best) * self._count, loss)

    def _update(self, group: Group, best: Sequence[tuple[int, int]]) -> float:
        """One optimizer step on the chosen (row, rank) samples; returns the mean loss."""
        count, size = self._count, self._task.group_size
        chosen = [row * size + rank for row, rank in best]
        x0 = spread_evenly(group.x0[chosen], count)
        t, eps = self._drawn(group, best)
        x_t, total = objective.noisy(x0, eps, t), 0.0
        self._learner.clear()
        for part in self._task.parts(len(t)):
            with self._task.copies.use("policy"):
                v = self._task.velocity(x_t[part], t[part], [group.conditions[chosen[i // count]] for i in part])
            loss = (v - (eps - x0)[part]).square().flatten(1).mean(dim=1).sum() / len(t)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self._learner.step()
        return total

    def _drawn(self, group: Group, best: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Times and noise of the chosen samples, by the keys that these samples have in a run."""
        one = [([group.rows[row]], [rank]) for row, rank in best]
        times = [training_times(self._task, *each, self._count, 0, self._grid) for each in one]
        noise = [training_noise(self._task, *each, self._count, 0) for each in one]
        return torch.cat(times), torch.cat(noise)


def best_samples(rewards: Tensor) -> list[tuple[int, int]]:
    """(row, rank) of the highest reward [rows, group] of each row that has a spread; the first of equals."""
    flat, best = advantage.zero_spread(rewards).tolist(), rewards.argmax(dim=1).tolist()
    return [(row, rank) for row, rank in enumerate(best) if not flat[row]]


def make(task: Task, settings: Settings) -> BestOfGroup:
    """The method at its first step."""
    return BestOfGroup(task, settings)
