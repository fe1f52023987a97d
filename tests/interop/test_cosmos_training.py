"""Ranks train against a cosmos-rl service that was written from the format's description alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.profile.load import load_profile
from nftctl.run.checkpoints import list_steps
from nftctl.run.manifest import read_manifest
from tests.engine.test_runs import QUIET, start

pytestmark = pytest.mark.ray

SERVER = Path(__file__).parent / "cosmos_server.py"
TOKEN = "sentinel-2b7e1516"
STEPS = 2


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The service in a process of its own; yields its URL."""
    process = subprocess.Popen([sys.executable, str(SERVER), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def profile_of(folder: Path, url: str, *, reward: str = "") -> Path:
    """The tiny profile with two cosmos-rl providers, one of which is a sum of keys."""
    path = folder / "cosmos.toml"
    path.write_text(
        f'extends = "tiny_t2i_cpu"\n[reward]\ndeadline_s = 6.0\n{reward}\n'
        f'[[reward.providers]]\nname = "brightness"\nprotocol = "cosmos-rl"\nurl = "{url}"\nrevision = "said/1"\n'
        f'[[reward.providers]]\nname = "warm"\nprotocol = "cosmos-rl"\nurl = "{url}"\nrevision = "said/2"\n'
        'reward_fn = "channels"\nscore_key = "red + green"\nweight = 0.5\n'
    )
    return path


@pytest.fixture
def authorised(world4: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The started ranks, with the token in the environment of each and of this process."""
    monkeypatch.setenv("NFTCTL_REWARD_TOKEN", TOKEN)
    world4.call("apply", lambda _: os.environ.update(NFTCTL_REWARD_TOKEN=TOKEN))
    yield world4
    world4.call("apply", lambda _: os.environ.pop("NFTCTL_REWARD_TOKEN"))


def test_a_run_is_trained_by_a_service_that_knows_nothing_of_it(
    authorised: Any, reporter: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving("--token", TOKEN, "--replica", "replica-1") as url:
        path = profile_of(tmp_path, url, reward='aggregation = "gdpo"')
        sets = [*QUIET[1::2], "rl.group_size=4"]
        resolved = load_profile(path, sets=sets, flags={"rl.max_steps": STEPS, "job.name": "cosmos"}, env={})
        summary = run_job(plan_launch(resolved, run_dir=tmp_path / "runs"), reporter, authorised)
        run = Path(summary["run"])
        health = json.load(urllib.request.urlopen(f"{url}/healthz", timeout=10))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/warm"] == pytest.approx(row["reward/warm/red"] + row["reward/warm/green"], rel=1e-9)
        assert row["train/reward_mean"] == pytest.approx(row["reward/brightness"] + 0.5 * row["reward/warm"], rel=1e-9)
        assert row["reward/brightness/failures"] == row["reward/warm/failures"] == 0.0
        assert row["timer/reward/warm"] > 0
    # Two providers saw every image of every step once.
    assert health["images"] == rows[-1]["system/reward_images"]
    manifest = read_manifest(list_steps(run / "checkpoints")[-1][1])
    assert manifest.reward == [{"name": "brightness", "revision": "said/1"}, {"name": "warm", "revision": "said/2"}]
    identity = manifest.identity
    assert identity["reward.providers.warm.score_key"] == "red + green"
    assert identity["reward.providers.warm.reward_fn"] == "channels"
    assert identity["reward.providers.warm.protocol"] == "cosmos-rl"
    assert identity["reward.aggregation"] == "gdpo"
    # It is in no file of the run, in no rank's log and in nothing that was said.
    files = [path for folder in (run, Path(authorised._logs)) for path in folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.name.startswith("rank_")]) == 4
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
    said = capfd.readouterr()
    assert TOKEN not in said.out + said.err + "".join((*reporter.notes, *reporter.warnings))


@pytest.mark.soak
def test_a_task_that_the_service_dropped_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with serving("--fault", "dropped", "--after", "5") as url:
        arguments = ("launch", str(profile_of(tmp_path, url)), "--steps", str(STEPS), "--name", "cosmos", *QUIET)
        process = start(tmp_path, *arguments, NFTCTL_REWARD_TOKEN=TOKEN)
        _, err = process.communicate(timeout=120)
        run = tmp_path / "runs" / "cosmos"
    assert process.returncode == 4, err
    error = next(line for line in err.splitlines() if line.startswith("error: "))
    assert f"reward service {url}/api/reward/pull: task " in error
    assert "still answers 400" in error
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
