"""Histogram, stage times, alarms and settings, from rows whose sums are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from nftctl.report import alarms, histogram, settings, stages
from nftctl.report.facts import read_run

from .folders import alarm, make_run, metrics, write_rows
from .html_page import Page


def scores(steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "rewards": [[step / 100, 0.5], None, [1.0, None]]} for step in range(1, steps + 1)]


def test_the_histogram_counts_the_ends_as_numpy_does() -> None:
    found = histogram.histogram_of(scores(30))
    assert found is not None
    values = [[value for n in steps for value in (n / 100, 0.5, 1.0)] for steps in (range(1, 11), range(21, 31))]
    for counts, expected in zip((found.first, found.last), values, strict=True):
        assert counts == np.histogram(expected, bins=histogram.BINS, range=(0.01, 1.0))[0].tolist()
    assert (found.first_steps, found.last_steps) == ((1, 10), (21, 30))
    assert found.means == pytest.approx([np.mean(v) for v in values])


def test_the_ends_never_overlap() -> None:
    found = histogram.histogram_of(scores(7))
    assert found is not None
    assert (found.first_steps, found.last_steps) == ((1, 3), (5, 7))


@pytest.mark.parametrize(
    "rows",
    [
        [], scores(1), [{"step": 1, "rewards": None}, {"step": 2}],
        [{"step": step, "rewards": [[0.5, 0.5]]} for step in (1, 2)],
    ],
)  # fmt: skip
def test_without_rewards_that_differ_there_is_no_histogram(rows: list[dict[str, Any]]) -> None:
    assert histogram.histogram_of(rows) is None


def test_the_histogram_is_drawn_with_its_table() -> None:
    found = histogram.histogram_of(scores(30))
    assert found is not None
    page = Page(histogram.section(found))
    drawing = ElementTree.fromstring(next(svg for svg in page.svgs() if "xmlns" in svg))
    assert len(list(drawing)) == sum(count > 0 for count in found.first + found.last)
    counts = [int(text) for tag, text in page.texts if tag == "td"]
    assert sum(counts) == sum(found.first) + sum(found.last) == 60


def test_stage_times_are_medians_without_the_first_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0, looks=())
    slow = {"timer/sample": 30.0, "timer/step": 31.0}
    rows = [
        metrics(n, 0.5, **(slow if n < 3 else {"timer/sample": 0.1 * n, "timer/step": 0.1 * n + 0.7}))
        for n in range(1, 10)
    ]
    write_rows(run.metrics, rows)
    found = stages.times_of(read_run(run))
    assert found is not None
    assert found.steps == 7
    assert found.stages["sample"] == pytest.approx(0.6)
    assert found.step == pytest.approx(1.3)
    assert found.stages["rest"] == pytest.approx(1.3 - 0.6 - 0.2 - 0.01 - 0.4)
    assert found.total == pytest.approx(62 + sum(0.1 * n + 0.7 for n in range(3, 10)))
    assert found.images_per_second == pytest.approx(8 * 4 / 1.3)
    assert found.forwards == (9 * 144, 9 * 144)
    words = Page(stages.section([("first", found)])).visible
    assert "1,296 forwards, exactly as planned" in words
    assert "600 ms" in words


def test_a_run_without_timers_has_no_times(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0)
    write_rows(run.metrics, [{"step": 1, "train/reward_mean": 0.5}])
    assert stages.times_of(read_run(run)) is None


def test_alarms_are_grouped_by_kind_the_latest_first() -> None:
    rows = [alarm(3, "clamp", "first"), alarm(9, "zero-spread"), alarm(12, "clamp", "second")]
    first, second = alarms.grouped(rows)
    assert (first["alarm"], first["count"], first["first_step"], first["last_step"]) == ("clamp", 2, 3, 12)
    assert first["message"] == "second"
    assert second["alarm"] == "zero-spread"
    words = Page(alarms.section([*rows, {"step": 13, "alarm": "bare"}])).visible
    assert "2 times, steps 3 to 12" in words
    assert "value 0.61, limit 0.5" in words
    assert "widen it" in words
    assert "None" not in words


def test_leaves_of_a_profile() -> None:
    tree = {"a": {"b": 1, "c": {}}, "p": [{"x": 1}, {"x": None}], "l": [1, 2], "e": []}
    assert list(settings.flat(tree)) == [
        ("a.b", 1), ("a.c", {}), ("p.0.x", 1), ("p.1.x", None), ("l", [1, 2]), ("e", []),
    ]  # fmt: skip


def test_only_what_differs_from_the_defaults_is_listed(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, sets=["optimizer.lr=0.002", "reward.retries=3"]))
    changed = {key: (value, default) for key, value, default in settings.changed(run)}
    assert changed["optimizer.lr"] == (0.002, 3e-4)
    assert changed["rl.kl_beta"] == (0.0, 1.0)
    assert changed["reward.providers.0.kind"] == ("embedded", "http")
    assert "reward.retries" not in changed  # given, and the default
    assert "rl.group_size" not in changed
    assert "reward.providers.0.weight" not in changed


def test_profiles_are_compared_key_by_key(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path, name, sets=sets))
        for name, sets in (("one", []), ("two", ["optimizer.lr=0.002"]), ("three", ["eval.every=7"]))
    ]
    assert dict(settings.compared(runs)) == {"eval.every": [50, 50, 7], "optimizer.lr": [0.001, 0.002, 0.001]}
    page = Page(settings.comparison(runs, ["one", "two", "three"]))
    assert "changes the update" in page.visible
    assert "no result" in page.visible
    assert "differ in nothing" in settings.comparison(runs[:1] * 2, ["one", "one"])
