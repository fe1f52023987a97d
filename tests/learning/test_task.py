"""Rollouts are those of a run's ranks; looking is repeatable, and says the same as a run's own evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nftctl.algorithm import draws
from nftctl.errors import ProfileRefused
from nftctl.learning.task import MEASURED, SIGMAS, Task, with_seed
from nftctl.reward.scorers import load_scorer
from tests.roles.samples import set_adapter


def test_noise_and_rows_are_keyed_as_in_a_run(task: Any) -> None:
    learning = task(seed=7)
    rows = learning.rows(2)
    assert [row.number for row in rows] == [4, 5]
    assert [row.prompt for row in rows] == learning.splits.train[4:6]
    noise = learning.noise(rows, 9)
    for i, (row, rank) in enumerate([(4, 0), (4, 1), (5, 0), (5, 1)]):
        assert torch.equal(noise[i], draws.normal(learning.family.latent_shape, 7, "rollout", row, rank))
    by_step = task('rl.rollout_seed_clock="optimizer_step"', seed=7).noise(rows, 9)
    assert torch.equal(by_step[2], draws.normal(learning.family.latent_shape, 7, "rollout", 9, 0))


def test_rewards_stand_by_row_and_rank(task: Any) -> None:
    learning = task()
    rows = learning.rows(0)
    group = learning.roll(rows, 0, "policy")
    images = learning.family.decoder.decode(group.x0)
    scorer = load_scorer("tiny_digits")
    for i in range(4):
        ((score, _),) = scorer.score([images[i, 0].numpy()], [rows[i // 2].prompt.reward_text], [{}])
        assert group.rewards[i // 2, i % 2].item() == pytest.approx(score, rel=1e-12)
    assert learning.samples_per_step == 4


def test_a_look_is_repeatable_and_takes_nothing_from_training(task: Any) -> None:
    looked, unseen = task(seed=1), task(seed=1)
    first = looked.look("test")
    assert looked.look("test").reward == first.reward
    for learning in (looked, unseen):
        set_adapter(learning.family, "policy", 3)
    assert looked.look("test").reward != first.reward
    groups = [learning.roll(learning.rows(0), 0, "policy") for learning in (looked, unseen)]
    assert torch.equal(groups[0].x0, groups[1].x0)


def test_a_look_is_at_the_held_out_prompts_from_the_seeds_own_noise(task: Any) -> None:
    learning = task(seed=2)
    prompts, keys = learning._held_out("tuning")
    assert [p.text for p in prompts] == [p.text for p in learning.splits.tuning for _ in range(2)]
    assert keys[:3] == [
        (1, "learning/tuning", 2, 0, 0),
        (1, "learning/tuning", 2, 0, 1),
        (1, "learning/tuning", 2, 1, 0),
    ]
    assert learning._held_out("test")[1][0] == (1, "learning/test", 2, 0, 0)
    assert task(seed=3).look("tuning").reward != learning.look("tuning").reward


def test_figures_of_a_look(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward, judge and diversity from the images themselves."""
    learning = task()
    made: list[Any] = []
    make = learning._make
    monkeypatch.setattr(learning, "_make", lambda *a: made.append(make(*a)) or made[-1])
    look = learning.look("tuning")
    ((_, _, images),) = made
    pictures, texts = [image[0].numpy() for image in images], [p.text for p in learning._held_out("tuning")[0]]
    scored = load_scorer("tiny_digits").score(pictures, texts, [{}] * len(texts))
    assert look.reward == pytest.approx(np.mean([score for score, _ in scored]), rel=1e-9)
    assert look.judge == pytest.approx(np.mean([parts["judge"] for _, parts in scored]), rel=1e-9)
    assert look.parts["digits/strict"] == pytest.approx(np.mean([parts["strict"] for _, parts in scored]))
    small = [p.reshape(4, 2, 4, 2, 3).mean(axis=(1, 3)) / 255 for p in pictures]
    gaps = [np.sqrt(((small[i] - small[i + 1]) ** 2).mean()) for i in range(0, len(small), 2)]
    assert look.diversity == pytest.approx(np.mean(gaps), rel=1e-5)
    assert look.forwards == 3
    assert look.kl_distance == 0.0


def test_the_distance_to_the_base_is_measured_on_own_samples(task: Any) -> None:
    learning = task(seed=4)
    set_adapter(learning.family, "policy", 1)
    look = learning.look("tuning")
    prompts, keys = learning._held_out("tuning")
    assert len(prompts) == MEASURED
    squares = []
    for prompt, key in zip(prompts, keys, strict=True):
        conditions, x0, _ = learning._make([prompt], [key], learning.how, "policy")
        for k, sigma in enumerate(SIGMAS):
            x_t = (1 - sigma) * x0 + sigma * draws.normal(learning.family.latent_shape, *key, "distance", k)
            v = {}
            for which in ("policy", "reference"):
                with torch.no_grad(), learning.copies.use(which):
                    v[which] = learning.velocity(x_t, torch.tensor([sigma]), conditions).double()
            squares.append(float((v["policy"] - v["reference"]).square().mean()))
    assert look.kl_distance == pytest.approx(np.mean(squares), rel=1e-3)
    assert look.kl_distance > 1e-4


def test_guidance_takes_two_forwards_and_leads_away_from_the_base(task: Any) -> None:
    learning = task()
    plain, guided = learning.look("tuning"), learning.look("tuning", guidance=3.0)
    assert (plain.forwards, guided.forwards) == (3, 6)
    assert guided.reward > plain.reward + 0.05
    assert plain.kl_distance == 0.0
    assert guided.kl_distance > 0.01


def test_a_seed_changes_the_draws_and_nothing_else(profile: Any) -> None:
    settings = profile()
    assert with_seed(settings, 9).rl.seed == 9
    assert with_seed(settings, settings.rl.seed) == settings


def test_full_training_is_refused(profile: Any) -> None:
    with pytest.raises(ProfileRefused) as refused:
        Task(profile('model.train="full"'), 0)
    assert refused.value.findings[0].key == "model.train"
