"""A number that is not finite on one rank of four: every rank refuses, in the same words, before any weight moves."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

from nftctl.algorithm.objective import METRICS
from nftctl.engine.group import Group
from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from nftctl.errors import TrainingFailed
from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.manifest import verify
from tests.engine.test_world import tensors_of

pytestmark = pytest.mark.ray

FIELDS = dict(zip(METRICS, ("policy", "kl", "positive_error", "negative_error", "old_gap"), strict=True))


def poison(worker: Any, rank: int, field: str, value: float, calls: int) -> None:
    """Spoil one term of one sample on `rank`, from the given call of the objective on."""
    import dataclasses

    from nftctl.algorithm import objective

    worker.sound = original = objective.nft_terms
    worker.calls = 0

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        terms = original(*args, **kwargs)
        worker.calls += 1
        if worker.rank != rank or worker.calls < calls:
            return terms
        term = getattr(terms, field).clone()
        term.data[1] = value
        return dataclasses.replace(terms, **{field: term})

    objective.nft_terms = spoilt


def cure(worker: Any) -> None:
    from nftctl.algorithm import objective

    objective.nft_terms = worker.sound


def state_of(worker: Any) -> dict[str, bytes]:
    """Weights and optimizer of a rank, as its checkpoint would hold them."""
    from nftctl.engine.checkpoint import optimizer_state

    policy = worker.roles.policy
    state = policy.copies.state() | optimizer_state(policy.optimizer, policy.parameters)[0]
    return {name: value.detach().numpy().tobytes() for name, value in state.items()}


@pytest.mark.parametrize("term", METRICS)
def test_one_bad_term_of_one_rank_stops_all_before_the_step(
    world4: Group, tiny: Any, reporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    """The third step fails, while the checkpoint of the second is still being written."""
    said: list[list[str]] = []
    blame = Group._blame

    def heard(self: Group, failures: Any, method: str) -> None:
        said.append([str(failures.by_rank[rank].cause) for rank in sorted(failures.by_rank)])
        blame(self, failures, method)

    monkeypatch.setattr(Group, "_blame", heard)
    plan = plan_launch(tiny(4, ('job.name="bad"', "checkpoint.every=1", "rl.kl_beta=0.1")), run_dir=tmp_path)
    world4.call("apply", lambda w: poison(w, 2, FIELDS[term], math.nan, 3))
    try:
        with pytest.raises(TrainingFailed) as caught:
            run_job(plan, reporter, world4)
    finally:
        world4.call("apply", cure)
    error = caught.value
    assert error.exit_code == 7
    assert error.rank == 2
    assert error.message.startswith(f"step 3: {term} of rank 2 is nan (")
    finite = [name for name in METRICS if f"{name} nan" not in error.message]
    assert sorted(finite) == sorted(set(METRICS) - {term})
    assert said == [[error.message] * 4]
    assert "the last checkpoint is of step 2" in error.hint
    checkpoints = tmp_path / "bad" / "checkpoints"
    assert [step for step, _ in list_steps(checkpoints)][-1] == 2
    assert list_partials(checkpoints) == []
    newest = list_steps(checkpoints)[-1][1]
    assert verify(newest) == []
    ranks = world4.call("apply", state_of)
    assert ranks == [tensors_of(newest)] * 4


def test_a_rank_that_fails_alone_in_mid_step_takes_no_finished_checkpoint_with_it(
    world4: Group, tiny: Any, reporter: Any, tmp_path: Path
) -> None:
    """Where nothing collective is open every rank still answers, so the save that was in flight is made complete."""

    def lame(worker: Any) -> None:
        role = type(worker.roles.rollout)
        worker.sound = original = role.sample

        def sample(self: Any, rows: Any, optimizer_steps: int, decoded: Any) -> Any:
            done = original(self, rows, optimizer_steps, decoded)
            if worker.rank == 3 and optimizer_steps == 2:
                raise MemoryError("no room for row 8")
            return done

        role.sample = sample

    def heal(worker: Any) -> None:
        type(worker.roles.rollout).sample = worker.sound

    run_job(plan_launch(tiny(1, ('job.name="before"',)), run_dir=tmp_path), reporter, world4)
    world4.call("apply", lame)
    plan = plan_launch(tiny(4, ('job.name="lame"', "checkpoint.every=1")), run_dir=tmp_path)
    try:
        with pytest.raises(TrainingFailed, match=r"rank 3 failed in .*MemoryError: no room for row 8") as caught:
            run_job(plan, reporter, world4)
    finally:
        with contextlib.suppress(TrainingFailed):
            world4.call("apply", heal)
    assert caught.value.rank == 3
    assert "the last checkpoint is of step 2" in caught.value.hint
    assert list_partials(tmp_path / "lame" / "checkpoints") == []
