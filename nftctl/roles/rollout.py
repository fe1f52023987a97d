"""Sampling: noise by the seed clock, UniPC with native guidance, decode; in micro-batches handed on as they are ready.

Samples come from the moving old policy (or the policy when there is none), in FP8 where the profile says so; evaluation
names the weights it wants, and has them in the base's precision. Images are handed on by a thread that waits for the
device, so that training is prepared while they are decoded.
Prompts are encoded before the first micro-batch, so that the encoder may be gone while the base is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from nftctl.algorithm import draws, sampler
from nftctl.algorithm.image_statistics import look_at
from nftctl.errors import TrainingFailed
from nftctl.model import shard
from nftctl.model.copies import copies_of
from nftctl.model.decoder import Decoded
from nftctl.model.family import Conditioning, Family
from nftctl.model.fp8 import Fp8Rollout
from nftctl.profile.batches import rollout_rows
from nftctl.profile.schema import Profile
from nftctl.roles.trajectory import Sampling, SourceRow, Trajectory, Weights
from nftctl.staging import send


class RolloutRole:
    """Makes this rank's samples."""

    def __init__(
        self, family: Family, profile: Profile, *, rank: int, device: torch.device, lowered: Fp8Rollout | None = None
    ) -> None:
        self._family = family
        self._lowered = lowered
        self._copies = copies_of(family.denoiser)
        self._rl = profile.rl
        self._rank = rank
        self._device = device
        denoiser = family.denoiser
        self._micro_batch = rollout_rows(profile, denoiser.tokens(family.latent_shape), denoiser.width)
        # On a CPU an image is there when it has been computed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images") if device.type == "cuda" else None
        self._handing: list[Future[None]] = []
        self._sampling = Sampling(profile.rl.sample_steps, profile.rl.sampler_shift, profile.rl.guidance)
        self.negative_tokens = 0
        """Tokens of the negative prompt, once guidance has read it."""

    @property
    def weights(self) -> Weights:
        """The copy that samples during training."""
        return "old" if self._rl.old.build_old else "policy"

    def sample(
        self, rows: Sequence[SourceRow], optimizer_steps: int, decoded: Callable[[list[Trajectory]], None]
    ) -> list[Trajectory]:
        """One sample per row; `decoded` receives each micro-batch, in order, as soon as its images exist.

        On a GPU that may be after this returns: `hand_over` waits for it.
        """
        done: list[Trajectory] = []
        conditions, negative = self.encode([row.prompt.text for row in rows], self._sampling)
        size = self._micro_batch
        for start in range(0, len(rows), size):
            now = slice(start, start + size)
            part, images = self._micro(rows[now], conditions[now], negative, optimizer_steps)
            if self._thread is None:
                self._hand(part, images, decoded)
            else:
                self._handing.append(self._thread.submit(self._hand, part, images, decoded))
            done.extend(part)
        return done

    def hand_over(self) -> None:
        """Wait until every image is handed on; raises TrainingFailed, naming rows, where one is not finite."""
        handing, self._handing = self._handing, []
        for each in handing:
            each.result()

    def _hand(self, part: list[Trajectory], images: Decoded, decoded: Callable[[list[Trajectory]], None]) -> None:
        try:
            pixels = images.wait()
        except TrainingFailed as error:
            named = ", ".join(f"{t.row.number} ({t.row.prompt.reward_text[:60]})" for t in part)
            raise TrainingFailed(
                f"{error.message}, on rank {self._rank} with seed {self._rl.seed}; the samples are rows {named}",
                rank=self._rank,
                hint=error.hint,
            ) from None
        for trajectory, image in zip(part, pixels, strict=True):
            trajectory.image, trajectory.look = image, look_at(image[0].numpy())
        decoded(part)

    def encode(
        self, prompts: Sequence[str], how: Sampling, ahead: Sequence[str] = ()
    ) -> tuple[list[Conditioning], Conditioning | None]:
        """One condition per prompt, and the negative prompt's where guidance reads it: one visit of the encoder."""
        encoder, negative = self._family.encoder, None
        if encoder.needs_room:
            # The encoder takes the room of the gathered base. On every rank alike, whoever lacks a prompt: all gather
            # again together.
            shard.release(self._family.denoiser)
        with encoder.visit():
            if how.guidance != 1.0:
                (negative,) = encoder.encode([self._rl.negative_prompt], negative=True)
                self.negative_tokens = negative.tokens[0]
            return encoder.encode(prompts, ahead=ahead), negative

    def _micro(
        self,
        rows: Sequence[SourceRow],
        conditions: Sequence[Conditioning],
        negative: Conditioning | None,
        optimizer_steps: int,
    ) -> tuple[list[Trajectory], Decoded]:
        clock = self._rl.rollout_seed_clock
        ticks = [draws.rollout_tick(clock, row.number, optimizer_steps) for row in rows]
        noise = draws.rollout_noise(self._family.latent_shape, seed=self._rl.seed, ticks=ticks, rank=self._rank)
        x0, images = self.begin(conditions, negative, noise, self._sampling, self.weights, self._lowered)
        made = [
            Trajectory(row=row, tick=ticks[i], x0=x0[i], conditioning=conditions[i], image=None)
            for i, row in enumerate(rows)
        ]
        return made, images

    def denoise(
        self,
        conditions: Sequence[Conditioning],
        negative: Conditioning | None,
        noise: torch.Tensor,
        how: Sampling,
        weights: Weights,
        lowered: Fp8Rollout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [B, C, T, H, W] and uint8 CPU images [B, T, H, W, 3], as `begin` starts to make them."""
        x0, images = self.begin(conditions, negative, noise, how, weights, lowered)
        return x0, images.wait()

    @torch.no_grad()
    def begin(
        self,
        conditions: Sequence[Conditioning],
        negative: Conditioning | None,
        noise: torch.Tensor,
        how: Sampling,
        weights: Weights,
        lowered: Fp8Rollout | None = None,
    ) -> tuple[torch.Tensor, Decoded]:
        """Latents [B, C, T, H, W], and images on their way, for one condition and one noise per sample.

        `negative` is what guidance sets against all of them; None where guidance is 1. `lowered` lets the denoiser
        multiply in FP8.
        """
        family = self._family
        against = None if negative is None else family.batch([negative] * len(conditions))
        velocity = sampler.guided_velocity(
            family.denoiser, family.batch(conditions), against, how.guidance, merge=family.batch
        )
        clamp = (-1.0, 1.0) if family.clamp_x0 else None
        with self._copies.use(weights):
            shard.gather(family.denoiser)
            precision: AbstractContextManager[None] = nullcontext() if lowered is None else lowered.use()
            with precision:
                x0 = sampler.sample(velocity, send(noise, self._device), steps=how.steps, shift=how.shift, clamp=clamp)
        return x0, family.decoder.begin(x0)

    def sample_fixed(
        self, prompts: Sequence[str], keys: Sequence[tuple[int | str, ...]], how: Sampling, weights: Weights
    ) -> Iterator[torch.Tensor]:
        """Images [T, H, W, 3] of fixed (prompt, noise key) pairs: evaluation and sample grids."""
        for _, _, images in self.make_fixed(prompts, keys, how, weights):
            yield from images

    def make_fixed(
        self, prompts: Sequence[str], keys: Sequence[tuple[int | str, ...]], how: Sampling, weights: Weights
    ) -> Iterator[tuple[list[Conditioning], torch.Tensor, torch.Tensor]]:
        """Conditions, latents and images of the same, micro-batch by micro-batch."""
        size = max(self._micro_batch, 16)
        for start in range(0, len(prompts), size):
            conditions, negative = self.encode(prompts[start : start + size], how, ahead=prompts[start + size :])
            noise = torch.stack([draws.normal(self._family.latent_shape, *key) for key in keys[start : start + size]])
            yield conditions, *self.denoise(conditions, negative, noise, how, weights)
