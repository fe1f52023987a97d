"""Rewards in this process: the scorer's own numbers, weighed as a run weighs them, and a judge who is only reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nftctl.errors import ProfileRefused, RewardFailed
from nftctl.learning.scoring import Scoring
from nftctl.profile.prompts import Prompt
from nftctl.profile.schema import Profile, Provider
from nftctl.reward.scorers import load_scorer

PROMPTS = [Prompt("a red seven", "a red seven"), Prompt("model words", "a blue two")]
IMAGES = [np.random.default_rng(i).integers(0, 255, (8, 8, 3)).astype(np.uint8) for i in range(2)]


def with_providers(profile: Profile, *providers: Provider, evaluation: tuple[Provider, ...] = ()) -> Profile:
    reward = profile.reward.model_copy(update={"providers": list(providers)})
    held_out = profile.eval.model_copy(update={"providers": list(evaluation)})
    return profile.model_copy(update={"reward": reward, "eval": held_out})


DIGITS = Provider(name="digits", kind="embedded", scorer="tiny_digits", weight=2.0, scale=3.0, clip=[0.0, 0.5])
LIGHT = Provider(name="light", kind="embedded", scorer="brightness", weight=0.25)


def test_rewards_are_weight_times_clipped_scaled_scores(profile: Any) -> None:
    scoring = Scoring(with_providers(profile(), DIGITS, LIGHT))
    digits = load_scorer("tiny_digits").score(IMAGES, ["a red seven", "a blue two"], [{}, {}])
    light = load_scorer("brightness").score(IMAGES, ["", ""], [{}, {}])
    expected = [2 * min(3 * d, 0.5) + 0.25 * b for (d, _), (b, _) in zip(digits, light, strict=True)]
    assert scoring.rewards(IMAGES, PROMPTS) == pytest.approx(expected, rel=1e-12)
    told = scoring.everything(IMAGES, PROMPTS)
    assert [s.reward for s in told] == pytest.approx(expected, rel=1e-12)
    assert told[1].parts["digits"] == digits[1][0]
    assert told[1].parts["digits/judge"] == digits[1][1]["judge"]
    assert told[1].parts["light"] == light[1][0]


def test_the_judge_is_a_component_or_a_provider_of_that_name(profile: Any) -> None:
    assert Scoring(profile()).judge == "digits/judge"
    assert Scoring(with_providers(profile(), LIGHT)).judge == ""
    other = Provider(name="judge", kind="embedded", scorer="brightness")
    beside = Scoring(with_providers(profile(), LIGHT, evaluation=(other,)))
    assert beside.judge == "judge"
    (told, _) = beside.everything(IMAGES, PROMPTS)
    # The evaluation's own provider is reported and is in no reward.
    assert told.reward == 0.25 * told.parts["light"]
    assert told.parts["judge"] == told.parts["light"]


def test_services_and_other_sums_are_refused(profile: Any) -> None:
    service = Provider(name="far", url="http://127.0.0.1:1", revision="r")
    with pytest.raises(ProfileRefused) as refused:
        Scoring(with_providers(profile('reward.aggregation="gdpo"'), LIGHT, service, evaluation=(service,)))
    assert [f.key for f in refused.value.findings] == [
        "reward.providers.1.kind", "eval.providers.0.kind", "reward.aggregation",
    ]  # fmt: skip


def test_another_revision_than_the_pinned_one_is_refused(profile: Any) -> None:
    pinned = Provider(name="light", kind="embedded", scorer="brightness", revision="r1")
    with pytest.raises(RewardFailed, match="revision r1 is pinned"):
        Scoring(with_providers(profile(), pinned))
