"""The embedded task: prompts, scans, tinting and the tokenizer."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from nftctl.errors import ProfileRefused
from nftctl.model.cosmos3_tokens import Cosmos3Tokens, load_tokenizer
from nftctl.model.tiny import data
from nftctl.model.tiny.tokenizer import VOCABULARY, build_tokenizer, prompt_tokens

TINY = Path(data.__file__).parent


def tokens(*, system_prompt: bool = False, resolution_template: bool = False) -> Cosmos3Tokens:
    tokenizer = load_tokenizer(TINY / "base" / "tokenizer")
    return Cosmos3Tokens(
        tokenizer, height=8, width=8, system_prompt=system_prompt, resolution_template=resolution_template
    )


def test_prompts_are_split_48_to_12_without_overlap_and_cover_every_word() -> None:
    train, test = data.split_prompts()
    assert (len(train), len(test), len({*train, *test})) == (48, 12, 60)
    for prompts in (train, test):
        assert {word for text in prompts for word in text.split()} == set(data.WORDS)
    assert "a red zero" in test


def test_neighbouring_rows_of_a_step_differ_in_colour_and_digit() -> None:
    train, _ = data.split_prompts()
    for first, second in itertools.pairwise(train):
        assert not set(first.split()[1:]) & set(second.split()[1:])


def test_the_packaged_prompt_files_are_what_the_recipe_writes() -> None:
    for name, prompts in zip(("train", "test"), data.split_prompts(), strict=True):
        assert (TINY / f"prompts_{name}.txt").read_text().splitlines() == prompts


def test_halves_are_disjoint_fixed_and_hold_every_scan_once() -> None:
    from sklearn.datasets import load_digits

    first, second = data.read_halves()
    assert (len(first.label), len(second.label)) == (898, 899)
    both = np.concatenate([first.ink, second.ink]).reshape(1797, 64) * 16
    assert sorted(map(tuple, both.astype(int))) == sorted(map(tuple, load_digits().data.astype(int)))
    again, _ = data.read_halves()
    np.testing.assert_array_equal(first.ink, again.ink)


def test_tint_puts_pigment_where_the_ink_is_full_and_leaves_paper_white() -> None:
    ink = np.zeros((1, 8, 8), np.float32)
    ink[0, 3, 3], ink[0, 4, 4] = 1.0, 0.5
    picture = data.tint(ink, np.array([2]))[0]
    np.testing.assert_allclose(picture[3, 3], data.COLOURS["blue"], atol=1e-6)
    np.testing.assert_allclose(picture[4, 4], (1 + np.array(data.COLOURS["blue"])) / 2, atol=1e-6)
    np.testing.assert_array_equal(picture[0, 0], [1, 1, 1])


def test_warp_of_nothing_is_the_identity_and_a_warp_keeps_ink_in_range() -> None:
    scans, _ = data.read_halves()
    np.testing.assert_allclose(data.warp(scans.ink, np.random.default_rng(0), 0.0), scans.ink, atol=1e-6)
    moved = data.warp(scans.ink, np.random.default_rng(0), 0.1)
    assert moved.min() >= 0
    assert moved.max() <= 1 + 1e-6
    assert not np.array_equal(moved, scans.ink)
    # Ink moves; it is neither made nor lost, but for what leaves the paper.
    assert moved.sum() == pytest.approx(scans.ink.sum(), rel=0.05)


def test_a_training_batch_is_a_function_of_its_generator() -> None:
    scans, _ = data.read_halves()
    first = data.training_batch(scans, 16, np.random.default_rng(5))
    second = data.training_batch(scans, 16, np.random.default_rng(5))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    latents, colour, digit = first
    assert latents.shape == (16, 3, 8, 8)
    assert latents.dtype == np.float32
    assert -1 <= latents.min() < latents.max() <= 1
    assert colour.max() < 6
    assert digit.max() < 10


def test_the_pipeline_tokenizes_as_the_recipe_does() -> None:
    tokenize = tokens()
    for text in (*data.split_prompts()[0], *data.split_prompts()[1]):
        assert tokenize(text, False) == prompt_tokens(text)
    assert tokenize("a red seven", False) == [1, 4, 5, 18, 2, 3]
    assert tokenize("", True) == prompt_tokens("") == [1, 2, 3]


def test_the_packaged_tokenizer_is_what_the_recipe_writes(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    packaged = load_tokenizer(TINY / "base" / "tokenizer")
    assert packaged.get_vocab() == load_tokenizer(tmp_path).get_vocab() == VOCABULARY
    assert packaged.chat_template == load_tokenizer(tmp_path).chat_template


@pytest.mark.parametrize("word", ["big", "seven.", "Red", "<|vision_start|>"])
def test_an_unknown_word_is_refused_by_name(word: str) -> None:
    with pytest.raises(ProfileRefused, match="does not know the word") as refusal:
        tokens()(f"a {word} one", False)
    assert word in str(refusal.value)


def test_system_prompt_and_resolution_sentence_are_refused_with_the_key_to_change() -> None:
    with pytest.raises(ProfileRefused, match=r"model\.system_prompt = false"):
        tokens(system_prompt=True)("a red one", False)
    with pytest.raises(ProfileRefused, match=r"model\.resolution_template = false"):
        tokens(resolution_template=True)("a red one", False)
