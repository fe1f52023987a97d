"""Scorer of written text: does the image show, letter by letter, what its prompt has in quotation marks?

Owns which text is wanted, how the read pieces are put in order, and the distance between the two. Reading is done by
`rapidocr-onnxruntime` (the extra `nftctl[ocr]`), its models inside its wheel. Refuses a prompt that quotes nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.errors import RewardFailed
from nftctl.reward.scorers import files_revision

READER = "rapidocr-onnxruntime"
PACKAGE = READER.replace("-", "_")
QUOTES = re.compile(r"\"([^\"]+)\"|“([^”]+)”|„([^“”]+)[“”]|«([^»]+)»|(?<!\w)'([^']+(?:'\w[^']*)*)'(?!\w)")

Piece = tuple[Sequence[Sequence[float]], str, float]
"""What a reader finds: four corners (x, y) clockwise from the top left, the text, its confidence in [0, 1]."""


class Ocr:
    """score = 1 - edit distance / length of the longer text, in [0, 1]; letter case and spaces do not count.

    Components: `exact`, 1 when nothing differs, else 0; `confidence`, the reader's mean over its pieces, 0 without any.
    """

    name = "ocr"
    components = ("exact", "confidence")

    def __init__(self, read: Callable[[npt.NDArray[np.uint8]], list[Piece]]) -> None:
        self._read = read

    def revision(self) -> str:
        """sha256 over this file, the reader's version and its models."""
        return revision()

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, components) per uint8 [H, W, 3] image; ValueError quotes a prompt without quoted text."""
        wanted = [quoted_text(prompt) for prompt in prompts]
        return [_entry(text, self._read(image)) for image, text in zip(images, wanted, strict=True)]


def load() -> Ocr:
    """The packaged scorer with its models loaded. Raises RewardFailed when the extra is not installed."""
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise _missing(str(error)) from None
    engine = RapidOCR()

    def read(image: npt.NDArray[np.uint8]) -> list[Piece]:
        # The engine was made for OpenCV's order of channels: blue, green, red.
        found, _ = engine(np.ascontiguousarray(image[..., ::-1]))
        return [(corners, text, float(confidence)) for corners, text, confidence in found or []]

    return Ocr(read)


def revision() -> str:
    """sha256 (hex) over this file, the reader's version and its models. Raises RewardFailed without the extra."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _missing("it is not installed")
    models = sorted(Path(spec.submodule_search_locations[0]).rglob("*.onnx"))
    files = files_revision([Path(__file__), *models])
    return hashlib.sha256(f"{files} {READER} {importlib.metadata.version(READER)}".encode()).hexdigest()


def quoted_text(prompt: str) -> str:
    """What `prompt` wants to be written: its quoted parts, joined by spaces. ValueError when there are none.

    Example: 'a sign that says "STOP" and "now"' -> "STOP now". An apostrophe inside a word opens nothing.
    """
    parts = [text.strip() for match in QUOTES.findall(prompt) for text in match if text.strip()]
    if not parts:
        raise ValueError(f"ocr needs a prompt with the wanted text in quotation marks, got {prompt!r}")
    return " ".join(parts)


def reading_order(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces line by line, each line from left to right; a piece opens a line when it begins below the last one."""
    ordered: list[Piece] = []
    line: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: _middle(p, 1)):
        if line and _middle(piece, 1) > max(corner[1] for corner in line[0][0]):
            ordered += sorted(line, key=lambda p: _middle(p, 0))
            line = []
        line.append(piece)
    return ordered + sorted(line, key=lambda p: _middle(p, 0))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for n, letter in enumerate(a, 1):
        diagonal, row[0] = row[0], n
        for m, other in enumerate(b, 1):
            diagonal, row[m] = row[m], min(row[m] + 1, row[m - 1] + 1, diagonal + (letter != other))
    return row[-1]


def likeness(wanted: str, read: str) -> float:
    """1 - edit distance / length of the longer text, both without case and spaces; 1 is equal, 0 nothing in common."""
    a, b = ("".join(text.casefold().split()) for text in (wanted, read))
    longest = max(len(a), len(b))
    return 1 - edit_distance(a, b) / longest if longest else 1.0


def _entry(wanted: str, pieces: list[Piece]) -> tuple[float, dict[str, float]]:
    score = likeness(wanted, " ".join(text for _, text, _ in reading_order(pieces)))
    confidence = sum(piece[2] for piece in pieces) / len(pieces) if pieces else 0.0
    return score, {"exact": float(score == 1.0), "confidence": confidence}


def _missing(why: str) -> RewardFailed:
    return RewardFailed(f"scorer ocr needs the package {READER}: {why}", hint="pip install 'nftctl[ocr]'")


def _middle(piece: Piece, axis: int) -> float:
    return sum(corner[axis] for corner in piece[0]) / len(piece[0])
