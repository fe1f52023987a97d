"""Failures planted in the embedded task on four ranks: the right alarm comes within ten steps, and never without cause.

The limits were fixed before the planted runs were first made. Figures are printed: they are the point.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.run.rows import read_rows
from tests.conftest import Quiet

pytestmark = [pytest.mark.soak, pytest.mark.ray]

STEPS = 10
"""Within which a planted failure has to be told of."""
HEALTHY = 60
"""Steps in which a sound run may raise nothing."""
QUIET = ("samples.prompts=0", "logging.tensorboard=false", "eval.every=5")

PLANTED = {
    # what is planted: settings, and the alarms of which one at least has to come
    "a reward that can be hacked, judged by who is not trained on": (
        (
            'reward.providers=[{name="brightness",kind="embedded",scorer="brightness"}]',
            'eval.providers=[{name="digits",kind="embedded",scorer="tiny_digits"}]',
        ),
        {"reward-hacking"},
    ),
    "a reward that can be hacked, and no evaluation": (
        ('reward.providers=[{name="brightness",kind="embedded",scorer="brightness"}]', 'eval.prompt_file=""'),
        {"images-saturating"},
    ),
    "a learning rate a hundred times too high": (
        ("optimizer.lr=0.1",),
        {"loss-exploding", "grad-exploding", "reward-collapse"},
    ),
    "a constant reward": (("reward.providers.0.clip=[2,3]",), {"zero-spread"}),
    "bounds that clamp": (("rl.advantage_low=-0.1", "rl.advantage_high=0.1"), {"clamp"}),
}


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print past pytest."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="", flush=True)

    return line


def alarms(world: Any, folder: Path, steps: int, sets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of alarms.jsonl after `steps` steps of the bundled profile with these settings."""
    flags = {"rl.max_steps": steps}
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=[*QUIET, *sets], flags=flags, env={})
    run = Path(run_job(plan_launch(resolved, run_dir=folder), Quiet(), world)["run"])
    assert len(read_rows(run / "metrics.jsonl")) == steps
    return read_rows(run / "alarms.jsonl")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("failure", PLANTED)
def test_a_planted_failure_is_told_of_within_ten_steps(
    world4: Any, tmp_path: Path, say: Callable[[str], None], failure: str
) -> None:
    sets, wanted = PLANTED[failure]
    found = alarms(world4, tmp_path, STEPS, sets)
    for row in found:
        say(f"{failure}: step {row['step']}: {row['alarm']}, {row['value']:.4g} against {row['limit']:.4g}")
    assert wanted & {row["alarm"] for row in found}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_run_raises_none(world4: Any, tmp_path: Path, seed: int) -> None:
    assert alarms(world4, tmp_path, HEALTHY, (f"rl.seed={seed}",)) == []
