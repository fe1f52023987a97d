"""The scenes' scorer: the rules' score untouched, and a judge that sees by other means what they see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.numpy import load_file, save_file

from nftctl.model.scenes import judge_recipe
from nftctl.model.scenes.drawing import draw, wanted
from nftctl.model.scenes.words import split_scenes
from nftctl.reward.scorers import load_scorer
from nftctl.reward.scorers import scenes as scorer
from nftctl.reward.scorers.scene.grammar import parse_prompt

SCENES = [*split_scenes().test, *split_scenes().tuning][::2]
PROMPTS = [str(scene) for scene in SCENES]
SCORER = load_scorer("scenes")


def drawn(seed):
    pictures = draw(wanted(SCENES), torch.Generator().manual_seed(seed))
    return list((pictures * 255).round().byte().permute(0, 2, 3, 1).numpy())


def judges(pictures, prompts):
    return np.array([parts["judge"] for _, parts in SCORER.score(pictures, prompts, [{}] * len(prompts))])


@pytest.mark.parametrize("seed", [301, 402])
def test_the_judge_knows_drawn_scenes_and_not_those_of_other_prompts(seed):
    pictures = drawn(seed)
    right = judges(pictures, PROMPTS)
    assert right.mean() > 0.8
    order = np.random.default_rng(seed).permutation(len(PROMPTS))
    assert judges(pictures, [PROMPTS[n] for n in order])[order != np.arange(len(order))].mean() < 0.05


def test_the_score_is_that_of_the_rules_whatever_the_judge_says():
    pictures, rules = drawn(7)[:20], load_scorer("colour_shape")
    for (score, parts), (alone, its) in zip(
        SCORER.score(pictures, PROMPTS[:20], [{}] * 20), rules.score(pictures, PROMPTS[:20], [{}] * 20), strict=True
    ):
        assert score == alone
        assert {name: parts[name] for name in its} == its
        assert set(parts) == set(SCORER.components) == {*its, "judge"}
        assert 0 <= parts["judge"] <= 1


def test_the_judge_is_no_copy_of_the_rules():
    """A ground that fades into the dark is more than the rules can part from what stands on it; the judge can."""
    image = np.array(drawn(11)[0])
    spoilt = [np.clip(image + np.random.default_rng(n).normal(0, 25, image.shape), 0, 255) for n in range(24)]
    scored = SCORER.score([picture.astype(np.uint8) for picture in spoilt], PROMPTS[:1] * 24, [{}] * 24)
    rules, judge = (np.array(values) for values in zip(*((s, p["judge"]) for s, p in scored), strict=True))
    assert np.abs(rules - judge).max() > 0.2


def test_an_answer_does_not_depend_on_what_else_is_asked():
    pictures = drawn(5)[:6]
    together = SCORER.score(pictures, PROMPTS[:6], [{}] * 6)
    for picture, prompt, answer in zip(pictures, PROMPTS[:6], together, strict=True):
        assert SCORER.score([picture], [prompt], [{}]) == [answer]
    assert SCORER.score([], [], []) == []


def test_blank_paper_and_what_is_no_shape_are_nothing_to_the_judge():
    blank = np.full((32, 32, 3), 245, np.uint8)
    image = Image.fromarray(blank.copy())
    pen = ImageDraw.Draw(image)
    pen.line([(4, 16), (28, 16)], fill=(210, 30, 30), width=2)
    for picture in (blank, np.asarray(image)):
        for shape in scorer.SHAPES:
            assert judges([picture], [f"a red {shape}"])[0] < 0.1


def test_a_relation_is_judged_by_the_middles():
    things = scorer.Things(
        x=np.array([5.0, 25.0], np.float32),
        y=np.array([9.0, 9.0], np.float32),
        shapes=np.array([[1, 0, 0], [0, 1, 0]], np.float32),
        colours=np.eye(6, dtype=np.float32)[[0, 2]],
    )
    for words, judged in (
        ("a red circle left of a blue square", 1.0),
        ("a red circle right of a blue square", 0.0),
        ("a blue square right of a red circle", 1.0),
        ("a red circle above a blue square", 0.0),
        ("two red circles left of a blue square", 0.0),
        ("a circle", 1.0),
        ("a pink circle", 0.0),
    ):
        assert scorer.judged(things, parse_prompt(words)) == judged, words


@pytest.mark.parametrize("picture", [np.zeros((8, 8, 3), np.uint8), np.zeros((32, 32, 3), np.float32)])
def test_a_picture_of_another_kind_is_refused(picture):
    with pytest.raises(ValueError, match=r"uint8 pictures of shape \(32, 32, 3\)"):
        SCORER.score([picture], ["a red circle"], [{}])


def test_a_prompt_outside_the_grammar_is_refused():
    with pytest.raises(ValueError, match="colour_shape cannot judge"):
        SCORER.score([np.zeros((32, 32, 3), np.uint8)], ["a dog"], [{}])


def test_the_weights_are_small_and_a_file_with_others_is_refused(tmp_path):
    assert scorer.WEIGHTS.stat().st_size < 300_000
    tensors = load_file(scorer.WEIGHTS)
    tensors["0.bias"] = tensors["0.bias"][:-1]
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: tensors .* expected"):
        scorer.Scenes(tmp_path / "other.safetensors")


def test_the_detector_in_numpy_is_the_network_that_was_trained():
    torch.manual_seed(0)
    net = judge_recipe.Net()
    weights = {name: value.astype(np.float32) for name, value in judge_recipe.weights(net).items()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter.half().float())
        x = torch.rand(2, 3, 32, 32) * 2 - 1
        want = net(x).permute(0, 2, 3, 1).numpy()
    got = scorer.Detector(weights).maps(x.permute(0, 2, 3, 1).numpy())
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_the_judges_renderings_say_where_what_is():
    pictures, heat, colour = judge_recipe.render(32, seed=1)
    assert pictures.shape == (32, 3, 32, 32)
    middles = (heat == 1).nonzero()
    assert len(middles) > 32
    for scene, _, row, column in middles.tolist():
        assert colour[scene, row, column] >= 0
    again, *_ = judge_recipe.render(32, seed=1)
    assert torch.equal(pictures, again)


def test_training_lowers_the_error():
    pictures, heat, colour = judge_recipe.render(64, seed=9)
    x = pictures.float() / 127.5 - 1
    nets = [judge_recipe.train(scenes=64, iterations=steps, seed=9) for steps in (1, 30)]
    with torch.no_grad():
        errors = [float(judge_recipe.error(net(x), heat, colour)) for net in nets]
    assert errors[1] < 0.7 * errors[0]
