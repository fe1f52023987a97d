"""What an evaluation samples and by which weights, how its rows are made, and how a rank measures and chooses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nftctl.algorithm import draws
from nftctl.engine.evaluation import Column, Evaluation
from nftctl.engine.looking_rank import MEASURED, Onlooker, _spread, best_and_worst
from nftctl.engine.plan import plan_launch
from nftctl.engine.sheet import Sheet
from nftctl.engine.worker import Worker
from nftctl.model.registry import load_family
from nftctl.profile.prompts import read_prompts, resolve_prompt_file
from nftctl.roles.rollout import RolloutRole
from nftctl.run.state import RunState
from tests.roles.samples import set_adapter

TRAIN = resolve_prompt_file("embedded", "train")


@pytest.fixture
def evaluation(tiny: Any) -> Callable[..., Evaluation]:
    def make(*sets: str) -> Evaluation:
        return Evaluation.of(tiny(2, sets, look=True).profile, TRAIN)

    return make


# -- what is looked at ----------------------------------------------------------------------------------------------


def test_each_noise_of_a_prompt_is_a_row_and_the_first_is_that_of_the_command(evaluation: Any) -> None:
    look = evaluation("samples.prompts=3", "samples.noises=2", "eval.seed=9", "eval.steps=5", "eval.guidance=2.5")
    held_out = read_prompts(resolve_prompt_file("embedded", "test"))
    texts = [held_out[i].text for i in (0, 0, 4, 4, 8, 8)]
    assert [s.prompt for s in look.grid] == texts
    assert [s.key for s in look.grid] == [(9, "grid", i, j) for i in range(3) for j in range(2)]
    assert [s.key for s in look.grid][::2] == Sheet(held_out[:3], ["base"], 9, look.how).keys
    assert (look.how.steps, look.how.guidance) == (5, 2.5)
    assert len({s.key for s in (*look.grid, *look.held_out)}) == len(look.grid) + len(look.held_out)


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ((), ("base", "old", "policy")),
        (("rl.old.build_old=false",), ("base", "policy")),
        (("rl.ema_decay=0.9",), ("base", "old", "policy")),
        (("rl.ema_decay=0.9", 'eval.weights="ema"'), ("base", "old", "ema", "policy")),
    ],
)
def test_columns_are_the_weights_that_there_are(evaluation: Any, sets: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert evaluation(*sets).names == names


def test_what_is_equal_to_the_bit_is_sampled_once_and_says_so(evaluation: Any) -> None:
    look = evaluation("rl.ema_decay=0.9", 'eval.weights="ema"')
    assert look.columns(RunState()) == [
        Column("base", "reference"), Column("old", "reference", "base"), Column("ema", "reference", "base"),
        Column("policy", "reference", "base"),
    ]  # fmt: skip
    copied = RunState(step=3, optimizer_steps=3, policy_version=3, old_version=3)
    own = {"base": "reference", "old": "old", "ema": "ema", "policy": "policy"}
    assert look.columns(copied) == [
        Column(name, "policy", "policy") if name == "old" else Column(name, own[name])  # type: ignore[arg-type]
        for name in look.names
    ]
    for changes in ({"old_blended": 1}, {"old_version": 2}):
        apart = RunState(**{"step": 3, "optimizer_steps": 3, "policy_version": 3, "old_version": 3, **changes})
        assert [c.weights for c in look.columns(apart)] == ["reference", "old", "ema", "policy"]
        assert not any(c.same_as for c in look.columns(apart))


def test_only_whole_weights_without_a_reference_need_their_base_sampled_at_the_start(evaluation: Any) -> None:
    full = 'model.train="full"'
    assert evaluation("rl.kl_beta=0").base_grid is None
    assert evaluation(full, "rl.kl_beta=0.1").base_grid is None
    assert evaluation(full, "rl.kl_beta=0", "samples.prompts=0").base_grid is None
    look = evaluation(full, "rl.kl_beta=0")
    assert look.base_grid == (look.grid, look.how)
    assert [evaluation(*sets).distance for sets in ((), (full, "rl.kl_beta=0.1"), (full, "rl.kl_beta=0"))] == [
        True, True, False,
    ]  # fmt: skip


class Answering:
    """A group of three ranks that answer as they are told."""

    def __init__(self, count: int, distances: bool) -> None:
        self.count, self.distances = count, distances

    def call(self, method: str, samples: Any, how: Any, weights: str, distance: bool) -> list[Any]:
        assert (method, len(samples), distance) == ("evaluate", self.count, self.distances)
        # Sample i has reward i and component 10 i; the first of each rank is measured.
        return [
            [
                ((float(i % self.count), {"reward": 10.0 * (i % self.count)}), float(i) if distance and i < 3 else None)
                for i in range(rank, 3 * -(-self.count // 3), 3)
            ]
            for rank in range(3)
        ]


def test_a_row_is_the_mean_over_the_samples_without_the_repeats_that_fill_the_last_round(evaluation: Any) -> None:
    look = evaluation("eval.samples_per_prompt=1", 'rl.profile="tiny_t2i_cpu"')
    small = Evaluation(look.held_out[:4], (), look.names, look.how)
    row = small.score(Answering(4, True), 7)  # type: ignore[arg-type]
    # A component that has the name of a metric of the evaluation's own does not take its place.
    wanted = {
        "eval/reward": (0 + 1 + 2 + 3) / 4,
        "eval/std": 1.25**0.5,
        "eval/samples": 4,
        "eval/kl_distance": 1.0,
    }
    assert row == {"step": 7} | wanted
    bare = Evaluation(look.held_out[:4], (), look.names, look.how, distance=False)
    assert "eval/kl_distance" not in bare.score(Answering(4, False), 7)  # type: ignore[arg-type]
    assert Evaluation((), (), (), look.how).score(Answering(0, True), 7) == {}  # type: ignore[arg-type]


# -- which samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "world"), [(36, 4), (72, 2), (3, 2), (1, 8), (100, 16), (5, 64), (16, 3)])
def test_ranks_measure_as_many_samples_each_spread_over_all(count: int, world: int) -> None:
    picks = [_spread(count, rank, world) for rank in range(world)]
    each = len(picks[0])
    assert each == min(count, -(-MEASURED // world))
    assert all(len(pick) == each == len(set(pick)) for pick in picks)
    places = sorted(i for pick in picks for i in pick)
    assert places[0] == 0
    assert places[-1] < count
    # At even distances: no gap is wider than a distance, rounded up.
    assert max(np.diff([*places, count])) <= -(-count // (each * world)) + 1


def test_best_and_worst_are_those_of_a_sort_and_never_the_same() -> None:
    rng = np.random.default_rng(3)
    for rows, ranks in ((1, 2), (1, 3), (3, 2), (4, 4), (8, 4)):
        values = rng.integers(0, 5, (rows, ranks)).astype(float)
        values[rng.random((rows, ranks)) < 0.2] = np.nan
        best, worst = best_and_worst(torch.tensor(values), 4)
        flat = np.sort(values[~np.isnan(values)])
        assert [values[at] for at in best] == flat[::-1][: min(4, (len(flat) + 1) // 2)].tolist()
        assert [values[at] for at in worst] == flat[: min(4, len(flat) // 2)].tolist()
        assert not set(best) & set(worst)
    same = torch.zeros(2, 3, dtype=torch.float64)
    assert best_and_worst(same, 2) == ([(0, 0), (0, 1)], [(1, 1), (1, 2)])
    assert best_and_worst(torch.full((2, 3), torch.nan), 4) == ([], [])


# -- on a rank --------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A rank alone in its world, in this process."""
    worker = Worker(0)
    worker.join(1, *worker.host_store(1, 60.0), "cpu", 60.0)
    yield worker
    worker.close()
    dist.destroy_process_group()


def built(worker: Worker, tiny: Any, folder: Path, *sets: str) -> tuple[Any, Evaluation]:
    """Roles with a policy and an old of their own; nobody scores."""
    from nftctl.engine.worker import WorkerSpec

    plan = plan_launch(tiny(2, ("rl.group_size=2", "eval.samples_per_prompt=2", "eval.steps=3", *sets), True),
                       run_dir=folder)  # fmt: skip
    look = Evaluation.of(plan.profile, plan.prompt_path)
    worker.build(WorkerSpec(plan.profile, plan.family, plan.base, plan.prompt_path, (), (), "run/1"))
    set_adapter(worker.roles.family, "policy", 1)
    return plan, look


def test_the_distance_is_that_of_two_whole_models(worker: Worker, tiny: Any, tmp_path: Path) -> None:
    """At the sample's own latent, sigmas 1/4 and 3/4, noise of the evaluation's keys; the reference never adapted."""
    plan, look = built(worker, tiny, tmp_path)
    roles = worker.roles
    answers = worker.evaluate(look.held_out, look.how, "policy", True)
    measured = [i for i, (_, distance) in enumerate(answers) if distance is not None]
    assert len(measured) == 16
    assert len(answers) == 24
    assert measured[:4] == [0, 1, 3, 4]  # 24 samples, 16 of them: every third is left out
    plain = load_family(plan.profile.model, "embedded", "cosmos3", torch.device("cpu"))
    rollout: RolloutRole = roles.rollout
    for i in measured[::5]:
        sample = look.held_out[i]
        ((conditions, x0, _),) = rollout.make_fixed([sample.prompt], [sample.key], look.how, "policy")
        squares = []
        for k, sigma in enumerate((0.25, 0.75)):
            eps = draws.normal(roles.family.latent_shape, *sample.key, "distance", k)
            x_t = (1 - sigma) * x0 + sigma * eps
            t = torch.tensor([sigma])
            with torch.no_grad(), roles.policy.copies.use("policy"):
                v = roles.family.denoiser(x_t, t, conditions[0]).numpy().astype(np.float64)
            with torch.no_grad():
                v_ref = plain.denoiser(x_t, t, plain.encoder.encode([sample.prompt])[0]).numpy().astype(np.float64)
            squares.append(np.mean((v - v_ref) ** 2))
        assert answers[i][1] == pytest.approx(np.mean(squares), rel=1e-4)
        assert np.mean(squares) > 1e-4


def test_looks_count_no_forwards_and_consult_no_global_generator(worker: Worker, tiny: Any, tmp_path: Path) -> None:
    _, look = built(worker, tiny, tmp_path, "rl.ema_decay=0.9", 'eval.weights="ema"')
    policy = worker.roles.policy

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]

    def bits() -> dict[str, bytes]:
        return {name: tensor.detach().numpy().tobytes() for name, tensor in policy.copies.state().items()}

    before, weights, forwards = states(), bits(), worker.roles.family.denoiser.forwards
    worker.evaluate(look.held_out, look.how, "ema", True)
    worker.paint(look.grid, look.how, ["reference", "old", "ema", "policy"])
    # 24 samples and 4 x 6 in grids, three sampler steps each; 16 samples at two sigmas by two models.
    assert worker.roles.family.denoiser.forwards - forwards == 3 * (24 + 4 * 6) + 16 * 2 * 2
    assert policy._executed() == 0
    assert (states(), bits()) == (before, weights)


def test_the_base_is_sampled_once_for_all_grids(
    worker: Worker, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, look = built(worker, tiny, tmp_path)
    made: list[str] = []
    inner = Onlooker._paint

    def watched(self: Onlooker, mine: Any, how: Any, weights: Any) -> Any:
        made.append(weights)
        return inner(self, mine, how, weights)

    monkeypatch.setattr(Onlooker, "_paint", watched)
    monkeypatch.setattr(Onlooker, "_score", lambda self, role, mine, images, label: [(0.5, {})] * len(images))
    state = RunState(step=1, optimizer_steps=1, policy_version=1)

    class Here:
        def call(self, method: str, *given: Any) -> list[Any]:
            return [getattr(worker, method)(*given)]

    for number in range(3):
        look.draw(Here(), tmp_path / f"{number}.png", state)  # type: ignore[arg-type]
    assert made == ["reference", "old", "policy", "old", "policy", "old", "policy"]
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "2.png").read_bytes()
