"""What is said of runs whose truth is known, because their rewards were made with it."""

from __future__ import annotations

import math
import statistics
from typing import Any, get_args

import pytest

from nftctl.profile.schema import AlarmCode
from nftctl.report.verdict import CHEATING, Verdict, judge

from .folders import IMAGES, alarm, level, looks_of, rows_of

ERROR = math.sqrt(2) * 0.3 / math.sqrt(IMAGES)
"""Of the difference of two held-out means, at the spread of 0.3 that the rows report: 0.0354."""


def verdict_of(before: float, after: float, *, steps: int = 40, **more: Any) -> Verdict:
    rising = level(before, after, steps)
    return judge(rows_of(steps, rising), looks_of([0, steps], rising, **more))


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        (3.1 * ERROR, "learned", "It learned"),
        (2.5 * ERROR, "leaning", "It probably learned"),
        (1.5 * ERROR, "unclear", "Not shown to have learned"),
        (0.0, "unclear", "Not shown to have learned"),
        (-1.5 * ERROR, "unclear", "Not shown to have learned"),
        (-2.5 * ERROR, "fell", "It got worse"),
    ],
)
def test_a_change_counts_in_units_of_its_noise(change: float, kind: str, word: str) -> None:
    found = verdict_of(0.5, 0.5 + change)
    assert found.kind == kind
    assert found.headline.startswith(word)
    assert f"from 0.500 to {0.5 + change:.3f} between step 0 and step 40" in found.headline
    assert found.held_out is not None
    assert found.held_out.noise == pytest.approx(ERROR)
    assert found.held_out.ratio == pytest.approx(change / ERROR)
    assert f"±{ERROR:.3f}" in found.reasons[0]


def test_more_images_make_the_same_change_plain() -> None:
    rising = level(0.5, 0.5 + 1.5 * ERROR, 40)
    looks = [look | {"eval/samples": 16 * IMAGES} for look in looks_of([0, 40], rising)]
    assert judge(rows_of(40, rising), looks).kind == "learned"


def test_the_spread_of_each_end_counts_for_its_own_look() -> None:
    rows = [row | {"reward/std": 0.4 if row["step"] <= 10 else 0.2} for row in rows_of(40, level(0.5, 0.9, 40))]
    found = judge(rows, looks_of([0, 40], level(0.5, 0.9, 40))).held_out
    assert found is not None
    assert found.noise == pytest.approx(math.hypot(0.4 / 12, 0.2 / 12))


def test_the_spread_that_a_look_reports_comes_before_that_of_the_steps() -> None:
    looks = looks_of([0, 40], level(0.5, 0.9, 40), std=level(0.6, 0.12, 40))
    found = judge(rows_of(40, level(0.5, 0.9, 40)), looks).held_out
    assert found is not None
    assert found.noise == pytest.approx(math.hypot(0.6 / 12, 0.12 / 12))


def test_without_spreads_the_scatter_of_the_steps_is_the_noise() -> None:
    rows = [{k: v for k, v in row.items() if k != "reward/std"} for row in rows_of(40, level(0.5, 0.5, 40))]
    found = judge(rows, looks_of([0, 40], level(0.5, 0.9, 40))).held_out
    assert found is not None
    ends = [statistics.stdev(row["train/reward_mean"] for row in part) for part in (rows[:10], rows[-10:])]
    assert found.noise == pytest.approx(math.hypot(*ends))


def test_no_step_is_said() -> None:
    found = judge([], looks_of([0], level(0.5, 0.5, 1)))
    assert (found.kind, found.held_out) == ("no-steps", None)
    assert "No step has been taken" in found.headline


@pytest.mark.parametrize("steps", [1, 9])
def test_a_few_steps_are_too_short_however_large_the_change(steps: int) -> None:
    found = verdict_of(0.1, 0.9, steps=steps)
    assert found.kind == "too-short"
    assert f"{steps} step" in found.headline
    assert "0.100 to 0.900" in found.headline


def test_ten_steps_are_judged() -> None:
    assert verdict_of(0.1, 0.9, steps=10).kind == "learned"


@pytest.mark.parametrize("looks", [[], [0], [40]])
def test_without_two_looks_a_training_reward_is_no_proof(looks: list[int]) -> None:
    rising = level(0.5, 0.9, 40)
    found = judge(rows_of(40, rising), looks_of(looks, rising))
    assert found.kind == "training-only"
    assert "It rose in training" in found.headline
    assert any("Nothing held out can confirm it" in reason for reason in found.reasons)
    flat = judge(rows_of(40, level(0.5, 0.5, 40), noise=0.1), looks_of(looks, rising))
    assert flat.kind == "unclear"
    assert judge(rows_of(40, level(0.9, 0.5, 40)), []).kind == "fell"


def test_a_gain_that_does_not_show_on_held_out_prompts_is_said() -> None:
    found = judge(rows_of(40, level(0.5, 0.9, 40)), looks_of([0, 40], level(0.5, 0.51, 40)))
    assert found.kind == "unclear"
    assert any("does not show on held-out prompts" in reason for reason in found.reasons)


def test_a_judge_that_falls_while_the_reward_rises_is_a_doubt() -> None:
    judges = {"digits/judge": level(0.6, 0.2, 40)}
    rows = [row | {"reward/digits/judge": 0.4 + 0.01 * (row["step"] % 2)} for row in rows_of(40, level(0.5, 0.9, 40))]
    found = judge(rows, looks_of([0, 40], level(0.5, 0.9, 40), **judges))
    assert found.kind == "suspect"
    assert any("eval/digits/judge" in reason and "0.600 to 0.200" in reason for reason in found.reasons)
    steady = looks_of([0, 40], level(0.5, 0.9, 40), **{"digits/judge": level(0.6, 0.595, 40)})
    assert judge(rows, steady).kind == "learned"


@pytest.mark.parametrize("code", sorted(CHEATING))
def test_alarms_against_the_reward_are_a_doubt_however_old(code: str) -> None:
    rising = level(0.5, 0.9, 40)
    found = judge(rows_of(40, rising), looks_of([0, 40], rising), [alarm(3, code)])
    assert found.kind == "suspect"
    assert "But there are signs" in found.headline
    assert any(f"{code} at step 3" in reason for reason in found.reasons)
    assert judge(rows_of(40, rising), [], [alarm(3, code)]).kind == "suspect"


def test_other_alarms_are_named_and_change_nothing() -> None:
    rising = level(0.5, 0.9, 40)
    alarms = [alarm(step, "clamp") for step in (3, 9, 15, 21)] + [alarm(30, "zero-spread")]
    found = judge(rows_of(40, rising), looks_of([0, 40], rising), alarms)
    assert found.kind == "learned"
    assert "Alarms were raised: clamp at steps 3, 9, 15, …, zero-spread at step 30." in found.reasons


def test_a_doubt_does_not_turn_a_fall_into_something_milder() -> None:
    falling = level(0.9, 0.5, 40)
    assert judge(rows_of(40, falling), looks_of([0, 40], falling), [alarm(3, "images-noisy")]).kind == "fell"


def test_the_alarms_that_count_exist() -> None:
    assert set(get_args(AlarmCode)) >= CHEATING


def test_rewards_without_any_spread_are_no_success() -> None:
    rows = [row | {"reward/std": 0.0} for row in rows_of(40, level(0.5, 0.5, 40), noise=0)]
    found = judge(rows, looks_of([0, 40], level(0.5, 0.5, 40)))
    assert found.kind == "unclear"
    assert "no spread at all" in found.reasons[0]
    assert "nothing says how much noise would do" in found.headline


def test_rows_that_lack_their_figures_are_no_reason_to_fail() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "train/reward_mean": None, "x": "text"} for step in range(1, 20)]
    assert judge(rows, [{"step": 0, "eval/reward": None}]).kind == "unclear"


def test_the_document_has_the_figures() -> None:
    document = verdict_of(0.5, 0.9).document()
    assert list(document) == ["kind", "headline", "reasons", "held_out", "training"]
    assert document["held_out"]["difference"] == pytest.approx(0.4)
    assert document["held_out"]["ratio"] == pytest.approx(0.4 / ERROR)
    assert judge([], []).document()["held_out"] is None
