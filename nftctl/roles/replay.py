"""The group's decision: rewards of all ranks side by side, which groups count, advantage and optimality of each sample.

Every rank computes the same matrix, so nothing has to be agreed upon afterwards. Holds nothing between steps. Whether
providers are added or normalised first is decided here, and so is what is said in the step's row about each of them and
about the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nftctl.algorithm import advantage, image_statistics
from nftctl.errors import RewardFailed
from nftctl.profile.schema import Profile, Provider
from nftctl.roles.trajectory import Trajectory

CAUSE_BYTES = 1024
"""Room for the reason of a failure that all ranks are told."""


@dataclass(slots=True)
class Commit:
    """The step's kept trajectories of this rank and the metrics that are known before training.

    rewards   of all ranks, by row, in rank order; None where the group was dropped
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    rewards: list[list[float] | None]


class ReplayRole:
    """Joins the group over the control process group (CPU tensors)."""

    def __init__(self, profile: Profile, component_names: Sequence[str], group: dist.ProcessGroup) -> None:
        self._rl = profile.rl
        self._reward = profile.reward
        self._names = list(component_names)
        self._providers = [provider.name for provider in profile.reward.providers]
        self._group = group
        self.held = 0

    def commit(self, trajectories: Sequence[Trajectory]) -> Commit:
        """Write advantage and optimality into this rank's trajectories and drop the groups that the policy drops.

        Raises RewardFailed on every rank alike when more groups failed than the profile allows.
        """
        table, looks = self._gather(trajectories)
        rewards = table[:, :, 0]
        kept = torch.isfinite(rewards).all(dim=1)
        self._judge(kept, trajectories)
        raw = self._advantages(table, kept)
        clamped = advantage.clamp(raw, self._rl.advantage_low, self._rl.advantage_high)
        optimality = advantage.optimality(clamped, self._rl.r_map, tau=self._rl.r_tau, high=self._rl.advantage_high)
        rank = dist.get_rank(self._group)
        for i, t in enumerate(trajectories):
            t.advantage, t.optimality = clamped[i, rank].item(), optimality[i, rank].item()
        mine = [t for t, keep in zip(trajectories, kept.tolist(), strict=True) if keep]
        low, high = self._rl.advantage_low, self._rl.advantage_high
        metrics = advantage.statistics(rewards, kept, raw, optimality, low=low, high=high)
        metrics |= self._components(table, kept) | self._services(table) | _images(looks)
        return Commit(mine, metrics, [row if keep else None for row, keep in zip(rewards.tolist(), kept, strict=True)])

    def _advantages(self, table: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Unclamped, float64 [rows, ranks]."""
        if self._reward.aggregation == "sum":
            return advantage.advantages(table[:, :, 0], kept, self._rl.advantage_std)
        providers = self._reward.providers
        scores = torch.stack([self._shaped(table, provider) for provider in providers])
        return advantage.gdpo(scores, [provider.weight for provider in providers], kept)

    def _shaped(self, table: torch.Tensor, provider: Provider) -> torch.Tensor:
        """clip(scale x score), [rows, ranks]."""
        value = provider.scale * self._column(table, provider.name)
        return value if provider.clip is None else value.clamp(*provider.clip)

    def _column(self, table: torch.Tensor, name: str) -> torch.Tensor:
        return table[:, :, 1 + self._names.index(name)]

    def _gather(self, trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [rows, ranks, 1 + components + 2 providers]: reward, components, latencies in seconds, failures.

        NaN where nothing was scored. Beside it [rows, ranks, ...], of each image saturation, fine detail and thumbnail.
        """
        missing = float("nan")
        rows = [
            [
                missing if t.reward is None else t.reward,
                *(t.components.get(name, missing) for name in self._names),
                *(t.latency_s.get(name, missing) for name in self._providers),
                *(float(name in t.failures) for name in self._providers),
            ]
            for t in trajectories
        ]
        width = len(rows[0])
        looks = [_look(t) for t in trajectories]
        mine = torch.tensor([row + look for row, look in zip(rows, looks, strict=True)], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, mine, group=self._group)
        whole = torch.stack(parts, dim=1)
        return whole[:, :, :width], whole[:, :, width:]

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
        mine = next((said for t in trajectories for said in t.failures.values()), "").encode()[:CAUSE_BYTES]
        box = torch.tensor(list(mine.ljust(CAUSE_BYTES, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(box) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, box, group=self._group)
        said = (bytes(part.tolist()).rstrip(b"\0").decode("utf-8", "replace") for part in parts)
        return next(filter(None, said), "a reward is not a finite number")

    def _components(self, table: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
        """Means of raw scores and their components over the kept samples that have them; spreads of the scores."""
        row = {}
        for name in self._names:
            values = self._column(table, name)[kept]
            there = values[torch.isfinite(values)]
            if there.numel():
                row[f"reward/{name}"] = there.mean().item()
                if name in self._providers:
                    row[f"reward/{name}/std"] = values.std(correction=0).item()
                    row[f"reward/{name}/group_std"] = values.std(dim=1, correction=0).mean().item()
        return row

    def _services(self, table: torch.Tensor) -> dict[str, float]:
        """Samples that each provider failed to score, and the seconds that its slowest score took."""
        row, count = {}, len(self._providers)
        for i, name in enumerate(self._providers):
            latency, failed = table[:, :, i - 2 * count], table[:, :, i - count]
            row[f"reward/{name}/failures"] = failed.sum().item()
            answered = latency[torch.isfinite(latency)]
            if answered.numel():
                row[f"timer/reward/{name}"] = round(answered.max().item(), 4)
        return row


def _look(trajectory: Trajectory) -> list[float]:
    look = trajectory.look
    return [] if look is None else [look.saturation, look.high_frequency, *look.thumbnail.ravel().tolist()]


def _images(looks: torch.Tensor) -> dict[str, float]:
    """Means over all samples, those of dropped groups too: they were made. Empty where nobody looked at the images."""
    if not looks.shape[2]:
        return {}
    return {
        "images/saturation": looks[:, :, 0].mean().item(),
        "images/high_frequency": looks[:, :, 1].mean().item(),
        "images/diversity": image_statistics.diversity(looks[:, :, 2:].numpy()),
    }
