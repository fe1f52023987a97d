"""Which charts a run gets, and what is in their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from nftctl.report.curves import POINTS, Curves, curves_of, thin
from nftctl.report.facts import read_run

from .folders import level, looks_of, make_run, metrics, rows_of, write_rows


def curves(tmp_path: Path, *names: str, steps: int = 20) -> Curves:
    runs = [read_run(make_run(tmp_path, name, steps=steps)) for name in names]
    return curves_of(runs, names)


def titles(found: Curves) -> dict[str, list[str]]:
    return {chart.title: [line.label for line in chart.lines] for chart in found.charts}


def test_the_reward_comes_first_raw_smooth_and_held_out(tmp_path: Path) -> None:
    chart = curves(tmp_path, "first").charts[0]
    assert [(line.label, line.look) for line in chart.lines] == [
        ("each step", "faint"), ("mean of 10 steps", "strong"), ("held out", "marks"),
    ]  # fmt: skip
    raw, smooth, held_out = (line.points for line in chart.lines)
    expected = rows_of(20, level(0.5, 0.9, 20))
    assert raw == [(row["step"], row["train/reward_mean"]) for row in expected]
    assert smooth[-1][1] == pytest.approx(sum(row["train/reward_mean"] for row in expected[-10:]) / 10)
    assert held_out == [(0, 0.5), (20, 0.9)]


def test_keys_are_drawn_once_and_those_that_are_not_there_are_not_shown(tmp_path: Path) -> None:
    found = curves(tmp_path, "first")
    labels = [line.label for chart in found.charts[1:] for line in chart.lines]
    assert len(labels) == len(set(labels))
    assert found.constant["train/lr"] == "0.001"
    assert found.constant["train/kl_loss"] == "0"
    assert found.repeated == {
        "reward/digits": "train/reward_mean", "reward/digits/judge": "train/reward_mean",
        "train/policy_loss": "train/loss",
    }  # fmt: skip
    every = {*labels, *found.constant, *found.repeated, "train/reward_mean"}
    assert every == set(metrics(1, 0.5)) - {"step"}
    assert "Images" not in titles(found)


def test_a_key_that_nobody_foresaw_has_a_chart(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0)
    rows = [
        metrics(n, 0.5)
        | {"new/thing": n, "images/saturation": 0.1 * n, "policy/distance": 2.0 * n, "train/surprise": n**2}
        for n in range(1, 5)
    ]
    write_rows(run.metrics, rows)
    found = titles(curves_of([read_run(run)], ["first"]))
    assert found["new"] == ["new/thing"]
    assert found["Images"] == ["images/saturation"]
    assert found["train"] == ["train/surprise"]
    assert ["policy/distance"] in found.values()


def test_lines_of_very_different_size_do_not_share_an_axis(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0, looks=())
    write_rows(
        run.metrics, [{"step": n, "a/small": n * 1e-3, "a/large": n * 100.0, "a/near": n * 90.0} for n in (1, 2, 3)]
    )
    found = titles(curves_of([read_run(run)], ["first"]))
    assert found == {"a: a/small": ["a/small"], "a": ["a/large", "a/near"]}


def test_rounding_is_no_movement(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0, looks=())
    write_rows(
        run.metrics, [{"step": n, "a/zero": n * 1e-17, "a/half": 0.5 + n * 1e-16, "a/gap": n * 1e-9} for n in (1, 2)]
    )
    found = curves_of([read_run(run)], ["first"])
    assert found.constant == {"a/zero": "0", "a/half": "0.5"}
    assert titles(found) == {"a": ["a/gap"]}


def test_several_runs_have_a_chart_for_each_key_and_a_line_for_each_run(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path, name, steps=20, end=end)) for name, end in (("one", 0.9), ("two", 0.6))]
    found = curves_of(runs, ["one", "two"])
    reward = found.charts[0]
    assert [line.label for line in reward.lines] == [
        "one: mean of 10 steps", "one: held out", "two: mean of 10 steps", "two: held out",
    ]  # fmt: skip
    assert [line.slot for line in reward.lines] == [0, 0, 1, 1]
    assert titles(found)["train/grad_norm"] == ["one", "two"]
    assert found.constant["train/lr"] == "0.001"


def test_a_run_without_a_key_has_no_line_for_it(tmp_path: Path) -> None:
    one, two = make_run(tmp_path, "one"), make_run(tmp_path, "two", steps=0)
    write_rows(two.metrics, [{"step": n, "train/reward_mean": 0.1 * n} for n in (1, 2, 3)])
    found = curves_of([read_run(one), read_run(two)], ["one", "two"])
    assert titles(found)["train/grad_norm"] == ["one"]
    assert "two: mean of 10 steps" in titles(found)["Reward"]
    assert "two: held out" in titles(found)["Reward"]  # its one look at step 0


def test_long_runs_are_thinned_to_means_and_say_so(tmp_path: Path) -> None:
    points = [(step, float(step)) for step in range(1, 2 * POINTS + 2)]
    short = thin(points, 3)
    assert len(short) == -(-len(points) // 3)
    assert short[0] == (3, 2.0)
    assert short[-1][0] == points[-1][0]
    run = make_run(tmp_path, steps=0)
    write_rows(run.metrics, rows_of(2 * POINTS + 1, level(0, 1, 1000)))
    write_rows(run.path / "evaluations.jsonl", looks_of([5], level(0, 1, 1000)))
    chart = curves_of([read_run(run)], ["first"]).charts[0]
    assert chart.stretch == 3
    assert [len(line.points) for line in chart.lines[:2]] == [len(short)] * 2


def test_no_row_gives_no_chart(tmp_path: Path) -> None:
    found = curves_of([read_run(make_run(tmp_path, steps=0, looks=()))], ["first"])
    assert (found.charts, found.constant, found.repeated) == ([], {}, {})
