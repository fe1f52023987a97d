"""colour_shape on scenes that are drawn here: right prompts score about 1, other scenes' prompts about 0."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from nftctl.reward.scorers import load_scorer
from nftctl.reward.scorers.scene.grammar import Group, Wanted, parse_prompt
from nftctl.reward.scorers.scene.names import COLOURS, SHAPES, colour_odds, lab, shape_odds
from nftctl.reward.scorers.scene.objects import find_objects, join

SCORER = load_scorer("colour_shape")
SCALE = 4


def draw(things, size=128, background="white", noise=4.0):
    """(colour, shape, x, y, radius, turn in degrees), places as shares of the side; anti-aliased, with sensor noise."""
    image = Image.new("RGB", (size * SCALE,) * 2, COLOURS[background])
    pen = ImageDraw.Draw(image)
    for colour, shape, *place, turn in things:
        x, y, r = (v * size * SCALE for v in place)
        if shape == "circle":
            pen.ellipse([x - r, y - r, x + r, y + r], fill=COLOURS[colour])
        else:
            corners = {"square": 4, "triangle": 3}[shape]
            angles = np.deg2rad(turn - 90 + (corners == 4) * 45) + np.arange(corners) * 2 * np.pi / corners
            pen.polygon([(x + r * np.cos(a), y + r * np.sin(a)) for a in angles], fill=COLOURS[colour])
    pixels = np.asarray(image.resize((size, size), Image.Resampling.LANCZOS), np.float64)
    return (pixels + np.random.default_rng(0).normal(0, noise, pixels.shape)).clip(0, 255).astype(np.uint8)


def score(things, prompt, **options):
    return SCORER.score([draw(things, **options)], [prompt], [{}])[0]


# ---- calibration


@pytest.mark.parametrize("shape", SHAPES)
def test_every_colour_and_turn_is_recognised(shape):
    for colour, (radius, turn) in itertools.product(sorted(set(COLOURS) - {"white"}), [(0.1, 0), (0.2, 25), (0.3, 70)]):
        value, parts = score([(colour, shape, 0.5, 0.45, radius, turn)], f"a {colour} {shape}")
        assert value > 0.8, (colour, shape, radius, turn, parts)
        assert parts["strict"] == 1


SCENES = [
    ("a red circle", [("red", "circle", 0.3, 0.4, 0.15, 0)]),
    ("two blue squares", [("blue", "square", 0.25, 0.3, 0.12, 0), ("blue", "square", 0.7, 0.6, 0.15, 10)]),
    ("a green triangle and an orange circle", [("green", "triangle", 0.3, 0.6, 0.18, 0),
                                               ("orange", "circle", 0.7, 0.3, 0.14, 0)]),
    ("a photo of three purple circles", [("purple", "circle", 0.2 + 0.3 * n, 0.3 + 0.2 * n, 0.1, 0) for n in range(3)]),
    ("a black square to the left of a yellow triangle", [("black", "square", 0.25, 0.5, 0.14, 0),
                                                        ("yellow", "triangle", 0.72, 0.5, 0.16, 0)]),
    ("a pink square above a brown circle", [("pink", "square", 0.5, 0.2, 0.14, 0),
                                            ("brown", "circle", 0.45, 0.75, 0.14, 0)]),
    ("four grey triangles", [("grey", "triangle", x, y, 0.12, 20) for x in (0.25, 0.7) for y in (0.25, 0.75)]),
    ("a cyan circle below a red square", [("cyan", "circle", 0.6, 0.8, 0.13, 0), ("red", "square", 0.5, 0.3, 0.14, 0)]),
]  # fmt: skip


@pytest.mark.parametrize("size", [64, 128, 300])
def test_right_prompts_are_near_one_and_shuffled_ones_near_zero(size):
    images = [draw(things, size=size) for _, things in SCENES]
    prompts = [prompt for prompt, _ in SCENES]
    table = np.array([[SCORER.score([i], [p], [{}])[0][0] for p in prompts] for i in images])
    right = table.diagonal()
    wrong = table[~np.eye(len(SCENES), dtype=bool)]
    assert right.min() > 0.75, right
    assert right.mean() > 0.9
    assert wrong.max() < 0.05, table.round(2)


def test_empty_images_and_noise_are_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for image in (draw([]), np.zeros((3, 5, 3), np.uint8), noise):
        ((value, parts),) = SCORER.score([image], ["a red circle"], [{}])
        assert value == pytest.approx(0, abs=1e-9)
        assert parts == pytest.approx({"found": 0.0, "count": 0.0, "place": 1.0, "strict": 0.0}, abs=1e-7)


def test_no_shape_is_not_the_nearest_shape():
    image = draw([])
    # An L, and a bar: both are red, neither is round, square or three-cornered.
    for rows, columns in ((slice(20, 100), slice(20, 35)), (slice(85, 100), slice(20, 100))):
        image[rows, columns] = COLOURS["red"]
    bar = draw([])
    bar[60:70, 10:110] = COLOURS["red"]
    for shape in SHAPES:
        for picture in (image, bar):
            assert SCORER.score([picture], [f"a red {shape}"], [{}])[0][0] < 0.1


# ---- counts and places


@pytest.mark.parametrize(("there", "wanted", "about"), [(1, 2, 1 / 4), (2, 1, 1 / 4), (3, 2, 4 / 9), (3, 3, 1)])
def test_a_wrong_number_costs_the_square_of_the_ratio(there, wanted, about):
    things = [("red", "circle", 0.2 + 0.3 * n, 0.5, 0.1, 0) for n in range(there)]
    words = ("one", "two", "three")
    assert score(things, f"{words[wanted - 1]} red circles")[0] == pytest.approx(about, abs=0.05)


def test_things_that_nobody_asked_for_do_not_count():
    things = [("red", "circle", 0.3, 0.3, 0.12, 0), ("blue", "square", 0.7, 0.7, 0.12, 0)]
    assert score(things, "a red circle")[0] > 0.9


@pytest.mark.parametrize(
    ("place", "relation"),
    [((0.2, 0.5), "left of"), ((0.8, 0.5), "to the right of"), ((0.5, 0.2), "above"), ((0.5, 0.8), "below")],
)
def test_relations_hold_one_way_only(place, relation):
    things = [("red", "circle", *place, 0.1, 0), ("blue", "square", 0.5, 0.5, 0.12, 0)]
    value, parts = score(things, f"a red circle {relation} a blue square")
    assert value > 0.8
    assert parts["place"] == 1
    value, parts = score(things, f"a blue square {relation} a red circle")
    assert (value, parts["place"]) == (0, 0)
    assert parts["count"] > 0.8


def test_a_relation_without_one_of_its_things_is_wrong():
    assert score([("red", "circle", 0.2, 0.5, 0.1, 0)], "a red circle left of a blue square")[1]["place"] < 0.01


# ---- the parts


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("circle", Wanted((Group(1, "", "circle"),))),
        ("A photo of 3 gray squares.", Wanted((Group(3, "grey", "square"),))),
        ("an orange triangle, two circles and  a blue square",
         Wanted((Group(1, "orange", "triangle"), Group(2, "", "circle"), Group(1, "blue", "square")))),
        ("nine red circles to the right of a white square",
         Wanted((Group(9, "red", "circle"), Group(1, "white", "square")), "right")),
        ("a circle above a triangle", Wanted((Group(1, "", "circle"), Group(1, "", "triangle")), "above")),
    ],
)  # fmt: skip
def test_prompts_of_the_grammar(prompt, wanted):
    assert parse_prompt(prompt) == wanted


@pytest.mark.parametrize(
    "prompt",
    ["", "a dog", "red", "a red", "ten circles", "a circle beside a square", "a mauve circle", "a circle or a square",
     "a circle left of a square left of a triangle", "a circle and", "two a circles"],
)  # fmt: skip
def test_prompts_outside_the_grammar_are_refused_and_quoted(prompt):
    with pytest.raises(ValueError, match=r"colour_shape cannot judge .*expected") as caught:
        SCORER.score([draw([])], [prompt], [{}])
    assert repr(prompt) in str(caught.value)


def test_lab_of_known_colours():
    # D65 sRGB primaries, as any table of them has it.
    known = [(255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255)]
    np.testing.assert_allclose(
        lab(np.array(known)),
        [[100, 0, 0], [53.24, 80.09, 67.20], [87.73, -86.18, 83.18], [32.30, 79.19, -107.86]],
        atol=0.02,
    )


def test_odds_of_a_name_and_between_two_names():
    for name, rgb in COLOURS.items():
        odds = colour_odds(np.array(rgb, float))
        assert sum(odds.values()) == pytest.approx(1)
        assert odds[name] > 0.95
    middle = np.mean([COLOURS["red"], COLOURS["orange"]], axis=0)
    assert 0.05 < colour_odds(middle)["red"] < 0.95


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_patches_are_joined_as_by_flooding(seed, kinds):
    names = np.random.default_rng(seed).integers(0, kinds, (7, 9))
    got = join(names)
    for y, x in np.ndindex(names.shape):
        for other in ((y + 1, x), (y, x + 1)):
            if other[0] < 7 and other[1] < 9:
                assert (got[y, x] == got[other]) == (names[y, x] == names[other])
    for patch in np.unique(got):
        cells = set(map(tuple, np.argwhere(got == patch)))
        reached, waiting = set(), [next(iter(cells))]
        while waiting:
            y, x = waiting.pop()
            if (y, x) in cells - reached:
                reached.add((y, x))
                waiting += [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        assert reached == cells


@settings(max_examples=30, deadline=None)
@given(st.floats(6, 40), st.floats(0, 2 * np.pi), st.sampled_from(SHAPES))
def test_ideal_outlines_are_told_apart(size, turn, shape):
    rows, columns = np.mgrid[0:128, 0:128]
    x, y = columns - 63.3, rows - 64.2
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    inside = {
        "circle": np.hypot(u, v) <= size,
        "square": np.maximum(abs(u), abs(v)) <= size,
        "triangle": np.maximum.reduce([u * np.cos(a) + v * np.sin(a) for a in (0, 2.0944, -2.0944)]) <= size / 1.4,
    }[shape]
    odds = shape_odds(*np.nonzero(inside))
    assert odds[shape] > 0.75, odds
    assert sum(odds.values()) < 1


def test_an_object_knows_place_and_size():
    (thing,) = find_objects(draw([("blue", "square", 0.25, 0.5, 0.2 * np.sqrt(2), 0)], noise=0))
    assert (thing.x, thing.y) == pytest.approx((31.5, 63.5), abs=0.6)
    assert thing.size == pytest.approx(51.2, abs=2.5)
