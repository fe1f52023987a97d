"""The table of metrics knows every number that a run writes, and no name twice."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.profile.outline import dotted_keys
from nftctl.run.metrics import EVALUATIONS, METRICS, STEPS, metric_of
from nftctl.run.rows import read_rows

SNAPSHOTS = Path(__file__).parents[1] / "cli" / "snapshots"


def strangers(keys: Any, file: str) -> list[str]:
    return [key for key in keys if metric_of(key, file) is None]


@pytest.mark.parametrize(("name", "file"), [("metrics.txt", STEPS), ("evaluations.txt", EVALUATIONS)])
def test_the_names_on_record_are_known(name: str, file: str) -> None:
    keys = (SNAPSHOTS / name).read_text().split()
    assert len(keys) >= 8
    assert strangers(keys, file) == []


@pytest.mark.ray
def test_every_number_of_a_real_run_is_known(world4: Any, tiny: Any, reporter: Any, tmp_path: Path) -> None:
    sets = ('job.name="x"', "eval.samples_per_prompt=1", "rl.kl_beta=0.01", "rl.ema_decay=0.9")
    plan = plan_launch(tiny(1, sets, look=True), run_dir=tmp_path)
    run_job(plan, reporter, world4)
    for name in (STEPS, EVALUATIONS):
        rows = read_rows(plan.run_path / name)
        assert rows
        for row in rows:
            assert strangers(row, name) == []


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward/std", "reward/std"),
        ("reward/digits", "reward/<provider>"),
        ("reward/digits/std", "reward/<provider>/std"),
        ("reward/digits/judge", "reward/<provider>/<component>"),
        ("timer/reward/digits", "timer/reward/<provider>"),
        ("timer/reward_exposed", "timer/reward_exposed"),
        ("train/loss", "train/loss"),
    ],
)
def test_a_name_of_its_own_goes_before_a_pattern(key: str, name: str) -> None:
    metric = metric_of(key)
    assert metric is not None
    assert metric.name == name


@pytest.mark.parametrize(
    "key", ["reward/a/b/c", "train/lossy", "train", "", "eval/reward", "timer/reward/a/b", "xstep"]
)
def test_what_no_run_writes_is_a_stranger(key: str) -> None:
    assert metric_of(key) is None


def test_every_entry_is_one_of_its_kind_and_says_what_it_means() -> None:
    names = Counter((metric.file, metric.name) for metric in METRICS)
    assert max(names.values()) == 1
    for metric in METRICS:
        assert metric.meaning.endswith(".")
        assert "|" not in "".join((metric.meaning, metric.unit, metric.healthy, metric.otherwise))
        # What to do belongs to something that can go wrong.
        assert metric.healthy or not metric.otherwise


def test_keys_that_the_table_names_exist() -> None:
    """Of the profile, and of the table itself."""
    known = {*dotted_keys(), "rl.old"} | {metric.name for metric in METRICS}
    tops = {key.split(".")[0] for key in dotted_keys()} | {name.split("/")[0] for name in known}
    text = " ".join(" ".join((metric.meaning, metric.healthy, metric.otherwise)) for metric in METRICS)
    quoted = {word for word in re.findall(r"`([\w./<>]+)`", text) if re.split(r"[./]", word)[0] in tops}
    assert len(quoted) >= 25
    assert quoted - known - {"samples/", "judge"} == set()
