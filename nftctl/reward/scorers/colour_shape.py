"""Scorer by rules: does the image show the counted, coloured shapes of its prompt, and where it wants them?

In the manner of GenEval (Ghosh et al. 2023), on the image alone: no detector, no weights, NumPy only. Owns the
judgement; the prompt's grammar and the finding of objects are in `scene/`. Made for flat, drawn scenes on a plain
background; things of one colour that touch are one thing to it. Refuses a prompt outside the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.reward.scorers import files_revision
from nftctl.reward.scorers.scene.grammar import Group, Relation, Wanted, parse_prompt
from nftctl.reward.scorers.scene.objects import Object, find_objects

SCENE = Path(__file__).with_name("scene")
FILES: tuple[Path, ...] = (Path(__file__), *(SCENE / f"{name}.py" for name in ("grammar", "names", "objects")))
"""Everything that determines a score."""

STRICT = 0.8
"""Score from which on an image counts as right."""

_AXES: dict[Relation, tuple[str, int]] = {"left": ("x", 1), "right": ("x", -1), "above": ("y", 1), "below": ("y", -1)}


class ColourShape:
    """score = `count` * `place`, in [0, 1]: about 1 for an image that is right, about 0 for one of another prompt.

    Components: `found`, mean over the groups of the likeliest object's probability; `count`, product over the groups of
    how well their number fits; `place`, how clearly the relation holds (1 when none is asked for); `strict`, 0 or 1.
    """

    name = "colour_shape"
    components = ("found", "count", "place", "strict")

    def revision(self) -> str:
        """sha256 over the sources of this scorer."""
        return files_revision(FILES)

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, components) per uint8 [H, W, 3] image; ValueError quotes the first prompt outside the grammar."""
        wanted = [parse_prompt(prompt) for prompt in prompts]
        return [judge(find_objects(image), want) for image, want in zip(images, wanted, strict=True)]


def load() -> ColourShape:
    """The packaged scorer."""
    return ColourShape()


def judge(objects: Sequence[Object], wanted: Wanted) -> tuple[float, dict[str, float]]:
    """(score, components) of what is there against what is wanted."""
    odds = [[thing.odds(group.colour, group.shape) for thing in objects] for group in wanted.groups]
    found = float(np.mean([max(row, default=0.0) for row in odds]))
    count = float(np.prod([number_fit(sum(row), group) for row, group in zip(odds, wanted.groups, strict=True)]))
    place = place_fit(objects, odds, wanted.relation) if wanted.relation else 1.0
    score = count * place
    return score, {"found": found, "count": count, "place": place, "strict": float(score >= STRICT)}


def number_fit(there: float, group: Group) -> float:
    """1 when `there` things are as many as wanted; otherwise the square of the smaller number over the larger."""
    return (min(there, group.count) / max(there, group.count)) ** 2


def place_fit(objects: Sequence[Object], odds: Sequence[Sequence[float]], relation: Relation) -> float:
    """0 when the first group's middle is level with the second's or beyond it, 1 from half a size apart on."""
    if not all(sum(row) > 0 for row in odds):
        return 0.0
    axis, sign = _AXES[relation]
    first, second = (np.average([getattr(thing, axis) for thing in objects], weights=row) for row in odds)
    size = np.mean([np.average([thing.size for thing in objects], weights=row) for row in odds])
    return float(np.clip(sign * (second - first) / (size / 2), 0, 1))
