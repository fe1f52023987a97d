"""Every method has as many trials, and the best on the tuning prompts is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from nftctl.errors import UsageRefused
from nftctl.learning import trials
from nftctl.learning.trials import GRIDS, GUIDANCES, ORDER


def point(reward: float, seconds: int | None, samples: int | None) -> dict[str, Any]:
    return {"reward": reward, "seconds_mark": seconds, "samples_mark": samples}


def trial(*curve: dict[str, Any], failed: str = "") -> dict[str, Any]:
    return {"curve": list(curve), "failed": failed}


def test_the_order_takes_each_place_once_and_covers_the_grid_early() -> None:
    assert len(set(ORDER)) == len(ORDER) == 12
    assert {rate for rate, _ in ORDER[:4]} == {0, 1, 2, 3}
    assert {knob for _, knob in ORDER[:3]} == {0, 1, 2}
    assert [sum(knob == k for _, knob in ORDER[:6]) for k in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("method", GRIDS)
def test_methods_have_equally_many_settings_all_different(method: str) -> None:
    for count in (1, 6, 12):
        found = trials.settings_of(method, count)
        assert len({tuple(settings.items()) for settings in found}) == count
        assert found == trials.settings_of(method, 12)[:count]
    assert found[0]["lr"] == GRIDS[method].lr[1]


def test_guidance_has_no_more_of_them() -> None:
    assert trials.guidances_of(2) == GUIDANCES[:2]
    assert sorted(trials.guidances_of(6)) == [1.0, 1.5, 2.0, 3.0, 5.0, 7.0]


@pytest.mark.parametrize("count", [0, 13])
def test_other_numbers_of_trials_are_refused(count: int) -> None:
    with pytest.raises(UsageRefused, match="between 1 and 12 trials"):
        trials.settings_of("nft", count)


def test_a_trial_is_judged_where_each_budget_ends() -> None:
    # 0.6 at the end of the seconds, 0.8 at that of the samples; what came before or between does not count.
    curve = [point(0.1, 0, 0), point(0.9, 1, None), point(0.6, 2, 1), point(0.8, None, 2)]
    assert trials.merit(trial(*curve)) == pytest.approx(0.7)
    assert trials.merit(trial(*curve, failed="nan")) == float("-inf")


def test_the_best_is_chosen_and_of_equals_the_first() -> None:
    good, same, poor = (trial(point(reward, 2, 2)) for reward in (0.5, 0.5, 0.4))
    broken = trial(point(0.9, 2, 2), failed="nan")
    assert trials.best([poor, good, same, broken]) is good


def test_guidance_is_chosen_among_those_that_were_tried() -> None:
    looks = [{"guidance": g, "reward": r} for g, r in ((1.0, 0.2), (2.0, 0.5), (3.0, 0.4), (5.0, 0.9))]
    assert trials.best_guidance(looks, 6) == 5.0
    assert trials.best_guidance(looks, 2) == 3.0


def test_a_short_sampler_has_all_of_its_times_for_the_most() -> None:
    found = [trials.settings_of("nft", 12, times)[2]["timesteps"] for times in (5, 6, 10)]
    assert found == [5, 6, 8]
    assert len({tuple(s.items()) for s in trials.settings_of("best-of-group", 12, 5)}) == 12
    assert trials.settings_of("flow-grpo", 12, 5) == trials.settings_of("flow-grpo", 12)


def test_only_a_grid_limits_the_times(profile: Any) -> None:
    assert trials.times_of(profile("rl.sample_steps=6")) == 6
    assert trials.times_of(profile('rl.timestep_source="continuous"')) == float("inf")
