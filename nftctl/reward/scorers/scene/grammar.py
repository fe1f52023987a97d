"""Prompts about coloured shapes as values, by a small grammar; everything else is refused.

prompt   = [opening] group { ("and" | ",") group }        "two red circles and a blue square"
         | [opening] group relation group                  "a photo of a triangle left of a green square"
opening  = ("a" | "an") ("photo" | "picture" | "image" | "drawing") "of"
group    = [number] [colour] shape
number   = "a" | "an" | "one" ... "nine" | "1" ... "9"     (one when left out)
colour   = red orange yellow green cyan blue purple pink brown black white grey (gray)
shape    = circle square triangle, or their plurals
relation = ["to the"] ("left" | "right") "of" | "above" | "below"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nftctl.reward.scorers.scene.names import COLOURS, SHAPES

Relation = Literal["left", "right", "above", "below"]

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_NUMBER = {"a": 1, "an": 1} | {word: n for n, word in enumerate(NUMBERS, 1)} | {str(n): n for n in range(1, 10)}
_COLOUR = {name: name for name in COLOURS} | {"gray": "grey"}
_SHAPE = {name + end: name for name in SHAPES for end in ("", "s")}
_OPENING = re.compile(r"an? (photo|picture|image|drawing) of ")
_RELATION = re.compile(r" (?:to the )?(?:(left|right) of|(above|below)) ")
_AND = re.compile(r" and |, (?:and )?")


@dataclass(frozen=True, slots=True)
class Group:
    """Things that a prompt wants: how many of which shape, and of which colour ("" for any)."""

    count: int
    colour: str
    shape: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt: its groups, and where the first of two stands as seen from the second (None: anywhere)."""

    groups: tuple[Group, ...]
    relation: Relation | None = None


def parse_prompt(prompt: str) -> Wanted:
    """What `prompt` wants. ValueError quotes a prompt outside the grammar."""
    text = " ".join(prompt.lower().replace(",", ", ").strip(" .").split())
    text = _OPENING.sub("", text, count=1) if _OPENING.match(text) else text
    related = _RELATION.split(text)
    if len(related) == 4:
        first, side, height, second = related
        relation: Relation = side or height  # type: ignore[assignment]
        return Wanted((_group(first, prompt), _group(second, prompt)), relation)
    return Wanted(tuple(_group(part, prompt) for part in _AND.split(text)))


def _group(text: str, prompt: str) -> Group:
    words = text.split()
    count = _NUMBER[words.pop(0)] if words and words[0] in _NUMBER else 1
    colour = _COLOUR[words.pop(0)] if words and words[0] in _COLOUR else ""
    if len(words) != 1 or words[0] not in _SHAPE:
        raise ValueError(
            f"colour_shape cannot judge {text!r} of the prompt {prompt!r}: expected [number] [colour] shape"
        )
    return Group(count, colour, _SHAPE[words[0]])
