"""The scenes' prompts: what may be asked for, who may see it, and the tokenizer that knows no other words."""

from __future__ import annotations

from pathlib import Path

import pytest

from nftctl.errors import ProfileRefused
from nftctl.model.cosmos3_tokens import Cosmos3Tokens, load_tokenizer
from nftctl.model.scenes import recipe, words
from nftctl.model.scenes.words import COLOURS, SHAPES, Group, Scene, all_scenes, split_scenes
from nftctl.reward.scorers.scene.grammar import parse_prompt

SCENES = Path(words.__file__).parent
SPLIT = split_scenes()
RUNS = {"train": SPLIT.rl, "tuning": SPLIT.tuning, "test": SPLIT.test}


def sentences(name: str) -> set[str]:
    return {str(scene) for scene in getattr(SPLIT, name)}


def pairs(scenes: tuple[Scene, ...]) -> set[frozenset[tuple[str, str]]]:
    """Unordered pairs of coloured shapes, by what the scorer's own grammar reads in the sentences."""
    wanted = [parse_prompt(str(scene)) for scene in scenes]
    return {frozenset((g.colour, g.shape) for g in w.groups) for w in wanted if len(w.groups) == 2}


def cells(scenes: tuple[Scene, ...]) -> set[tuple[int, str, str]]:
    """(number, colour, shape) of every group, alone or beside another."""
    return {(g.count, g.colour, g.shape) for scene in scenes for g in parse_prompt(str(scene)).groups}


def alone(scenes: tuple[Scene, ...]) -> tuple[Scene, ...]:
    return tuple(scene for scene in scenes if scene.second is None)


def test_the_sentences_of_tuning_and_test_are_in_no_other_list() -> None:
    assert len(all_scenes()) == len({str(scene) for scene in all_scenes()}) == 72 + 6 * 3 * 5 * 3 * 3 * 4
    assert (len(sentences("rl")), len(sentences("tuning")), len(sentences("test"))) == (320, 48, 72)
    assert sentences("rl") < sentences("pretraining")
    assert not sentences("test") & (sentences("pretraining") | sentences("tuning"))
    assert not sentences("tuning") & sentences("pretraining")


def test_what_is_held_out_is_the_combination_and_not_the_sentence() -> None:
    for held, others in ((SPLIT.test, (SPLIT.pretraining, SPLIT.tuning)), (SPLIT.tuning, (SPLIT.pretraining,))):
        for other in others:
            assert not pairs(held) & pairs(other)
            assert not cells(alone(held)) & cells(other)


def test_everything_in_the_test_was_seen_in_other_combinations() -> None:
    test, seen = cells(SPLIT.test), cells(SPLIT.pretraining)
    for place, names in enumerate(({1, 2, 3, 4}, set(COLOURS), set(SHAPES))):
        assert {cell[place] for cell in test} == {cell[place] for cell in seen} == names
    asked = {parse_prompt(str(scene)).relation for scene in SPLIT.test}
    assert asked == {None, "left", "right", "above", "below"}
    # Every number of the test's single groups, four times.
    assert sorted(scene.first.count for scene in alone(SPLIT.test)) == [2] * 4 + [3] * 4 + [4] * 4


def test_the_packaged_prompt_files_are_what_the_recipe_writes(tmp_path: Path) -> None:
    recipe.save_prompts(tmp_path)
    for name, scenes in RUNS.items():
        packaged = (SCENES / f"prompts_{name}.txt").read_text()
        assert packaged == (tmp_path / f"prompts_{name}.txt").read_text()
        assert packaged.splitlines() == [str(scene) for scene in scenes]


def test_a_sentence_says_what_the_scene_is() -> None:
    red, blue = Group(2, 0, 0), Group(1, 2, 1)
    assert str(Scene(red)) == "two red circles"
    assert str(Scene(red, blue, 3)) == "two red circles below a blue square"
    read = parse_prompt(str(Scene(blue, red, 1)))
    assert read.relation == "right"
    assert [(g.count, g.colour, g.shape) for g in read.groups] == [(1, "blue", "square"), (2, "red", "circle")]


def test_the_packaged_tokenizer_is_that_of_the_recipe_and_refuses_other_words() -> None:
    tokenizer = load_tokenizer(SCENES / "base" / "tokenizer")
    assert tokenizer.get_vocab() == recipe.VOCABULARY
    tokens = Cosmos3Tokens(tokenizer, height=32, width=32, system_prompt=False, resolution_template=False)
    texts = ["", "a red circle", "two red circles left of a blue square"]
    rows, lengths = recipe.captions(texts)
    for text, row, length in zip(texts, rows.tolist(), lengths.tolist(), strict=True):
        assert tokens(text, not text) == row[:length]
    with pytest.raises(ProfileRefused, match=r'does not know the word "five"'):
        tokens("five red circles", False)
