"""Drawn scenes show what they are asked for, by the rules of the scorer and by where things were put."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nftctl.model.scenes.drawing import REACH, SIZE, draw, lay_out, wanted
from nftctl.model.scenes.words import Group, Scene, split_scenes
from nftctl.reward.scorers import load_scorer

SCENES = [*split_scenes().test, *split_scenes().tuning]
RULES = load_scorer("colour_shape")


def clock(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rewards(pictures: torch.Tensor, prompts: list[str]) -> list[float]:
    pixels = (pictures * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [score for score, _ in RULES.score(list(pixels), prompts, [{}] * len(prompts))]


@pytest.mark.parametrize(("seed", "scenes"), [(101, SCENES[::2]), (202, SCENES[1::2])])
def test_drawn_scenes_score_about_one_and_under_other_prompts_about_zero(seed: int, scenes: list[Scene]) -> None:
    prompts = [str(scene) for scene in scenes]
    pictures = draw(wanted(scenes), clock(seed))
    assert pictures.shape == (len(scenes), 3, SIZE, SIZE)
    right = rewards(pictures, prompts)
    assert np.mean(right) > 0.95
    assert np.mean([score >= 0.8 for score in right]) > 0.97
    order = np.random.default_rng(seed).permutation(len(prompts))
    # "A circle above a square" and "a square below a circle" are one scene: prompts of other things are shuffled in.
    shuffled = [(prompts[i], n) for n, i in enumerate(order) if {*scenes[i].groups} != {*scenes[n].groups}]
    assert len(shuffled) > 50
    wrong = rewards(pictures[[n for _, n in shuffled]], [prompt for prompt, _ in shuffled])
    assert np.mean(wrong) < 0.04


def test_things_keep_apart_from_each_other_and_from_the_border() -> None:
    want = wanted(SCENES * 4)
    layout = lay_out(want, clock(3))
    there = want.group >= 0
    reach = layout.radius * torch.tensor(REACH)[want.shape]
    for place in (layout.x, layout.y):
        assert bool(((place - reach)[there] > 0).all())
        assert bool(((place + reach)[there] < SIZE).all())
    for a in range(4):
        for b in range(a):
            gap = torch.hypot(layout.x[:, a] - layout.x[:, b], layout.y[:, a] - layout.y[:, b])
            assert bool((gap > reach[:, a] + reach[:, b])[there[:, a] & there[:, b]].all())


@pytest.mark.parametrize(("relation", "axis", "sign"), [(0, "x", 1), (1, "x", -1), (2, "y", 1), (3, "y", -1)])
def test_all_of_the_first_group_stand_where_the_relation_says(relation: int, axis: str, sign: int) -> None:
    want = wanted([Scene(Group(2, 0, 0), Group(1, 2, 1), relation)] * 64)
    place = getattr(lay_out(want, clock(relation)), axis)
    ahead = sign * (place[:, 2:3] - place[:, :2])
    assert float((ahead > 0).all(dim=1).float().mean()) > 0.98


def test_a_drawing_is_a_function_of_its_generator_and_varies_with_it() -> None:
    want = wanted(SCENES[:8])
    first = draw(want, clock(5))
    assert torch.equal(first, draw(want, clock(5)))
    other = draw(want, clock(6))
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    # Of one prompt no two pictures are alike, not even in their ground.
    many = draw(wanted(SCENES[:1] * 16), clock(7))
    assert len({round(float(value), 4) for value in many[:, 0, 0, 0]}) == 16


def test_edges_are_soft_and_insides_flat() -> None:
    picture = draw(wanted([Scene(Group(1, 5, 0))]), clock(0))[0].mean(0)
    ground, ink = picture.max(), picture.min()
    share = (ground - picture) / (ground - ink)
    soft = (share > 0.05) & (share < 0.95)
    assert 8 < int(soft.sum()) < 60
    assert int((share >= 0.95).sum()) > 60
