"""What every method learns with: the base and its adapters, prompts, scorer, rollouts, and one way to be looked at.

Owns the rows that a step takes and what a rollout of them is: the same prompts and the same keyed noise for all methods
of a seed, as the ranks of a run would draw them. Looking moves no random number of a method. Refuses profiles that
train more than an adapter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nftctl.algorithm import draws, image_statistics, objective, sampler
from nftctl.learning.fitness import refuse_full
from nftctl.learning.scoring import Scored, Scoring
from nftctl.learning.splits import Split, Splits, split_prompts
from nftctl.model import adapters
from nftctl.model.copies import Copies, copies_of
from nftctl.model.family import Conditioning
from nftctl.model.registry import load_family
from nftctl.profile.prompts import Prompt
from nftctl.profile.schema import Profile
from nftctl.profile.t2i import T2I_PROFILES
from nftctl.roles.data import DataRole
from nftctl.roles.rollout import RolloutRole
from nftctl.roles.trajectory import Sampling, SourceRow, Weights

Picture = npt.NDArray[np.uint8]
CPU = torch.device("cpu")
CHUNK = 48
"""Samples that are looked at together."""
MOST_PAIRS = 64
"""(sample, time) pairs of one training forward, unless the profile says less."""
SIGMAS = (0.25, 0.75)
"""Where a velocity is held against the base's, as evaluations of a run do it."""
MEASURED = 16
"""Samples of a look for which it is."""


@dataclass(frozen=True, slots=True)
class Group:
    """A rollout: `group` samples of each row, row by row.

    x0            final latents [rows * group, C, T, H, W]
    conditions    one for each sample
    rewards       float64 [rows, group]
    """

    rows: Sequence[SourceRow]
    x0: Tensor
    conditions: Sequence[Conditioning]
    rewards: Tensor


@dataclass(frozen=True, slots=True)
class Look:
    """What held-out samples are like, means over all of them.

    judge           None where no scorer has a second opinion
    parts           every raw score and component
    diversity       how unlike samples of one prompt are, see `image_statistics.diversity`
    kl_distance     mean squared difference of the sampling velocity to the base's, on these samples
    sample_ms       milliseconds that one sample took
    forwards        denoiser rows that one sample took
    """

    reward: float
    judge: float | None
    parts: dict[str, float]
    diversity: float
    kl_distance: float
    sample_ms: float
    forwards: float


class Task:
    """One base in this process, ready to be trained with one seed."""

    def __init__(self, profile: Profile, seed: int, splits: Splits | None = None) -> None:
        refuse_full(profile)
        self.profile = with_seed(profile, seed)
        self.seed = seed
        self.splits = split_prompts(profile) if splits is None else splits
        self.scoring = Scoring(profile)
        rl, model = self.profile.rl, self.profile.model
        self.family = load_family(
            model,
            rl.init_from,
            T2I_PROFILES[rl.profile].family,
            CPU,
            skip_keys=tuple(rl.init_keys_to_skip_loading),
            seed=seed,
        )
        adapters.add_adapters(self.family.denoiser, model.lora, seed=seed)
        self.copies: Copies = copies_of(self.family.denoiser)
        self._rollout = RolloutRole(self.family, self.profile, rank=0, device=CPU)
        self._data = DataRole(
            self.splits.train, rows_per_step=profile.data.rows_per_step, shuffle=profile.data.shuffle, seed=seed
        )
        self.group_size = rl.group_size
        self.how = Sampling(rl.sample_steps, rl.sampler_shift, rl.guidance)

    # -- rollouts -------------------------------------------------------------------------------------------------

    @property
    def samples_per_step(self) -> int:
        """Samples that a step makes and has scored, whatever the method."""
        return self.profile.data.rows_per_step * self.group_size

    def rows(self, step: int) -> list[SourceRow]:
        """The rows of a step, counted from 0."""
        return self._data.next(step * self.profile.data.rows_per_step)

    def noise(self, rows: Sequence[SourceRow], optimizer_steps: int) -> Tensor:
        """Where the samples of these rows start, row by row: [rows * group, ...], each as its rank would draw it."""
        clock, shape = self.profile.rl.rollout_seed_clock, self.family.latent_shape
        ticks = [draws.rollout_tick(clock, row.number, optimizer_steps) for row in rows]
        ranks = range(self.group_size)
        noise = [draws.rollout_noise(shape, seed=self.seed, ticks=ticks, rank=rank) for rank in ranks]
        return torch.stack(noise, dim=1).flatten(0, 1)

    def conditions(self, rows: Sequence[SourceRow]) -> tuple[list[Conditioning], Conditioning | None]:
        """One condition for each sample, and the negative prompt's where guidance reads it."""
        encoded, negative = self._rollout.encode([row.prompt.text for row in rows], self.how)
        return [condition for condition in encoded for _ in range(self.group_size)], negative

    def roll(self, rows: Sequence[SourceRow], optimizer_steps: int, weights: Weights) -> Group:
        """Sample these rows with the product's own sampler, and have them scored."""
        conditions, negative = self.conditions(rows)
        noise = self.noise(rows, optimizer_steps)
        x0, images = self._rollout.denoise(conditions, negative, noise, self.how, weights)
        return Group(rows, x0, conditions, self.rewards(images, rows))

    def rewards(self, images: Tensor, rows: Sequence[SourceRow]) -> Tensor:
        """float64 [rows, group] for uint8 images [rows * group, T, H, W, 3]."""
        prompts = [row.prompt for row in rows for _ in range(self.group_size)]
        rewards = self.scoring.rewards(_pictures(images), prompts)
        return torch.tensor(rewards, dtype=torch.float64).view(len(rows), self.group_size)

    # -- training -------------------------------------------------------------------------------------------------

    def parts(self, count: int) -> Iterator[list[int]]:
        """The numbers below `count`, cut as training forwards are."""
        size = self.profile.model.train_micro_batch or MOST_PAIRS
        for start in range(0, count, size):
            yield list(range(start, min(start + size, count)))

    def velocity(self, x_t: Tensor, t: Tensor, conditions: Sequence[Conditioning]) -> Tensor:
        """The conditional velocity of whichever weights are in use; one forward."""
        v: Tensor = self.family.denoiser(x_t, t, self.family.batch(conditions))
        return v

    # -- looking --------------------------------------------------------------------------------------------------

    def look(self, split: Split, weights: Weights = "policy", guidance: float | None = None) -> Look:
        """Sample the held-out prompts of a split from this seed's own noise, and say what came out."""
        how = Sampling(self.how.steps, self.how.shift, self.how.guidance if guidance is None else guidance)
        prompts, keys = self._held_out(split)
        forwards, began = self.family.denoiser.forwards, time.perf_counter()
        made = [self._make(prompts[i : i + CHUNK], keys[i : i + CHUNK], how, weights) for i in _starts(len(prompts))]
        seconds, forwards = time.perf_counter() - began, self.family.denoiser.forwards - forwards
        pictures = [picture for _, _, images in made for picture in _pictures(images)]
        scored = self.scoring.everything(pictures, prompts)
        latents = torch.cat([x0 for _, x0, _ in made])
        conditions = [condition for encoded, _, _ in made for condition in encoded]
        return Look(
            reward=_mean([s.reward for s in scored]),
            judge=_mean([s.parts[self.scoring.judge] for s in scored]) if self.scoring.judge else None,
            parts=_parts(scored),
            diversity=self._diversity(pictures),
            kl_distance=self._distance(latents, conditions, keys, how, weights),
            sample_ms=1e3 * seconds / len(prompts),
            forwards=forwards / len(prompts),
        )

    def _held_out(self, split: Split) -> tuple[list[Prompt], list[tuple[int | str, ...]]]:
        """Every prompt as often as the profile says, prompt by prompt, and the keys of their noise."""
        prompts, each = self.splits.held_out(split), self.profile.eval.samples_per_prompt
        root, purpose = self.profile.eval.seed, f"learning/{split}"
        keys: list[tuple[int | str, ...]] = [
            (root, purpose, self.seed, i, j) for i in range(len(prompts)) for j in range(each)
        ]
        return [prompt for prompt in prompts for _ in range(each)], keys

    def _make(
        self, prompts: Sequence[Prompt], keys: Sequence[tuple[int | str, ...]], how: Sampling, weights: Weights
    ) -> tuple[list[Conditioning], Tensor, Tensor]:
        noise = torch.stack([draws.normal(self.family.latent_shape, *key) for key in keys])
        conditions, negative = self._rollout.encode([prompt.text for prompt in prompts], how)
        return conditions, *self._rollout.denoise(conditions, negative, noise, how, weights)

    def _diversity(self, pictures: Sequence[Picture]) -> float:
        each = self.profile.eval.samples_per_prompt
        thumbnails = np.stack([image_statistics.look_at(picture).thumbnail.ravel() for picture in pictures])
        return image_statistics.diversity(thumbnails.reshape(-1, each, thumbnails.shape[1]))

    @torch.no_grad()
    def _distance(
        self,
        latents: Tensor,
        conditions: Sequence[Conditioning],
        keys: Sequence[tuple[int | str, ...]],
        how: Sampling,
        weights: Weights,
    ) -> float:
        """Mean of (v - v_base)^2 at noised samples: v as it was sampled with, guidance included; v_base without."""
        chosen = sorted({i * len(latents) // MEASURED for i in range(MEASURED)})
        count = len(SIGMAS)
        x0 = latents[chosen].repeat_interleave(count, dim=0)
        t = torch.tensor(SIGMAS).repeat(len(chosen))
        eps = [draws.normal(self.family.latent_shape, *keys[i], "distance", k) for i in chosen for k in range(count)]
        x_t = objective.noisy(x0, torch.stack(eps), t)
        batch = [conditions[i] for i in chosen for _ in range(count)]
        with self.copies.use(weights):
            v = self.guided(batch, how)(x_t, t)
        with self.copies.use("reference"):
            base = self.velocity(x_t, t, batch)
        return float((v.double() - base.double()).square().mean())

    def guided(self, conditions: Sequence[Conditioning], how: Sampling) -> sampler.Velocity:
        """The velocity that samples of these conditions follow, of whichever weights are in use."""
        family, against = self.family, None
        if how.guidance != 1.0:
            with family.encoder.visit():
                (negative,) = family.encoder.encode([self.profile.rl.negative_prompt], negative=True)
            against = family.batch([negative] * len(conditions))
        batch = family.batch(conditions)
        return sampler.guided_velocity(family.denoiser, batch, against, how.guidance, merge=family.batch)


def with_seed(profile: Profile, seed: int) -> Profile:
    """The profile with another root of all its random numbers."""
    return profile.model_copy(update={"rl": profile.rl.model_copy(update={"seed": seed})})


def _starts(count: int) -> range:
    return range(0, count, CHUNK)


def _pictures(images: Tensor) -> list[Picture]:
    """uint8 [H, W, 3] of each image [T, H, W, 3]."""
    return [np.ascontiguousarray(image[0].numpy()) for image in images]


def _parts(scored: Sequence[Scored]) -> dict[str, float]:
    return {name: _mean([s.parts[name] for s in scored]) for name in sorted(scored[0].parts)}


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values))
