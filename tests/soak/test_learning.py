"""What `nftctl launch` promises, over three seeds: held-out reward and judge rise, and only because of the rewards.

The judge is a component that training never sees, and the held-out prompts are never trained on. The control is the
same run with each step's advantages dealt out anew among its samples: same losses, same optimizer, no information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.profile.load import EMBEDDED_DEFAULT, bundled_profiles, load_profile
from tests.conftest import Quiet

pytestmark = [pytest.mark.soak, pytest.mark.ray]

SEEDS = (0, 1, 2)
RISE = {"reward": 0.25, "scenes/judge": 0.15}
"""Least rise of each held-out figure."""
DRIFT = 0.05
"""Most that the control's held-out reward may rise."""


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print past pytest: the figures are the point."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="", flush=True)

    return line


def learn(world: Any, seed: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Train the embedded default as it is shipped and return (before, after) of each held-out figure."""
    sets = [f"rl.seed={seed}", "samples.prompts=0", "logging.tensorboard=false"]
    resolved = load_profile(bundled_profiles()[EMBEDDED_DEFAULT], sets=sets, env={})
    summary = run_job(plan_launch(resolved, run_dir=folder), Quiet(), world)
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert (before["step"], after["step"]) == (0, resolved.profile.rl.max_steps)
    return {name.removeprefix("eval/"): (before[name], after[name]) for name in before if name.startswith("eval/")}


@contextmanager
def scrambled(world: Any, seed: int) -> Iterator[None]:
    """Deal each step's advantages out anew among its samples; every rank by the same permutation."""

    def scramble(worker: Any) -> None:
        from nftctl.algorithm import advantage, draws

        original, steps = advantage.advantages, iter(range(10**9))

        def advantages(rewards: Any, kept: Any, std: Any = "group") -> Any:
            right = original(rewards, kept, std)
            mixed, order = right.clone(), draws.permutation(right[kept].numel(), seed, "scrambled", next(steps))
            mixed[kept] = right[kept].flatten()[order].reshape(right[kept].shape)
            return mixed

        advantage.advantages = advantages
        worker.unscramble = lambda: setattr(advantage, "advantages", original)

    world.call("apply", scramble)
    try:
        yield
    finally:
        world.call("apply", lambda worker: worker.unscramble())


def told(title: str, figures: dict[str, tuple[float, float]]) -> str:
    parts = [f"{name} {a:.3f} -> {b:.3f} ({b - a:+.3f})" for name, (a, b) in figures.items() if name != "samples"]
    return f"{title}: {', '.join(parts)}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_reward_and_judge_rise(world4: Any, tmp_path: Path, say: Callable[[str], None], seed: int) -> None:
    figures = learn(world4, seed, tmp_path)
    say(told(f"seed {seed}", figures))
    for name, least in RISE.items():
        before, after = figures[name]
        assert after - before >= least, name


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_rises_without_information(world4: Any, tmp_path: Path, say: Callable[[str], None], seed: int) -> None:
    with scrambled(world4, seed):
        figures = learn(world4, seed, tmp_path)
    say(told(f"control, seed {seed}", figures))
    before, after = figures["reward"]
    assert after - before <= DRIFT
