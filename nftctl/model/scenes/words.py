"""The prompts of the embedded scenes and their split: pretraining, reinforcement, tuning and test.

Owns the words and which combinations nobody but the test sees. Pure Python; refuses nothing: its inputs are its own.

A prompt has one group, "three green triangles", or two, "a red circle left of two blue squares". Held out are whole
combinations, not sentences: a number of things of one colour and shape (three yellow circles), and a pair of coloured
shapes (red circle, blue square), which then stand together in no picture of pretraining or reinforcement, in either
order and in no relation.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.12),
    "green": (0.12, 0.60, 0.20),
    "blue": (0.12, 0.24, 0.86),
    "yellow": (0.97, 0.84, 0.10),
    "purple": (0.52, 0.16, 0.66),
    "black": (0.07, 0.07, 0.07),
}
"""Pigments, sRGB in [0, 1]."""
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("a", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")
WORDS = (*NUMBERS, *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), "left", "right", "of", "above", "below")
MOST_WORDS = 8

KINDS = tuple(itertools.product(range(len(COLOURS)), range(len(SHAPES))))
"""(colour, shape) as indices, all eighteen."""
TWO_GROUPS = ((1, 1), (2, 1), (1, 2))
"""Numbers of things in the first and the second group."""


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """`count` things of a colour and a shape, both as indices."""

    count: int
    colour: int
    shape: int

    @property
    def kind(self) -> int:
        """Index of colour and shape in KINDS."""
        return KINDS.index((self.colour, self.shape))

    def __str__(self) -> str:
        plural = "s" if self.count > 1 else ""
        return f"{NUMBERS[self.count - 1]} {tuple(COLOURS)[self.colour]} {SHAPES[self.shape]}{plural}"


@dataclass(frozen=True, slots=True)
class Scene:
    """What a prompt wants. `relation` is an index into RELATIONS and says where the first group stands."""

    first: Group
    second: Group | None = None
    relation: int = 0

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    def __str__(self) -> str:
        return str(self.first) if self.second is None else f"{self.first} {RELATIONS[self.relation]} {self.second}"


@dataclass(frozen=True, slots=True)
class Split:
    """Four lists of scenes. `rl` is a part of `pretraining`; otherwise no two share a scene or a held-out combination.

    The lists that a run reads are shuffled.
    """

    pretraining: tuple[Scene, ...]
    rl: tuple[Scene, ...]
    tuning: tuple[Scene, ...]
    test: tuple[Scene, ...]


RL_COUNT, TUNING_COUNT, TEST_COUNT = 320, 48, 72
TEST_CELLS, TUNING_CELLS = 4, 2
"""Of the 18 coloured shapes, for each number from two to four."""
TEST_PAIRS, TUNING_PAIRS = 18, 9
"""Of the 135 pairs of coloured shapes that differ in colour."""


def split_scenes() -> Split:
    """The one split there is: a function of nothing."""
    draw = random.Random(6)
    owners: dict[Group | tuple[int, int], str] = {}
    for count in range(2, len(NUMBERS) + 1):
        cells = [Group(count, *kind) for kind in KINDS]
        draw.shuffle(cells)
        owners |= dict.fromkeys(cells[:TEST_CELLS], "test")
        owners |= dict.fromkeys(cells[TEST_CELLS:][:TUNING_CELLS], "tuning")
    pairs = [(a, b) for a, b in itertools.combinations(range(len(KINDS)), 2) if KINDS[a][0] != KINDS[b][0]]
    draw.shuffle(pairs)
    owners |= dict.fromkeys(pairs[:TEST_PAIRS], "test")
    owners |= dict.fromkeys(pairs[TEST_PAIRS:][:TUNING_PAIRS], "tuning")
    lists: dict[str, list[Scene]] = {"pretraining": [], "tuning": [], "test": [], "nobody": []}
    for scene in all_scenes():
        lists[_owner(scene, owners)].append(scene)
    return Split(
        tuple(lists["pretraining"]),
        tuple(_some(lists["pretraining"], RL_COUNT, draw)),
        tuple(_some(lists["tuning"], TUNING_COUNT, draw)),
        tuple(_some(lists["test"], TEST_COUNT, draw)),
    )


def all_scenes() -> list[Scene]:
    """Every scene that the words can ask for: 72 of one group, 3240 of two."""
    single = [Scene(Group(count, *kind)) for count in range(1, len(NUMBERS) + 1) for kind in KINDS]
    double = [
        Scene(Group(m, *first), Group(n, *second), relation)
        for first, second in itertools.permutations(KINDS, 2)
        if first[0] != second[0]
        for m, n in TWO_GROUPS
        for relation in range(len(RELATIONS))
    ]
    return single + double


def _owner(scene: Scene, owners: dict[Group | tuple[int, int], str]) -> str:
    """Who may see the scene; "nobody" for two groups of which one alone is held out, which would be two questions."""
    cells = {owners.get(group, "pretraining") for group in scene.groups}
    if scene.second is None:
        return cells.pop()
    low, high = sorted((scene.first.kind, scene.second.kind))
    return owners.get((low, high), "pretraining") if cells == {"pretraining"} else "nobody"


def _some(scenes: list[Scene], count: int, draw: random.Random) -> list[Scene]:
    """`count` of the scenes, shuffled: every single group that there is, and some of the others."""
    single = [scene for scene in scenes if scene.second is None]
    double = [scene for scene in scenes if scene.second is not None]
    taken = single + draw.sample(double, count - len(single))
    draw.shuffle(taken)
    return taken
