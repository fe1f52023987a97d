"""The group's decision: rewards of all ranks side by side, which groups count, advantage and optimality of each sample.

Every rank computes the same matrix, so nothing has to be agreed upon afterwards. Holds nothing between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nftctl.algorithm import advantage
from nftctl.errors import RewardFailed
from nftctl.profile.schema import Profile
from nftctl.roles.trajectory import Trajectory

CAUSE_BYTES = 1024
"""Room for the reason of a failure that all ranks are told."""


@dataclass(slots=True)
class Commit:
    """The step's kept trajectories of this rank and the metrics that are known before training."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]


class ReplayRole:
    """Joins the group over the control process group (CPU tensors)."""

    def __init__(self, profile: Profile, component_names: Sequence[str], group: dist.ProcessGroup) -> None:
        self._rl = profile.rl
        self._reward = profile.reward
        self._names = list(component_names)
        self._group = group
        self.held = 0

    def commit(self, trajectories: Sequence[Trajectory]) -> Commit:
        """Write advantage and optimality into this rank's trajectories and drop the groups that the policy drops.

        Raises RewardFailed on every rank alike when more groups failed than the profile allows.
        """
        table = self._gather(trajectories)
        rewards = table[:, :, 0]
        kept = torch.isfinite(rewards).all(dim=1)
        self._judge(kept, trajectories)
        raw = advantage.advantages(rewards, kept, self._rl.advantage_std)
        clamped = advantage.clamp(raw, self._rl.advantage_low, self._rl.advantage_high)
        optimality = advantage.optimality(clamped, self._rl.r_map, tau=self._rl.r_tau, high=self._rl.advantage_high)
        rank = dist.get_rank(self._group)
        for i, t in enumerate(trajectories):
            t.advantage, t.optimality = clamped[i, rank].item(), optimality[i, rank].item()
        mine = [t for t, keep in zip(trajectories, kept.tolist(), strict=True) if keep]
        low, high = self._rl.advantage_low, self._rl.advantage_high
        metrics = advantage.statistics(rewards, kept, raw, optimality, low=low, high=high)
        return Commit(mine, metrics | self._components(table, kept))

    def _gather(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """float64 [rows, ranks, 1 + components]; NaN where nothing was scored."""
        missing = float("nan")
        rows = [
            [missing if t.reward is None else t.reward, *(t.components.get(n, missing) for n in self._names)]
            for t in trajectories
        ]
        mine = torch.tensor(rows, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, mine, group=self._group)
        return torch.stack(parts, dim=1)

    def _judge(self, kept: torch.Tensor, trajectories: Sequence[Trajectory]) -> None:
        dropped = int((~kept).sum())
        allowed = self._reward.max_dropped_groups if self._reward.on_failure == "drop-group" else 0
        if dropped > allowed or dropped == len(kept):
            rows = [t.row.number for t, keep in zip(trajectories, kept.tolist(), strict=True) if not keep]
            raise RewardFailed(
                f"{dropped} of {len(kept)} groups have no scores (rows {rows}), {allowed} may be dropped: "
                + self._cause(trajectories)
            )

    def _cause(self, trajectories: Sequence[Trajectory]) -> str:
        """The first failure in rank order: the same words everywhere, whichever rank the driver then hears first."""
        mine = next((t.failure for t in trajectories if t.failure), "").encode()[:CAUSE_BYTES]
        box = torch.tensor(list(mine.ljust(CAUSE_BYTES, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(box) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, box, group=self._group)
        said = (bytes(part.tolist()).rstrip(b"\0").decode("utf-8", "replace") for part in parts)
        return next(filter(None, said), "a reward is not a finite number")

    def _components(self, table: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
        """Mean of each provider's raw score and components over the kept samples that have it."""
        row = {}
        for i, name in enumerate(self._names, start=1):
            values = table[kept][:, :, i]
            values = values[torch.isfinite(values)]
            if values.numel():
                row[f"reward/{name}"] = values.mean().item()
        return row
