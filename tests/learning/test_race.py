"""A run spends both budgets, is looked at where it reaches its marks, and is plain data at both ends."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from nftctl.errors import TrainingFailed
from nftctl.learning import race
from nftctl.learning.methods.method import Taken
from nftctl.learning.order import Budget, Order
from nftctl.learning.race import Clock, run

SETTINGS = {"lr": 1e-3, "timesteps": 2}


def order(profile: Any, method: str = "nft", budget: Budget = Budget(1e-6, 12, 3), **more: Any) -> Order:  # noqa: B008
    plain = profile("eval.samples_per_prompt=1").model_dump(mode="json")
    return Order(method, SETTINGS, 0, "tuning", budget, plain, **more)


@pytest.mark.parametrize(
    ("seconds", "samples", "spent", "marks"),
    [(0.0, 0, False, (0, 0)), (9.9, 400, False, (3, 4)), (10.0, 99, False, (4, 0)), (10.0, 400, True, (4, 4)),
     (99.0, 250, False, (4, 2)), (5.1, 901, False, (2, 4))],
)  # fmt: skip
def test_both_budgets_have_to_be_spent(seconds: float, samples: int, spent: bool, marks: tuple[int, int]) -> None:
    clock, budget = Clock(seconds=seconds, samples=samples), Budget(10.0, 400, 4)
    assert clock.spent(budget) == spent
    assert clock.marks(budget) == marks


def test_a_run_is_looked_at_at_its_marks_and_the_result_is_plain_data(profile: Any) -> None:
    told: list[Any] = []
    made = order(profile, guidances=(2.0,), number=3)
    result = run(Order.of(json.loads(json.dumps(asdict(made)))), told.append)
    assert json.loads(json.dumps(result)) == result
    assert (result["method"], result["settings"], result["seed"], result["number"]) == ("nft", SETTINGS, 0, 3)
    # Steps of 4 samples; the seconds are spent by the first of them.
    curve = result["curve"]
    assert told == curve
    assert [(p["samples"], p["samples_mark"], p["seconds_mark"]) for p in curve] == [
        (0, 0, 0), (4, 1, 3), (8, 2, None), (12, 3, None),
    ]  # fmt: skip
    assert curve[0]["train_reward"] is None
    assert 0 <= curve[1]["train_reward"] <= 1
    assert [look["guidance"] for look in result["guided"]] == [2.0]
    cost = result["cost"]
    assert (cost["steps"], cost["samples"]) == (3, 12)
    # 3 sampler steps and 2 times with the policy, and with old from the second step on; looks are not counted.
    assert cost["forwards_per_sample"] == pytest.approx(3 + 2 + 2 * 2 / 3)
    assert cost["backwards_per_sample"] == 2
    assert cost["seconds"] == pytest.approx(curve[-1]["seconds"])
    assert cost["rss_peak_mb"] > 50


class Ticking:
    """A method whose steps take what it is told, on a clock of its own; `fail` names the step that does."""

    def __init__(self, clock: list[float], fail: int = 99) -> None:
        self.clock, self.left, self.fail = clock, 0, fail

    def step(self, rows: Any) -> Taken:
        self.left += 1
        if self.left == self.fail:
            raise TrainingFailed("the gradient norm is nan")
        self.clock[0] += 4.0
        return Taken(0.5, 1, 0.0)


def ticking(monkeypatch: pytest.MonkeyPatch, fail: int = 99) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(race.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(race, "make", lambda *_: Ticking(clock, fail))
    look = race.Task.look

    def slow(self: Any, *a: Any, **k: Any) -> Any:
        clock[0] += 1000.0
        return look(self, *a, **k)

    monkeypatch.setattr(race.Task, "look", slow)
    return clock


def test_the_clock_stands_still_while_the_policy_is_looked_at(profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch)
    result = run(order(profile, budget=Budget(10.0, 8, 2)), lambda _: None)
    assert [(p["seconds"], p["seconds_mark"], p["samples"], p["samples_mark"]) for p in result["curve"]] == [
        (0.0, 0, 0, 0), (4.0, None, 4, 1), (8.0, 1, 8, 2), (12.0, 2, 12, None),
    ]  # fmt: skip
    assert result["cost"]["step_seconds"] == 4.0


def test_a_run_that_fails_says_so_and_keeps_what_it_had(profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, fail=2)
    result = run(order(profile, budget=Budget(10.0, 8, 2), guidances=(1.0,)), lambda _: None)
    assert result["failed"] == "the gradient norm is nan"
    assert [p["samples"] for p in result["curve"]] == [0, 4]
    assert result["guided"] == []
    assert result["cost"]["steps"] == 1


def test_guidance_trains_nothing(profile: Any) -> None:
    result = run(order(profile, method="guidance", guidances=(1.0, 3.0)), lambda _: None)
    assert result["curve"] == []
    assert [(look["guidance"], look["forwards"]) for look in result["guided"]] == [(1.0, 3), (3.0, 6)]
    assert result["cost"]["step_seconds"] is None
