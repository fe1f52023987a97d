"""What the benchmark of FP8 rollouts reports: which states it sees, and when a group's best sample is another one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nftctl.algorithm import sampler
from nftctl.algorithm.schedule import sigmas

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fp8_effect

    yield fp8_effect
    for name in ("fp8_effect", "one_rank"):
        sys.modules.pop(name, None)


def test_states_are_those_after_each_step(benchmark: Any) -> None:
    noise, velocity = torch.randn(2, 3, 1, 2, 2), torch.randn(2, 3, 1, 2, 2)
    whole = sampler.sample
    with benchmark.recorded() as states:
        x0 = sampler.sample(lambda x, sigma: velocity, noise, steps=4, shift=3.0, clamp=(-1.0, 1.0))
    assert sampler.sample is whole
    # A constant velocity is integrated exactly by any solver.
    at = sigmas(4, 3.0)
    for state, sigma in zip(states[:-1], at[1:-1], strict=True):
        torch.testing.assert_close(state, noise + (sigma - at[0]) * velocity, rtol=1e-5, atol=1e-5)
    assert states[-1] is x0
    torch.testing.assert_close(x0, (noise - at[0] * velocity).clamp(-1, 1), rtol=1e-5, atol=1e-5)


def test_a_best_sample_is_another_one_only_if_none_of_the_best_stayed(benchmark: Any) -> None:
    base = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 1.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
    other = torch.tensor([[1.0, 9.0, 8.0], [4.0, 5.0, 1.0], [3.0, 2.0, 1.0], [2.0, 1.0, 3.0]])
    assert benchmark.changed(base, other) == 0.25
    assert benchmark.changed(-base, -other) == 0.25


def test_figures_of_groups(benchmark: Any) -> None:
    rewards = {"base": torch.tensor([[0.0, 1.0], [2.0, 2.0]]), "fp8": torch.tensor([[0.5, 0.0], [2.0, 2.0]])}
    latents = benchmark.relative(torch.tensor([[[3.0, 5.0]]]), torch.tensor([[[3.0, 4.0]]]))
    found = benchmark.effect(benchmark.Found(latents, torch.tensor([1.5]), rewards))
    assert found["latent_error"] == [0.2]
    assert (found["best_changes"], found["worst_changes"], found["zero_spread_groups"]) == (0.5, 0.5, 1)
    assert found["unrelated_samples_would_change"] == 0.5
    assert found["reward_difference"] == 0.375
    # One group has a spread, and FP8 turns it round.
    assert found["correlation_within_groups"] == -1.0
