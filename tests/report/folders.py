"""Run folders as a run leaves them, made of its own writers and of real PNG files, with figures that tests choose."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.run.directory import RunDirectory
from nftctl.run.rows import JsonLines

IMAGES = 144
Level = Callable[[int], float]


def level(start: float, end: float, steps: int) -> Level:
    """A straight line from step 0 to the last."""
    return lambda step: start + (end - start) * step / max(1, steps)


def metrics(step: int, reward: float, **more: float) -> dict[str, float]:
    """A row with the names that a run writes."""
    return {
        "step": step, "train/reward_mean": reward, "train/loss": 1.7 + 0.1 * math.sin(step), "train/kl_loss": 0.0,
        "train/policy_loss": 1.7 + 0.1 * math.sin(step), "train/positive_error": 0.16, "train/negative_error": 0.15,
        "train/old_gap": 1e-8 * step, "train/grad_norm": 0.1 + 0.01 * (step % 7), "train/lr": 1e-3,
        "reward/std": 0.3, "reward/group_std": 0.25 + 0.01 * (step % 3), "reward/digits": reward,
        "reward/digits/judge": reward, "reward/digits/failures": 0.0, "reward/dropped_groups": 0.0,
        "forwards/planned": 144.0, "forwards/executed": 144.0, "timer/sample": 0.3, "timer/prepare": 0.2,
        "timer/reward_exposed": 0.01, "timer/train": 0.4, "timer/step": 1.0, **more,
    }  # fmt: skip


def rows_of(steps: int, reward: Level, noise: float = 0.02, seed: int = 0) -> list[dict[str, float]]:
    """A row for each step; the reward scatters about its level."""
    draw = random.Random(seed)
    return [metrics(step, reward(step) + draw.gauss(0, noise)) for step in range(1, steps + 1)]


def looks_of(steps: Sequence[int], reward: Level, **more: Level) -> list[dict[str, float]]:
    """An evaluation row for each of the steps."""
    return [
        {"step": s, "eval/reward": reward(s), "eval/samples": IMAGES, **{f"eval/{k}": f(s) for k, f in more.items()}}
        for s in steps
    ]


def make_run(
    parent: Path,
    name: str = "first",
    *,
    steps: int = 20,
    end: float = 0.9,
    total: int | None = None,
    looks: Sequence[int] | None = None,
    sets: Sequence[str] = (),
    argv: Sequence[str] = ("nftctl", "launch"),
    alarms: Sequence[dict[str, Any]] = (),
) -> RunDirectory:
    """A run of the embedded profile whose reward goes from 0.5 to `end`."""
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, flags={"job.name": name}, env={})
    record = {
        "run_id": "0123456789abcdef", "profile": "tiny_t2i_cpu", "identity": "ab" * 32, "init_from": "embedded",
        "base_fingerprint": "cd" * 32, "reward_revisions": {"digits": "ef" * 32},
        "total_steps": steps if total is None else total, "argv": list(argv),
        "versions": {"nftctl": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip
    run = RunDirectory.create(
        parent, name, profile_text="# tiny\n", resolved=resolved.profile.model_dump(), record=record
    )
    run.new_attempt()
    line = level(0.5, end, steps)
    write_rows(run.metrics, rows_of(steps, line))
    write_rows(run.path / "evaluations.jsonl", looks_of([0, steps] if looks is None else looks, line))
    write_rows(run.path / "alarms.jsonl", alarms)
    return run


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as a run appends them; no file for none."""
    if rows:
        lines = JsonLines(path, keep_through=0)
        for row in rows:
            lines.append(row)
        lines.close()


def write_scores(run: RunDirectory, steps: int) -> None:
    """Rewards of 8 prompts on 4 ranks; the second prompt of the first step was dropped."""
    draw = random.Random(1)
    rows: list[dict[str, Any]] = [
        {"step": step, "rewards": [[draw.random() for _ in range(4)] for _ in range(8)]} for step in range(1, steps + 1)
    ]
    rows[0]["rewards"][1] = None
    write_rows(run.path / "scores.jsonl", rows)


def draw_grid(
    run: RunDirectory, step: int, prompts: Sequence[str] = ("a red zero", "a blue one"), sidecar: bool = True
) -> Path:
    """A grid of 16-pixel cells, each of one colour, and what says where they are."""
    columns = ["base", "old", "policy"]
    width, height = 40 + 20 * len(columns), 10 + 20 * len(prompts)
    sheet = Image.new("RGB", (width, height), "white")
    for i in range(len(prompts)):
        for j in range(len(columns)):
            sheet.paste((40 * i, 80 * j, min(255, 5 * step)), (40 + 20 * j, 10 + 20 * i, 56 + 20 * j, 26 + 20 * i))
    path = run.samples / f"step_{step:06d}.png"
    sheet.save(path)
    if sidecar:
        rewards = [[round(0.1 * j + 0.01 * step, 4) for j in range(len(columns))] for _ in prompts]
        document = {
            "step": step, "prompts": list(prompts), "columns": columns, "rewards": rewards,
            "cell": [16, 16], "origin": [40, 10], "pitch": [20, 20],
        }  # fmt: skip
        path.with_suffix(".json").write_text(json.dumps(document))
    return path


def alarm(
    step: int, code: str = "clamp", message: str = "much is at the clamp", advice: str = "widen it"
) -> dict[str, Any]:
    """A row of alarms.jsonl."""
    return {"step": step, "alarm": code, "message": message, "advice": advice, "value": 0.61, "limit": 0.5}


def full_run(parent: Path, name: str = "first") -> RunDirectory:
    """A run with everything that a page can show."""
    run = make_run(parent, name, steps=40, looks=(0, 20, 40), alarms=[alarm(12), alarm(30)])
    write_scores(run, 40)
    for step in (0, 20, 40):
        draw_grid(run, step)
    draw_grid(run, 40).rename(run.samples / "extremes_000040.png")
    draw_grid(run, 40)
    return run
