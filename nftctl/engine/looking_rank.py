"""A rank's part of looking at the model: fixed samples, their scores, and the images of a step that are to be shown.

Owns no weight and no random number of the run, and leaves both as they were. Images stay here until rank 0 draws them.
No collective comes after a score that may fail, so that a failed score leaves no rank waiting for another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nftctl.algorithm import draws, objective
from nftctl.engine.pictures import Layout, Shown, write_extremes, write_grid
from nftctl.model import shard
from nftctl.model.family import Conditioning
from nftctl.reward.protocol import Item
from nftctl.roles.build import Roles
from nftctl.roles.reward import RewardRole
from nftctl.roles.trajectory import Sampling, Trajectory, Weights
from nftctl.staging import send

if TYPE_CHECKING:
    from nftctl.engine.worker import Drawing, EvalSample

SIGMAS = (0.25, 0.75)
"""Where the evaluated velocity is held against the reference's."""
MEASURED = 16
"""Held-out samples for which it is, over all ranks; with more ranks one on each."""
EXTREMES = 4
"""Samples of a step that are shown as its best, and as its worst."""

Scored = tuple[float, dict[str, float]]


@dataclass(slots=True)
class Painted:
    """This rank's share of a column: images uint8 [n, H, W, 3], and their rewards once they were scored."""

    images: Tensor
    rewards: list[float] = field(default_factory=list)


class Onlooker:
    """Looks on one rank. Every method is called on all ranks together."""

    def __init__(self, roles: Roles, rank: int, control: dist.ProcessGroup) -> None:
        self._roles, self._rank, self._control = roles, rank, control
        self._world = dist.get_world_size()
        self._base: tuple[Any, Painted] | None = None
        self._painted: dict[Weights, Painted] = {}
        self._kept: list[Trajectory] = []

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(
        self, samples: Sequence[EvalSample], how: Sampling, weights: Weights, *, distance: bool
    ) -> list[tuple[Scored, float | None]]:
        """Reward, components and, of some, the distance to the reference, for samples rank, rank + world, ..."""
        mine = self._share(samples)
        measured = _spread(len(mine), self._rank, self._world) if distance else []
        images, latents, conditions = self._sample(mine, how, weights, measured)
        keys = [mine[i].key for i in measured]
        distances = dict(zip(measured, self._distances(latents, conditions, keys, weights), strict=True))
        scores = self._score(self._roles.judge, mine, images, "eval")
        return [(score, distances.get(i)) for i, score in enumerate(scores)]

    @torch.no_grad()
    def _distances(
        self,
        latents: Sequence[Tensor],
        conditions: Sequence[Conditioning],
        keys: Sequence[tuple[int | str, ...]],
        weights: Weights,
    ) -> list[float]:
        """Mean of (v - v_ref)^2 over dimensions and `SIGMAS` for each latent, at noise of its own key's."""
        if not latents:
            return []
        family, count = self._roles.family, len(SIGMAS)
        x0 = torch.stack(list(latents)).repeat_interleave(count, dim=0)
        t = send(torch.tensor(SIGMAS).repeat(len(latents)), x0.device)
        noise = [draws.normal(family.latent_shape, *key, "distance", k) for key in keys for k in range(count)]
        x_t = objective.noisy(x0, send(torch.stack(noise), x0.device), t)
        batch = family.batch([condition for condition in conditions for _ in range(count)])
        velocities: list[Tensor] = []
        for which in (weights, "reference"):
            with self._roles.policy.copies.use(which):
                shard.gather(family.denoiser)
                velocities.append(family.denoiser(x_t, t, batch).double())
        self._leave()
        squares = (velocities[0] - velocities[1]).square().flatten(1).mean(dim=1)
        found: list[float] = squares.view(-1, count).mean(dim=1).tolist()
        return found

    # -- grids ----------------------------------------------------------------------------------------------------

    def remember_base(self, samples: Sequence[EvalSample], how: Sampling) -> None:
        """Sample the base's column from the policy while that is still the base: whole trained weights replace it."""
        self._base = ((samples, how), self._paint(self._share(samples), how, "policy"))

    def paint(
        self, samples: Sequence[EvalSample], how: Sampling, columns: Sequence[Weights]
    ) -> dict[Weights, list[float]]:
        """Sample this rank's share with each of the weights, and score it. The base's is made and scored once."""
        mine, order = self._share(samples), (samples, how)
        self._painted = {}
        for which in columns:
            if which != "reference":
                self._painted[which] = self._paint(mine, how, which)
                continue
            if self._base is None or self._base[0] != order:
                self._base = (order, self._paint(mine, how, which))
            self._painted[which] = self._base[1]
        for painted in self._painted.values():
            if not painted.rewards:
                images = list(painted.images)
                painted.rewards = [reward for reward, _ in self._score(self._roles.reward, mine, images, "grid")]
        return {which: painted.rewards for which, painted in self._painted.items()}

    def _paint(self, mine: Sequence[EvalSample], how: Sampling, weights: Weights) -> Painted:
        return Painted(torch.stack(self._sample(mine, how, weights)[0]))

    def grid(self, drawing: Drawing) -> Layout | None:
        """Rank 0 writes what was painted, and says where the images stand."""
        gathered = {which: self._gather(painted.images) for which, painted in self._painted.items()}
        self._painted = {}
        if self._rank:
            return None
        rows = len(drawing.prompts)
        whole = [torch.stack(gathered[which], dim=1).flatten(0, 1)[:rows].numpy() for which in drawing.columns]
        return write_grid(
            drawing.path,
            np.stack(whole, axis=1),
            drawing.prompts,
            drawing.title,
            captions=drawing.captions,
            notes=drawing.notes,
            rewards=drawing.rewards,
        )

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Everybody's tensor on rank 0; nothing elsewhere."""
        parts = [torch.empty_like(mine) for _ in range(self._world)] if self._rank == 0 else None
        dist.gather(mine, parts, dst=0, group=self._control)
        return parts or []

    # -- the best and the worst of a step -------------------------------------------------------------------------

    def keep(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep a step's samples, whose images were kept for this; an empty list lets go of them."""
        self._kept = list(trajectories)

    def extremes(self, path: Path, title: str) -> tuple[Layout, dict[str, Any]] | None:
        """Rank 0 writes the kept step's best and worst samples; None elsewhere, and where none was scored."""
        kept, self._kept = self._kept, []
        mine = torch.tensor([math.nan if t.reward is None else t.reward for t in kept], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(parts, mine, group=self._control)
        table = torch.stack(parts, dim=1)
        best, worst = best_and_worst(table, EXTREMES)
        images = [self._bring(kept, row, rank) for row, rank in (*best, *worst)]
        if self._rank or not images:
            return None
        shown = [
            Shown(image.numpy(), table[row, rank].item(), kept[row].row.prompt.reward_text)
            for image, (row, rank) in zip(images, (*best, *worst), strict=True)
        ]
        count = int(torch.isfinite(table).sum())
        layout = write_extremes(path, shown[: len(best)], shown[len(best) :], f"{title} of {count} training samples")
        where = [[{"row": kept[row].row.number, "rank": rank} for row, rank in part] for part in (best, worst)]
        return layout, _facts(shown, where)

    def _bring(self, kept: Sequence[Trajectory], row: int, rank: int) -> Tensor:
        """One rank's image of a row, on rank 0; elsewhere whatever is at hand."""
        image = kept[row].image
        if image is None:
            raise RuntimeError(f"row {kept[row].row.number}: the image of a step that is to be shown was not kept")
        mine = image[0].contiguous()
        if rank and self._rank == rank:
            dist.send(mine, dst=0, group=self._control)
        elif rank and self._rank == 0:
            mine = torch.empty_like(mine)
            dist.recv(mine, src=rank, group=self._control)
        return mine

    # -- both -----------------------------------------------------------------------------------------------------

    def _share(self, samples: Sequence[EvalSample]) -> list[EvalSample]:
        # Every rank must run the same number of forwards, so the last round is filled up with repeats.
        rounds = math.ceil(len(samples) / self._world)
        return [samples[(turn * self._world + self._rank) % len(samples)] for turn in range(rounds)]

    def _sample(
        self, samples: Sequence[EvalSample], how: Sampling, weights: Weights, wanted: Sequence[int] = ()
    ) -> tuple[list[Tensor], list[Tensor], list[Conditioning]]:
        """Images uint8 [H, W, 3] of all; latents and conditions of those whose numbers are wanted."""
        images: list[Tensor] = []
        latents: dict[int, Tensor] = {}
        conditions: dict[int, Conditioning] = {}
        prompts, keys = [s.prompt for s in samples], [s.key for s in samples]
        for conditioned, x0, pixels in self._roles.rollout.make_fixed(prompts, keys, how, weights):
            for i in range(len(images), len(images) + len(conditioned)):
                if i in wanted:
                    latents[i], conditions[i] = x0[i - len(images)], conditioned[i - len(images)]
            images += [image[0] for image in pixels]
        self._leave()
        return images, [latents[i] for i in wanted], [conditions[i] for i in wanted]

    def _leave(self) -> None:
        self._roles.release()
        self._roles.policy.skip_forwards()

    def _score(
        self, role: RewardRole, samples: Sequence[EvalSample], images: Sequence[Tensor], label: str
    ) -> list[Scored]:
        items = [
            Item(id=f"{label}/{self._rank}/{i}", prompt=s.reward_prompt, metadata=s.metadata, image=image.numpy())
            for i, (s, image) in enumerate(zip(samples, images, strict=True))
        ]
        return role.score_images(items, label)


def best_and_worst(table: Tensor, most: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(row, rank) of the highest rewards, highest first, and of the lowest, lowest first; no sample is both.

    table: float64 [rows, ranks], NaN where nothing was scored. Equal rewards stand in the order of rows, then ranks.
    """
    scored = [(row, rank) for row, rank in np.ndindex(*table.shape) if math.isfinite(table[row, rank])]
    ranked = sorted(scored, key=lambda at: -float(table[at]))
    count = len(ranked)
    best, worst = ranked[: min(most, (count + 1) // 2)], ranked[count - min(most, count // 2) :]
    return best, sorted(worst, key=lambda at: (float(table[at]), at))


def _facts(shown: Sequence[Shown], where: Sequence[Sequence[dict[str, int]]]) -> dict[str, Any]:
    """Prompt, reward and place of each shown sample, for JSON."""
    left = iter(shown)
    return {
        name: [{**at, "prompt": (s := next(left)).prompt, "reward": s.reward} for at in part]
        for name, part in zip(("best", "worst"), where, strict=True)
    }


def _spread(count: int, rank: int, world: int) -> list[int]:
    """Which of its `count` samples a rank measures: as many on each, together at even distances over all of them."""
    each = min(count, math.ceil(MEASURED / world))
    return [(turn * world + rank) * count // (each * world) for turn in range(each)]
