"""How long a step's arithmetic takes at the least on a rank: its operations, at the device's own rate of products.

Counts what `model.arithmetic` counts. The rate is measured once, when the rank is built, in a burst after a rest; what
a run reaches of it is its MFU. Refuses families without a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nftctl.profile.schema import Profile

if TYPE_CHECKING:
    from nftctl.model.arithmetic import Forward


@dataclass(frozen=True, slots=True)
class Operations:
    """What one rank's step computes: of all sampled rows, branches and sampler steps, and of all trained pairs."""

    rollout: float
    trained: float


def operations(forward: Forward, profile: Profile, prompts: Sequence[int], against: int) -> Operations:
    """Of a step whose rows have prompts of so many tokens; `against` are those of the negative prompt.

    A trained pair is a forward and a backward, the backward as much as the forward where gradients are of activations
    alone, and twice as much where all weights train. Groups that were dropped count too: they were sampled.
    """
    rl = profile.rl
    own, other = sum(map(forward.flops, prompts)), forward.flops(against) * len(prompts)
    branches = own * (rl.guidance != 0) + other * (rl.guidance != 1)
    passes = 3 if profile.model.train == "full" else 2
    return Operations(branches * rl.sample_steps, own * passes * rl.timesteps_per_sample * rl.updates_per_rollout)


@dataclass(frozen=True, slots=True)
class LeastTime:
    """One rank's arithmetic. `rate` is operations per second."""

    forward: Forward
    profile: Profile
    rate: float

    def seconds(self, prompts: Sequence[int], against: int) -> float:
        """Of a step, as `operations` counts it."""
        needed = operations(self.forward, self.profile, prompts, against)
        return (needed.rollout + needed.trained) / self.rate
