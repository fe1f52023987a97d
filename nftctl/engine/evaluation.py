"""Looking at the model from fixed noise: held-out evaluation and sample grids. Moves no random number of the run.

Owns what is sampled, by which weights, and what a row of evaluations.jsonl says. Torch-free: the ranks do the work.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nftctl.engine.group import Group
from nftctl.engine.sheet import COLUMNS
from nftctl.engine.worker import Drawing, EvalSample
from nftctl.profile.prompts import Prompt, read_prompts, resolve_prompt_file, spread
from nftctl.profile.schema import Profile
from nftctl.roles.trajectory import Sampling, Weights
from nftctl.run.state import RunState


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a grid: its name, the weights that make it, and the column that it is known to be equal to."""

    name: str
    weights: Weights
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is evaluated, fixed for the whole run.

    names     columns of the grids, in the order in which they stand
    distance  whether the reference is there, to hold the evaluated weights against
    """

    held_out: tuple[EvalSample, ...]
    grid: tuple[EvalSample, ...]
    names: tuple[str, ...]
    how: Sampling
    weights: Weights = "policy"
    distance: bool = True

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
        there = {"base": True, "old": rl.old.build_old, "ema": settings.weights == "ema", "policy": True}
        return cls(
            held_out=_samples(prompts, settings.samples_per_prompt, settings.seed, "eval"),
            grid=_samples(shown, look.noises, settings.seed, "grid"),
            names=tuple(name for name in COLUMNS if there[name]),
            how=how,
            weights=settings.weights,
            distance=profile.model.train == "lora" or rl.kl_beta > 0,
        )

    @property
    def base_grid(self) -> tuple[tuple[EvalSample, ...], Sampling] | None:
        """The grid's samples where the base has to be sampled before it is trained away; None where it stays."""
        return None if self.distance or not self.grid else (self.grid, self.how)

    def score(self, group: Group, step: int) -> dict[str, float]:
        """Mean reward and components over the held-out samples; empty when there are none."""
        if not self.held_out:
            return {}
        answers = _in_order(group.call("evaluate", self.held_out, self.how, self.weights, self.distance))
        found = answers[: len(self.held_out)]
        row: dict[str, float] = {"step": step}
        for name in sorted(found[0][0][1]):
            row[f"eval/{name}"] = _mean([parts[name] for (_, parts), _ in found])
        rewards = [reward for (reward, _), _ in found]
        row |= {
            "eval/reward": _mean(rewards),
            "eval/std": statistics.pstdev(rewards),
            "eval/samples": len(found),
        }
        if distances := [distance for _, distance in found if distance is not None]:
            row["eval/kl_distance"] = _mean(distances)
        return row

    def columns(self, state: RunState) -> list[Column]:
        """Who makes each column now. What is known to be equal to the bit is sampled once."""
        if not state.optimizer_steps:
            return [Column(name, "reference", "" if name == "base" else "base") for name in self.names]
        # Counted and not compared: a blend equals no policy.
        copied = state.old_version == state.policy_version and not state.old_blended
        same = {"old": "policy"} if copied else {}
        return [Column(name, COLUMNS[same.get(name, name)], same.get(name, "")) for name in self.names]

    def draw(self, group: Group, path: Path, state: RunState) -> dict[str, Any]:
        """Write the grid of the weights as they are after `state`; returns what its JSON file says."""
        columns, rows = self.columns(state), [sample.reward_prompt for sample in self.grid]
        shares = group.call("paint", self.grid, self.how, list(dict.fromkeys(c.weights for c in columns)))
        made = {c.weights: _in_order([share[c.weights] for share in shares])[: len(rows)] for c in columns}
        rewards = [[made[c.weights][row] for c in columns] for row in range(len(rows))]
        notes = [f"= {c.same_as}" if c.same_as else f"mean {_mean(made[c.weights]):.3f}" for c in columns]
        title = f"step {state.step}" if state.step else "before the first step"
        drawing = Drawing(path, title, rows, [c.weights for c in columns], self.names, notes, rewards)
        return {
            "step": state.step,
            "prompts": rows,
            "columns": list(self.names),
            "same_as": {c.name: c.same_as for c in columns if c.same_as},
            "rewards": rewards,
            **group.call("grid", drawing)[0].facts(),
        }


def _samples(prompts: Sequence[Prompt], per_prompt: int, seed: int, purpose: str) -> tuple[EvalSample, ...]:
    return tuple(
        EvalSample(p.text, p.reward_text, p.metadata, (seed, purpose, i, j))
        for i, p in enumerate(prompts)
        for j in range(per_prompt)
    )


def _in_order(shares: Sequence[Sequence[Any]]) -> list[Any]:
    """Answers of all ranks (samples rank, rank + world, ...) in the order of the samples, repeats last."""
    return [answer for turn in zip(*shares, strict=True) for answer in turn]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
