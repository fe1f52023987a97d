"""What one service serves: one scorer, or several whose scores are weighed and added.

Owns how a `--scorer` is written (`NAME[:MODEL][=WEIGHT]` or `FILE.py:FUNCTION[=WEIGHT]`), how the parts of a sum are
named, and the revision of the whole. Every number of every scorer is checked here: one that is not finite, a wrong
count or other components than declared end in ScorerWrong, never in a sum.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.errors import RewardFailed
from nftctl.reward.protocol import finite
from nftctl.reward.scorers import Scorer, load_scorer
from nftctl.reward.user_scorer import is_user_scorer, load_user_scorer

Images = list[npt.NDArray[np.uint8]]
Results = list[tuple[float, dict[str, float]]]


class ScorerWrong(ValueError):
    """A scorer answered something that cannot be a score."""


@dataclass(frozen=True, slots=True)
class Part:
    """A scorer and what its score is multiplied by; 0: reported, not added."""

    scorer: Scorer
    weight: float = 1.0


class Mixture:
    """The scorer that a service serves.

    One scorer of weight 1 is served as it is. Otherwise score = sum of weight * score, and the components are each
    scorer's own score under its name, with its parts behind it ("ocr", "ocr.exact", ...).
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Raises RewardFailed for no scorer at all, or for two of one name."""
        self.parts = tuple(parts)
        names = [part.scorer.name for part in self.parts]
        if not names:
            raise RewardFailed("there is no scorer to serve")
        for name in names:
            if names.count(name) > 1:
                raise RewardFailed(f"scorer {name} is there twice; their scores could not be told apart")
        self._alone = len(self.parts) == 1 and self.parts[0].weight == 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the scorers, in order."""
        return tuple(part.scorer.name for part in self.parts)

    @property
    def name(self) -> str:
        """Of the service: "ocr", "ocr + 0.5 aesthetic"."""
        return " + ".join(f"{'' if p.weight == 1.0 else f'{p.weight:g} '}{p.scorer.name}" for p in self.parts)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the parts of every answer."""
        if self._alone:
            return tuple(self.parts[0].scorer.components)
        return tuple(name for part in self.parts for name in _names(part.scorer))

    def revision(self) -> str:
        """The only scorer's own, or sha256 (hex) over names, weights and revisions."""
        if self._alone:
            return self.parts[0].scorer.revision()
        lines = [f"{p.scorer.name} {p.weight!r} {p.scorer.revision()}\n" for p in self.parts]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def score(self, images: Images, prompts: list[str], metadata: list[dict[str, Any]]) -> Results:
        """One (score, components) per image. Raises ScorerWrong, or what a scorer raised."""
        each = [self.score_one(part.scorer, images, prompts, metadata) for part in self.parts]
        if self._alone:
            return each[0]
        return [self._sum([results[n] for results in each]) for n in range(len(images))]

    def table(
        self, names: Sequence[str], images: Images, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, dict[str, list[float]]]:
        """For each scorer of `names`, its columns: its score and its components, a number per image, unweighted.

        A component stands under its own name as well as behind the scorer's.
        """
        tables = {}
        for part in self.parts:
            if part.scorer.name in names:
                results = self.score_one(part.scorer, images, prompts, metadata)
                columns = {
                    component: [parts[component] for _, parts in results] for component in part.scorer.components
                }
                tables[part.scorer.name] = columns | {part.scorer.name: [score for score, _ in results]}
        return tables

    def score_one(self, scorer: Scorer, images: Images, prompts: list[str], metadata: list[dict[str, Any]]) -> Results:
        """What `scorer` answers, checked."""
        given = scorer.score(images, prompts, metadata)
        try:
            results = [_checked(scorer, n, entry) for n, entry in enumerate(given)]
        except (TypeError, ValueError) as error:
            raise ScorerWrong(f"{scorer.name} did not answer pairs of score and components: {error}") from None
        except RewardFailed as error:
            raise ScorerWrong(error.message) from None
        if len(results) != len(images):
            raise ScorerWrong(f"{len(results)} results for {len(images)} images")
        return results

    def _sum(self, results: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
        values = [value for value, _ in results]
        total = sum(part.weight * value for part, value in zip(self.parts, values, strict=True))
        flat = [number for value, parts in results for number in (value, *parts.values())]
        return total, dict(zip(self.components, flat, strict=True))


def load_mixture(specs: Sequence[str]) -> Mixture:
    """The mixture of scorers written as on the command line, weights loaded. Raises RewardFailed."""
    return Mixture([load_part(spec) for spec in specs])


def load_part(spec: str) -> Part:
    """One scorer with its weight. Raises RewardFailed."""
    where, weight = split_weight(spec)
    if is_user_scorer(where):
        return Part(load_user_scorer(where), weight)
    name, _, model = where.partition(":")
    return Part(load_scorer(name, model), weight)


def split_weight(spec: str) -> tuple[str, float]:
    """("ocr", 0.5) of "ocr=0.5"; the weight is 1 when none is given. Raises RewardFailed for one that is no number."""
    where, sign, text = spec.rpartition("=")
    if not sign:
        return spec, 1.0
    weight = math.nan
    with contextlib.suppress(ValueError):
        weight = float(text)
    if not math.isfinite(weight):
        raise RewardFailed(f"the weight of the scorer {spec!r} is {text!r}, not a number", hint="--scorer NAME=0.5")
    return where, weight


def _names(scorer: Scorer) -> list[str]:
    return [scorer.name, *(f"{scorer.name}.{component}" for component in scorer.components)]


def _checked(scorer: Scorer, n: int, entry: tuple[float, dict[str, float]]) -> tuple[float, dict[str, float]]:
    score, parts = entry
    value = finite(score, f"the score of image {n} by {scorer.name}")
    if set(parts) != set(scorer.components):
        raise ScorerWrong(f"components {sorted(parts)}, declared {sorted(scorer.components)}")
    # In the declared order: the sum names its parts by position.
    return value, {name: finite(parts[name], f"component {name!r} of image {n}") for name in scorer.components}
