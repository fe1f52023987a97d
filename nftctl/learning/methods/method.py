"""What a method is: something that takes rows, samples and scores them, and moves the adapter `policy`.

Owns the optimizer that all methods share: AdamW with the profile's own settings, but for the rate. Refuses a gradient
that is not finite, before it moves anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nftctl.algorithm import schedule
from nftctl.errors import TrainingFailed
from nftctl.learning.task import Task
from nftctl.roles.trajectory import SourceRow

Settings = Mapping[str, float]
"""What is tuned, by name: `lr`, and the method's own knobs."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step was: the mean reward of its samples, rows that had a backward, and the mean of what it minimised."""

    reward: float
    backwards: int
    loss: float


class Method(ABC):
    """One method at work on a task."""

    @abstractmethod
    def step(self, rows: Sequence[SourceRow]) -> Taken:
        """Sample these rows, have the samples scored, and learn from them."""


class Learner:
    """The optimizer of the adapter `policy`."""

    def __init__(self, task: Task, lr: float) -> None:
        settings = task.profile.optimizer
        self._settings, self._lr = settings, lr
        self._parameters = list(task.copies.parameters.values())
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            foreach=True,
        )
        self.steps = 0
        """Optimizer steps made."""

    def clear(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Clip and take what the backwards since `clear` left. Raises TrainingFailed where that is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.grad_clip))
        if not torch.isfinite(torch.tensor(norm)):
            raise TrainingFailed(f"optimizer step {self.steps + 1}: the gradient norm is {norm} at rate {self._lr:g}")
        for group in self.optimizer.param_groups:
            group["lr"] = schedule.learning_rate(self._lr, self._settings.warmup_steps, self.steps)
        self.optimizer.step()
        self.steps += 1


def spread_evenly(values: Tensor, count: int) -> Tensor:
    """Each value `count` times in a row: of samples, what each of their pairs has."""
    return values.repeat_interleave(count, dim=0)
