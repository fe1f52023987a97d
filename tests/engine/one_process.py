"""The step once more, in one process, without FSDP, Ray or HTTP, its arithmetic in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nftctl.algorithm import draws, sampler, schedule
from nftctl.model import adapters
from nftctl.model.registry import load_family
from nftctl.profile.prompts import read_prompts, resolve_prompt_file
from nftctl.reward.scorers import load_scorer


class OneProcess:
    """The embedded model with its adapter pair, and the run's formulas written out."""

    def __init__(self, profile: Any) -> None:
        self.profile = profile
        device = torch.device("cpu")
        self.family = load_family(profile.model, "embedded", "cosmos3", device, seed=profile.rl.seed)
        adapters.add_adapters(self.family.denoiser, profile.model.lora, seed=profile.rl.seed)
        self.prompts = read_prompts(resolve_prompt_file(profile.data.prompt_file, "train"))
        self.scorer = load_scorer("tiny_digits")

    def condition(self, row: int) -> Any:
        """Conditioning of a running row."""
        return self.family.batch(self.family.encoder.encode([self.prompts[row % len(self.prompts)].text]))

    @torch.no_grad()
    def x0(self, row: int, rank: int, weights: str = "old", tick: int | None = None) -> torch.Tensor:
        """The final latent [1, C, T, H, W] of one sample."""
        rl = self.profile.rl
        noise = draws.normal(self.family.latent_shape, rl.seed, "rollout", row if tick is None else tick, rank)[None]
        cond = self.condition(row)
        with adapters.weights(self.family.denoiser, weights):
            return sampler.sample(
                lambda x, sigma: self.family.denoiser(x, sigma, cond),
                noise,
                steps=rl.sample_steps,
                shift=rl.sampler_shift,
                clamp=(-1.0, 1.0),
            )

    def score(self, row: int, x0: torch.Tensor) -> float:
        """The scorer's own value, called directly."""
        image = self.family.decoder.decode(x0)[0, 0].numpy()
        prompt = self.prompts[row % len(self.prompts)]
        return self.scorer.score([image], [prompt.reward_text], [prompt.metadata])[0][0]

    def first_step(self) -> dict[str, float]:
        """Metrics of step 1 at guidance 1, kl_beta 0, linear map, where old is the policy."""
        rl, rows, ranks = self.profile.rl, self.profile.data.rows_per_step, self.profile.ranks
        x0 = {(n, r): self.x0(n, r) for n in range(rows) for r in range(ranks)}
        reward = np.array([[self.score(n, x0[n, r]) for r in range(ranks)] for n in range(rows)])
        centred = reward - reward.mean(axis=1, keepdims=True)
        advantage = np.clip(centred / (reward.std(axis=1, keepdims=True) + 1e-4), rl.advantage_low, rl.advantage_high)
        optimality = np.clip(advantage / (2 * rl.advantage_high) + 0.5, 0, 1)
        losses, errors = [], []
        for (n, r), latent in x0.items():
            for k, t in enumerate(self._times(n, r)):
                loss, error = self._pair(n, r, k, float(t), latent, optimality[n, r])
                losses.append(loss)
                errors.append(error)
        return {
            "train/reward_mean": reward.mean(),
            "train/advantage_mean": advantage.mean(),
            "train/optimality_mean": optimality.mean(),
            "train/optimality_second_moment": (optimality**2).mean(),
            "train/policy_loss": rl.policy_loss_scale * float(np.mean(losses)),
            "train/kl_loss": 0.0,
            "train/positive_error": float(np.mean(errors)),
            "train/negative_error": float(np.mean(errors)),
            "train/old_gap": 0.0,
        }

    def _times(self, row: int, rank: int) -> torch.Tensor:
        rl = self.profile.rl
        return schedule.draw_timesteps(
            seed=rl.seed, row=row, rank=rank, update=0, count=rl.timesteps_per_sample, source=rl.timestep_source,
            uniform_law=rl.uniform_timestep, shift=rl.train_shift or rl.sampler_shift, t_range=rl.train_t_range,
            grid=schedule.sigmas(rl.sample_steps, rl.sampler_shift),
        )  # fmt: skip

    @torch.no_grad()
    def _pair(self, row: int, rank: int, k: int, t: float, x0: torch.Tensor, r: float) -> tuple[float, float]:
        eps = draws.normal(self.family.latent_shape, self.profile.rl.seed, "train_eps", row, rank, k)[None]
        x_t = (1 - t) * x0 + t * eps
        with adapters.weights(self.family.denoiser, "policy"):
            v = self.family.denoiser(x_t, torch.tensor([t]), self.condition(row))
        clean, noise, velocity = (a.double().numpy() for a in (x0, eps, v))
        # At v = v_old both branches predict the same image: x_t - t v.
        miss = ((1 - t) * clean + t * noise - t * velocity) - clean
        weight = max(np.abs(miss).mean(), 1e-5)
        branch = (miss**2).mean() / weight
        return (r * branch + (1 - r) * branch) / self.profile.rl.beta, float(np.abs(miss).mean())
