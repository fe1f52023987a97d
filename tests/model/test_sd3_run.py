"""A Stable Diffusion 3 base in a real world: four ranks, a scorer, a checkpoint, and a bitwise resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.profile.load import Resolved, load_profile
from nftctl.profile.preflight import refuse_if_wrong
from nftctl.run.directory import find_checkpoint

from .sd3_bases import write_sd3_base

pytestmark = pytest.mark.ray

PROFILE = """
extends = "sd35m_nft_paper_2gpu"
[rl]
init_from = "base"
group_size = 4
sample_steps = 3
timesteps_per_sample = 2
guidance = 2
[model]
height = 256
width = 272
dtype = "float32"
rollout_micro_batch = 2
train_micro_batch = 3
[data]
prompt_file = "prompts.txt"
rows_per_step = 3
[[reward.providers]]
name = "light"
kind = "embedded"
scorer = "brightness"
[logging]
tensorboard = false
[samples]
prompts = 0
[checkpoint]
every = 1
"""


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics without what differs between any two runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{k: v for k, v in row.items() if not k.startswith(("timer/", "system/"))} for row in lines]


def state(run: Path, step: int) -> dict[str, bytes]:
    files = sorted((run / "checkpoints" / f"step_{step:06d}" / "state").glob("*.safetensors"))
    return {name: t.numpy().tobytes() for file in files for name, t in load_file(file).items()}


def resolve(steps: int, name: str) -> Resolved:
    found = load_profile(Path("tiny.toml"), flags={"rl.max_steps": steps, "job.name": name}, env={})
    refuse_if_wrong(found)
    return found


def test_one_step_and_one_more_are_two_straight(
    world4: Any, reporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = write_sd3_base(tmp_path / "base", pos_embed_max_size=18)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red seven\na blue cat\nrain\na house by the sea\n")
    # The ranks of a lent world work where they were started.
    text = PROFILE.replace('"base"', f'"{base}"').replace('"prompts.txt"', f'"{prompts}"')
    (tmp_path / "tiny.toml").write_text(text)
    runs = tmp_path / "runs"
    for steps, name in ((2, "straight"), (1, "parted")):
        run_job(plan_launch(resolve(steps, name), run_dir=runs), reporter, world4)
    run, checkpoint = find_checkpoint(str(runs / "parted"), runs)
    run_job(plan_resume(run, checkpoint, resolve(2, "parted"), steps=2), reporter, world4)
    said = " ".join(reporter.notes)
    assert said.count("127 of 127 base tensors") == 3  # the table of positions among them
    straight, parted = tmp_path / "runs" / "straight", tmp_path / "runs" / "parted"
    assert [row["step"] for row in rows(parted)] == [1, 2]
    assert rows(straight) == rows(parted)
    assert all(
        row["train/grad_norm"] > 0 and row["forwards/planned"] == row["forwards/executed"] for row in rows(parted)
    )
    # Old differs from the policy from the second step on, and both are in the checkpoint with the optimizer's moments.
    assert rows(parted)[1]["train/old_gap"] > 0
    whole = state(straight, 2)
    assert len(whole) == 5 * 2 * (3 * 8 - 1)
    assert whole == state(parted, 2)
    assert whole != state(straight, 1)
