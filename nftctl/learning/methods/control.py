"""DiffusionNFT with its advantages dealt out at random among the samples of a step: all that it does, but the reward.

What rises under it does not rise because of the reward.
"""

from __future__ import annotations

from torch import Tensor

from nftctl.algorithm import draws
from nftctl.learning.methods.method import Settings
from nftctl.learning.methods.nft import Nft
from nftctl.learning.task import Group, Task


class Control(Nft):
    """Settings: those of DiffusionNFT."""

    def advantages(self, group: Group) -> Tensor:
        """The step's advantages in another order, drawn anew for each step."""
        found = super().advantages(group)
        order = draws.permutation(found.numel(), self._task.seed, "learning/control", group.rows[0].number)
        return found.flatten()[order].view_as(found)


def make(task: Task, settings: Settings) -> Control:
    """The method at its first step."""
    return Control(task, settings)
