"""The order of a whole comparison: trials first, then the chosen settings with seeds and prompts that no trial saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nftctl.errors import ProfileRefused, UsageRefused
from nftctl.learning import compare
from nftctl.learning.compare import MARKS, Plan
from nftctl.learning.order import Order
from nftctl.learning.table import tables
from nftctl.learning.trials import GRIDS, GUIDANCES, NAMES, settings_of
from tests.learning.test_summary import look, point


class Paper:
    """Makes no run: a reward is what `reward_of` says of the order."""

    def __init__(self, reward_of: Callable[[Order], float]) -> None:
        self.reward_of = reward_of
        self.asked: list[list[Order]] = []

    def make(self, orders: Sequence[Order], finished: Callable[[Order, dict[str, Any]], None]) -> list[dict[str, Any]]:
        self.asked.append(list(orders))
        results = [self.result(order) for order in orders]
        for order, result in zip(orders, results, strict=True):
            finished(order, result)
        return results

    def result(self, order: Order) -> dict[str, Any]:
        marks, reward = order.budget.marks, self.reward_of(order)
        curve = [point(0.5, (0, 0), 0.0, 0), point(reward, (marks, marks), 9.0, 8)]
        guided = [look(g / 10, guidance=g) for g in order.guidances]
        costs = ("step_seconds", "step_cpu_seconds", "forwards_per_sample", "backwards_per_sample", "rss_peak_mb")
        return {
            "method": order.method, "settings": order.settings, "seed": order.seed, "number": order.number,
            "curve": [] if order.method == "guidance" else curve, "guided": guided, "failed": "",
            "cost": dict.fromkeys((*costs, "steps", "seconds", "samples"), 1.0),
        }  # fmt: skip


def plan(**more: Any) -> Plan:
    return Plan(**({"methods": NAMES, "seeds": 2, "trials": 3, "seconds": 9.0, "samples": 8} | more))


def test_trials_are_made_and_judged_before_anything_is_tested(profile: Any) -> None:
    # The last trial of each method is the best one.
    runner, said = Paper(lambda order: 0.6 + (order.number or 0) / 100), []
    settings = profile("rl.sample_steps=8")
    found = compare.compare(settings, "mine", plan(), runner, said.append)
    tuning, final = runner.asked
    assert {order.split for order in tuning} == {"tuning"}
    assert {order.split for order in final} == {"test"}
    assert not {order.seed for order in tuning} & {order.seed for order in final}
    # Method by method in turns, so that all meet the same company.
    names = [order.method for order in tuning]
    assert names == [*GRIDS, *GRIDS, *GRIDS, "guidance"]
    assert [order.method for order in final] == [*GRIDS, "control", "guidance"] * 2
    assert [order.seed for order in final] == [0] * 5 + [1] * 5
    chosen = {method: settings_of(method, 3)[2] for method in GRIDS}
    for order in final:
        if order.method != "guidance":
            assert order.settings == chosen["nft" if order.method == "control" else order.method]
            # Of the three that were tried the best; 5 and 7 were not among them.
            assert order.guidances == (3.0,)
    assert final[4].guidances == tuple(sorted(GUIDANCES))
    assert {order.budget.marks for order in final} == {MARKS}
    assert {(order.budget.seconds, order.budget.samples) for order in tuning + final} == {(9.0, 8)}
    assert found["chosen"]["nft"] == {"settings": chosen["nft"], "trial": 2}
    assert found["chosen"]["guidance"] == {"settings": {"guidance": 3.0}}
    assert [trial["merit"] for trial in found["trials"][-4:]] == pytest.approx([0.62, 0.62, 0.62, None])
    assert found["summary"]["methods"]["flow-grpo"]["at"]["seconds"]["reward"]["mean"] == pytest.approx(0.6)
    assert len(found["plan"]["prompts"]["tuning"]) == 8
    # 5 and 7 are tested like the others, and no trials.
    assert tuning[-1].guidances == GUIDANCES[:3]
    assert "[tuning 10/10] guidance seed 1000: at most 0.300, with 3" in said
    assert "[test 1/10] nft seed 0 lr 0.0003, timesteps 8: 0.500 -> 0.600 in 2 steps, 8 samples, 9 s" in said


def test_every_run_has_the_same_rows_groups_and_adapter(profile: Any) -> None:
    runner = Paper(lambda _: 0.6)
    compare.compare(profile("rl.sample_steps=8"), "mine", plan(seeds=1, trials=1), runner, lambda _: None)
    orders = [order for asked in runner.asked for order in asked]
    assert all(order.profile == orders[0].profile for order in orders)


def test_with_one_trial_only_what_was_tried_is_marked(profile: Any) -> None:
    runner = Paper(lambda _: 0.6)
    asked = plan(seeds=1, trials=1, methods=("nft", "guidance"))
    found = compare.compare(profile("rl.sample_steps=8"), "mine", asked, runner, lambda _: None)
    assert list(tables(found)[-1].rows) == [
        ("DiffusionNFT", "lr 0.001, timesteps 4", "0.600 (chosen)"),
        ("guidance", "1", "0.100 (chosen)"),
    ]
    # All six are tested all the same.
    assert list(found["summary"]["guidance"]) == ["1", "1.5", "2", "3", "5", "7"]


def test_a_subset_is_compared_alone(profile: Any) -> None:
    runner = Paper(lambda _: 0.6)
    settings = profile("rl.sample_steps=8")
    found = compare.compare(settings, "mine", plan(methods=("flow-grpo",), seeds=1), runner, lambda _: None)
    assert [[order.method for order in asked] for asked in runner.asked] == [["flow-grpo"] * 3, ["flow-grpo"]]
    assert runner.asked[1][0].guidances == ()
    assert list(found["summary"]["methods"]) == ["flow-grpo"]
    assert found["summary"]["guidance"] == {}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (("nft", "ppo"), "no method 'ppo'"),
        ((), "no method"),
        (("control",), "control takes the settings of nft"),
        (("nft", "guidance", "nft"), "the method 'nft' is named twice"),
    ],
)
def test_methods_that_mean_nothing_are_refused(methods: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageRefused, match=message):
        plan(methods=methods)


def test_profiles_are_refused_before_a_run_is_made(profile: Any) -> None:
    runner = Paper(lambda _: 0.6)
    for sets in (("rl.sample_steps=3",), ("rl.sample_steps=8", 'reward.aggregation="gdpo"'),
                 ("rl.sample_steps=8", 'model.train="full"')):  # fmt: skip
        with pytest.raises(ProfileRefused):
            compare.compare(profile(*sets), "mine", plan(), runner, lambda _: None)
    assert runner.asked == []
