"""Looking at the model from fixed noise: held-out evaluation and sample grids. Moves no random number of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nftctl.engine.group import Group
from nftctl.engine.worker import EvalSample
from nftctl.profile.prompts import Prompt, read_prompts, resolve_prompt_file, spread
from nftctl.profile.schema import Profile
from nftctl.roles.trajectory import Sampling, Weights


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is evaluated, fixed for the whole run."""

    held_out: tuple[EvalSample, ...]
    grid: tuple[EvalSample, ...]
    grid_shape: tuple[int, int]
    how: Sampling
    weights: Weights = "policy"

    @classmethod
    def of(cls, profile: Profile, prompt_path: Path) -> Evaluation:
        """Samples of `[eval]` and `[samples]`, keyed by (eval.seed, purpose, prompt, sample)."""
        settings, rl, look = profile.eval, profile.rl, profile.samples
        prompts = read_prompts(resolve_prompt_file(settings.prompt_file, "test")) if settings.prompt_file else []
        shown = spread(prompts or read_prompts(prompt_path), look.prompts)
        how = Sampling(
            steps=rl.sample_steps if settings.steps is None else settings.steps,
            shift=rl.sampler_shift,
            guidance=rl.guidance if settings.guidance is None else settings.guidance,
        )
        held_out = _samples(prompts, settings.samples_per_prompt, settings.seed, "eval")
        grid = _samples(shown, look.columns, settings.seed, "grid")
        return cls(held_out, grid, (len(shown), look.columns), how, settings.weights)

    def score(self, group: Group, step: int) -> dict[str, float]:
        """Mean reward and components over the held-out samples; empty when there are none."""
        if not self.held_out:
            return {}
        shares = group.call("evaluate", self.held_out, self.how, self.weights)
        world = len(shares)
        scores = [shares[i % world][i // world] for i in range(len(self.held_out))]
        row = {"step": step, "eval/reward": _mean([reward for reward, _ in scores]), "eval/samples": len(scores)}
        for name in sorted(scores[0][1]):
            row[f"eval/{name}"] = _mean([parts[name] for _, parts in scores])
        return row

    def draw(self, group: Group, path: Path, step: int) -> Path | None:
        """Write the grid of the current policy; None when the profile asks for none."""
        if not self.grid:
            return None
        title = "base" if step == 0 else f"{self.weights} after {step} steps"
        group.call("grid", self.grid, self.how, self.weights, self.grid_shape, path, title)
        return path


def _samples(prompts: Sequence[Prompt], per_prompt: int, seed: int, purpose: str) -> tuple[EvalSample, ...]:
    return tuple(
        EvalSample(p.text, p.reward_text, p.metadata, (seed, purpose, i, j))
        for i, p in enumerate(prompts)
        for j in range(per_prompt)
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
