"""Rewards from packaged scorers in this process: what a run's services answer, without the services.

Owns which of their numbers is the judge's, who is reported and never trained on. Refuses what `fitness` refuses, a
packaged scorer of another revision than the pinned one, and scores that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.errors import RewardFailed
from nftctl.learning.fitness import refuse_providers
from nftctl.profile.prompts import Prompt
from nftctl.profile.schema import Profile, Provider
from nftctl.reward.scorers import Scorer, load_scorer, scorer_revision
from nftctl.roles.reward import weigh

Images = Sequence[npt.NDArray[np.uint8]]
JUDGE = "judge"
"""How a provider or a component is called that has a second opinion."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What is said of one image: the reward, and raw scores and components under `provider` and `provider/part`."""

    reward: float
    parts: dict[str, float]


class Scoring:
    """The reward's providers, and those of the evaluation where the profile names others."""

    def __init__(self, profile: Profile) -> None:
        refuse_providers(profile)
        self._reward = [(provider, _load(provider)) for provider in profile.reward.providers]
        self._beside = [(provider, _load(provider)) for provider in profile.eval.providers]
        self.judge = _judge([*self._reward, *self._beside])
        """Name of the judge's number among the parts; empty where nobody has a second opinion."""

    def rewards(self, images: Images, prompts: Sequence[Prompt]) -> list[float]:
        """What is trained on: one number for each image."""
        return [scored.reward for scored in _ask(self._reward, images, prompts)]

    def everything(self, images: Images, prompts: Sequence[Prompt]) -> list[Scored]:
        """The same, and everything that anybody says besides."""
        found = _ask(self._reward, images, prompts)
        beside = _ask(self._beside, images, prompts)
        return [Scored(s.reward, {**other.parts, **s.parts}) for s, other in zip(found, beside, strict=True)]


def _load(provider: Provider) -> Scorer:
    served = scorer_revision(provider.scorer)
    if provider.revision and provider.revision != served:
        raise RewardFailed(
            f"reward provider {provider.name}: revision {provider.revision} is pinned, {served} is packaged"
        )
    return load_scorer(provider.scorer)


def _judge(asked: Sequence[tuple[Provider, Scorer]]) -> str:
    names = [name for p, s in asked for name in (p.name, *(f"{p.name}/{part}" for part in s.components))]
    return next((name for name in names if name.rpartition("/")[2] == JUDGE), "")


def _ask(asked: Sequence[tuple[Provider, Scorer]], images: Images, prompts: Sequence[Prompt]) -> list[Scored]:
    found = [Scored(0.0, {}) for _ in images]
    texts, metadata = [p.reward_text for p in prompts], [p.metadata for p in prompts]
    for provider, scorer in asked:
        answers = scorer.score(list(images), texts, metadata)
        for i, (score, components) in enumerate(answers):
            found[i] = _added(found[i], provider, score, components)
    return found


def _added(so_far: Scored, provider: Provider, score: float, components: dict[str, Any]) -> Scored:
    if not math.isfinite(score):
        raise RewardFailed(f"scorer {provider.scorer} answered {score}, which is no score")
    parts = {provider.name: score} | {f"{provider.name}/{k}": float(v) for k, v in components.items()}
    return Scored(so_far.reward + weigh(provider, score), so_far.parts | parts)
