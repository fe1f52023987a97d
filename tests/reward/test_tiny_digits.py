"""The tiny scorer against real scans, torch, and what it must not be fooled by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F

from nftctl.model.tiny import data, reward_recipe
from nftctl.reward.scorers import load_scorer, scorer_revision, tiny_digits
from nftctl.reward.scorers.tiny_digits import FILES, WEIGHTS, TinyDigits, parse_prompt

SCORER = TinyDigits()
PROMPTS = [data.prompt(colour, digit) for colour in range(6) for digit in range(10)]


def scores(images: Sequence[np.ndarray], prompts: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
    return SCORER.score(list(images), list(prompts), [{} for _ in prompts])


def pictures(scans: data.Scans, seed: int = 0) -> tuple[list[np.ndarray], list[str]]:
    """Every scan in a random colour, and the prompt that describes it."""
    rng = np.random.default_rng(seed)
    colour = rng.integers(0, 6, len(scans.label))
    images = np.round(data.tint(scans.ink, colour) * 255).astype(np.uint8)
    return list(images), [data.prompt(c, d) for c, d in zip(colour, scans.label, strict=True)]


def mean(results: list[tuple[float, dict[str, float]]], component: str | None = None) -> float:
    return float(np.mean([parts[component] if component else score for score, parts in results]))


def test_scans_the_classifier_never_saw_score_high_and_their_shuffled_prompts_low() -> None:
    images, prompts = pictures(data.read_halves()[0])
    real = scores(images, prompts)
    assert mean(real) > 0.94
    assert mean(real, "strict") > 0.97
    shuffled = scores(images, list(np.random.default_rng(1).permutation(prompts)))
    # One prompt in sixty is right by chance.
    assert mean(shuffled) < 0.04
    assert mean(shuffled, "judge") < 0.04


def test_the_judge_knows_scans_it_does_not_remember() -> None:
    images, prompts = pictures(data.read_halves()[1])
    assert 0.94 < mean(scores(images, prompts), "judge") <= 1


def test_right_digit_in_the_wrong_colour_and_right_colour_of_the_wrong_digit_both_fail() -> None:
    scans = data.read_halves()[0]
    images, _ = pictures(data.Scans(scans.ink[:40], scans.label[:40]))
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 6, len(scans.label))[:40]
    wrong_colour = scores(images, [data.prompt((c + 1) % 6, d) for c, d in zip(colour, scans.label[:40], strict=True)])
    wrong_digit = scores(images, [data.prompt(c, (d + 1) % 10) for c, d in zip(colour, scans.label[:40], strict=True)])
    assert mean(wrong_colour, "digit") > 0.9
    assert mean(wrong_colour) < 0.05
    assert mean(wrong_digit, "colour") > 0.95
    assert mean(wrong_digit) < 0.05


@pytest.mark.parametrize("level", [0, 60, 128, 255])
def test_paper_of_one_tone_is_no_digit(level: int) -> None:
    blank = np.full((8, 8, 3), level, np.uint8)
    results = scores([blank] * 60, PROMPTS)
    assert max(score for score, _ in results) < 0.1
    assert max(parts["judge"] for _, parts in results) < 0.1
    assert mean(results, "strict") == 0


def test_noise_is_no_digit() -> None:
    rng = np.random.default_rng(3)
    grey = rng.integers(0, 256, (240, 8, 8, 1)).repeat(3, axis=3).astype(np.uint8)
    coloured = rng.integers(0, 256, (240, 8, 8, 3)).astype(np.uint8)
    for noise in (grey, coloured):
        results = scores(list(noise), PROMPTS * 4)
        assert mean(results) < 0.02
        assert mean(results, "judge") < 0.02


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=192, max_size=192), st.sampled_from(PROMPTS))
def test_any_picture_scores_within_bounds(pixels: bytes, prompt: str) -> None:
    ((score, parts),) = scores([np.frombuffer(pixels, np.uint8).reshape(8, 8, 3)], [prompt])
    assert 0 <= score <= 1
    assert set(parts) == {"digit", "colour", "strict", "judge"}
    assert all(0 <= value <= 1 for value in parts.values())
    assert score == parts["digit"] * parts["colour"]
    assert parts["strict"] in (0.0, 1.0)
    assert parts["judge"] <= parts["colour"]


def test_a_score_depends_neither_on_the_rest_of_the_request_nor_on_the_call() -> None:
    images, prompts = pictures(data.read_halves()[0])
    images, prompts = images[:30], prompts[:30]
    together = scores(images, prompts)
    assert scores(images, prompts) == together
    assert [scores([i], [p])[0] for i, p in zip(images, prompts, strict=True)] == together
    assert scores(images[::-1], prompts[::-1]) == together[::-1]
    assert TinyDigits().score(images, prompts, [{}] * 30) == together


def test_probabilities_equal_a_torch_computation() -> None:
    weights = load_file(WEIGHTS)
    model = reward_recipe.Classifier()
    with torch.no_grad():
        model.conv1.weight.copy_(torch.from_numpy(weights["conv1.weight"].T.copy()).reshape(16, 1, 3, 3))
        model.conv1.bias.copy_(torch.from_numpy(weights["conv1.bias"]))
        model.conv2.weight.copy_(torch.from_numpy(weights["conv2.weight"].T.copy()).reshape(32, 16, 3, 3))
        model.conv2.bias.copy_(torch.from_numpy(weights["conv2.bias"]))
        head = torch.from_numpy(weights["head.weight"]).reshape(4, 4, 32, 11).permute(3, 2, 0, 1).reshape(11, 512)
        model.head.weight.copy_(head)
        model.head.bias.copy_(torch.from_numpy(weights["head.bias"]))
        ink = data.read_halves()[0].ink[:100]
        digits = F.softmax(model(torch.from_numpy(ink)[:, None]), dim=-1).numpy()
    np.testing.assert_allclose(SCORER.digits(ink), digits, atol=1e-5)

    scans = torch.from_numpy(weights["judge.ink"]).double()
    distance = torch.cdist(*(F.normalize(t, dim=1) for t in (torch.from_numpy(ink).reshape(-1, 64).double(), scans)))
    votes = torch.exp(-(distance**2) / 0.02) @ F.one_hot(torch.from_numpy(weights["judge.label"]).long(), 10).double()
    judged = votes / (votes.sum(1, keepdim=True) + torch.exp(torch.tensor(-0.25 / 0.02)))
    np.testing.assert_allclose(SCORER.judged(ink), judged.numpy(), atol=5e-3)


def test_colour_is_read_off_the_ink_alone() -> None:
    pigments = np.array(list(data.COLOURS.values()), np.float32)
    thin = np.ones((6, 8, 8, 3), np.float32)
    thin[:, 2:6, 4] = pigments[:, None]
    pure = SCORER.colours(1 - thin)
    np.testing.assert_array_equal(pure.argmax(axis=1), range(6))
    assert pure.max(axis=1).min() > 0.95
    # Blank paper has no direction, so no colour is nearer than another.
    np.testing.assert_allclose(SCORER.colours(np.zeros((1, 8, 8, 3), np.float32)), 1 / 6, atol=0.005)


def test_words_and_pigments_are_those_of_the_task() -> None:
    assert tuple(data.COLOURS) == tiny_digits.COLOURS
    assert data.NUMBERS == tiny_digits.NUMBERS
    np.testing.assert_allclose(load_file(WEIGHTS)["pigment"], list(data.COLOURS.values()), atol=1e-6)
    assert [parse_prompt(text) for text in PROMPTS] == [divmod(n, 10) for n in range(60)]


@pytest.mark.parametrize("prompt", ["", "a cat", "a red", "a red seven seven", "red a seven", "a Red seven", "a red 7"])
def test_a_prompt_it_cannot_read_is_refused_by_name(prompt: str) -> None:
    with pytest.raises(ValueError, match="cannot judge the prompt") as refusal:
        scores([np.zeros((8, 8, 3), np.uint8)] * 2, ["a red seven", prompt])
    assert repr(prompt) in str(refusal.value)


def test_pictures_of_another_shape_or_type_are_refused() -> None:
    for image in (np.zeros((16, 16, 3), np.uint8), np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3), np.float32)):
        with pytest.raises(ValueError, match="uint8 pictures of shape"):
            scores([image], ["a red seven"])
    with pytest.raises(ValueError, match="counts must agree"):
        SCORER.score([np.zeros((8, 8, 3), np.uint8)], [], [])
    assert scores([], []) == []


def test_a_weight_file_with_a_missing_or_misshapen_tensor_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    weights = load_file(WEIGHTS)
    save_file({name: value for name, value in weights.items() if name != "head.bias"}, tmp_path / "short")
    with pytest.raises(ValueError, match=r"head\.bias"):
        TinyDigits(tmp_path / "short")
    save_file(weights | {"head.bias": np.zeros(10, np.float16)}, tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"head\.bias has shape \(10,\)"):
        TinyDigits(tmp_path / "narrow")


def test_the_registry_serves_it_with_a_revision_over_code_and_weights() -> None:
    scorer = load_scorer("tiny_digits")
    assert (scorer.name, scorer.components) == ("tiny_digits", ("digit", "colour", "strict", "judge"))
    assert scorer.revision() == scorer_revision("tiny_digits")
    assert [path.name for path in FILES] == ["tiny_digits.py", "tiny_digits.safetensors"]
    assert WEIGHTS.stat().st_size < 150_000


def test_training_the_classifier_is_repeatable_and_seeded() -> None:
    half = data.read_halves()[1]

    def bits(seed: int) -> bytes:
        classifier = reward_recipe.train_classifier(half, iterations=3, seed=seed)
        return b"".join(
            reward_recipe.weights(classifier, half)[name].tobytes() for name in ("conv1.weight", "head.bias")
        )

    assert bits(0) == bits(0)
    assert bits(0) != bits(1)
