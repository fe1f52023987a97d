"""ocr: what is wanted, how far off what was read is, and, where the extra is installed, reading itself."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from nftctl.errors import RewardFailed
from nftctl.reward.scorers import load_scorer, scorer_revision
from nftctl.reward.scorers.ocr import Ocr, edit_distance, likeness, quoted_text, reading_order

INSTALLED = importlib.util.find_spec("rapidocr_onnxruntime") is not None


def piece(text, x, y, width=50, height=20, confidence=1.0):
    return [[x, y], [x + width, y], [x + width, y + height], [x, y + height]], text, confidence


def written(text, size=56):
    image = Image.new("RGB", (512, 160), "white")
    ImageDraw.Draw(image).text((30, 40), text, fill=(200, 0, 0), font=ImageFont.load_default(size=size))
    return np.asarray(image)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign that says "STOP"', "STOP"),
        ('"Hello" and then "World!"', "Hello World!"),
        ("a cup with “Café”", "Café"),
        ("ein Schild mit „Halt“", "Halt"),
        ("une porte « Sortie »", "Sortie"),
        ("a board with 'OPEN' on it", "OPEN"),
        ("the cat's toy says 'don't'", "don't"),
        ("""a dog's tag "Rex" """, "Rex"),
    ],
)
def test_the_quoted_text_is_what_is_wanted(prompt, text):
    assert quoted_text(prompt) == text


@pytest.mark.parametrize(
    "prompt", ["a sign", "the cat's and the dog's toys", 'an empty ""', 'blank "  "', 'half a "quote']
)
def test_a_prompt_without_quoted_text_is_refused(prompt):
    with pytest.raises(ValueError, match="quotation marks, got") as caught:
        Ocr(lambda image: []).score([np.zeros((4, 4, 3), np.uint8)], [prompt], [{}])
    assert repr(prompt) in str(caught.value)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_known_edit_distances(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


@given(*[st.text("abc", max_size=6)] * 3)
def test_the_distance_is_one(a, b, c):
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


@pytest.mark.parametrize(
    ("wanted", "read", "value"),
    [("STOP", "stop", 1), ("Hello World", "HELLOWORLD", 1), ("STOP", "", 0), ("STOP", "SHOP", 0.75),
     ("STOP", "xxxx", 0), ("STOP", "STOPSTOP", 0.5)],
)  # fmt: skip
def test_likeness(wanted, read, value):
    assert likeness(wanted, read) == pytest.approx(value)


def test_pieces_are_read_line_by_line():
    pieces = [piece("c", 10, 60), piece("b", 200, 12), piece("d", 90, 66), piece("a", 10, 8)]
    assert [text for _, text, _ in reading_order(pieces)] == ["a", "b", "c", "d"]
    assert reading_order([]) == []


def test_scores_and_components():
    found = {0: [piece("WORLD", 80, 0, confidence=0.6), piece("HELLO", 10, 2)], 1: [], 2: [piece("JELLO WORLD", 0, 0)]}
    images = [np.full((4, 4, 3), n, np.uint8) for n in found]
    got = Ocr(lambda image: found[int(image[0, 0, 0])]).score(images, ['"hello world"'] * 3, [{}] * 3)
    assert got[0] == (1.0, {"exact": 1.0, "confidence": 0.8})
    assert got[1] == (0.0, {"exact": 0.0, "confidence": 0.0})
    assert got[2] == (pytest.approx(0.9), {"exact": 0.0, "confidence": 1.0})


@pytest.mark.skipif(INSTALLED, reason="nftctl[ocr] is installed")
def test_without_the_extra_it_is_said():
    for ask in (load_scorer, scorer_revision):
        with pytest.raises(RewardFailed, match="needs the package rapidocr-onnxruntime") as caught:
            ask("ocr")
        assert caught.value.hint == "pip install 'nftctl[ocr]'"


@pytest.mark.skipif(not INSTALLED, reason="needs nftctl[ocr]")
def test_with_the_extra_it_reads():
    scorer = load_scorer("ocr")
    assert scorer.revision() == scorer_revision("ocr")
    images = [written("HELLO WORLD"), written("HELLO WORLD"), written("")]
    right, wrong, blank = scorer.score(images, ['a sign "Hello World"', 'a sign "Open"', 'a sign "Open"'], [{}] * 3)
    assert right[0] == right[1]["exact"] == 1
    assert right[1]["confidence"] > 0.9
    assert wrong[0] < 0.4
    assert blank[0] == 0
