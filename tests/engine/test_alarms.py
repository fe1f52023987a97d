"""Alarms by rows alone: each is raised by its own sign, by nothing else, once, and again by whoever reads the rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from nftctl.algorithm import advantage
from nftctl.engine import alarms
from nftctl.engine.alarms import ADVICE, QUIET_STEPS, RECENT, STEPS, Alarm, Watch
from nftctl.engine.observation import Observation
from nftctl.profile.schema import AlarmCode, Profile
from nftctl.run.rows import JsonLines
from tests.conftest import Quiet

Row = dict[str, Any]
Change = Callable[[int, Row], Row]

ROWS = 4


def profile(**rl: Any) -> Profile:
    old = {"update_every": 1, "decay": "linear"}
    return Profile.model_validate({"rl": {"old": old, **rl}, "data": {"rows_per_step": ROWS}})


def healthy(step: int, seed: int = 0) -> Row:
    """A row of a run that learns: prompts differ, and nothing else happens."""
    dice = random.Random(1000 * seed + step)
    return {
        "step": step,
        "train/reward_mean": 0.4 + 0.001 * step + dice.uniform(-0.1, 0.1),
        "train/loss": dice.uniform(1.0, 2.0),
        "train/grad_norm": dice.uniform(0.1, 0.3),
        "train/lr": 1e-3,
        "train/old_gap": 0.0 if step == 1 else 1e-9 * step,
        "train/advantage_clamped_low": 0.0,
        "train/advantage_clamped_high": dice.uniform(0.0, 0.2),
        "reward/std": 0.3,
        "reward/zero_spread_groups": float(dice.randrange(2)),
        "reward/dropped_groups": 0.0,
        "policy/distance": 0.01 * step**0.5,
        "images/saturation": dice.uniform(0.05, 0.1),
        "images/high_frequency": dice.uniform(0.08, 0.12),
        "images/diversity": dice.uniform(0.1, 0.14),
    }


def run(steps: int, change: Change = lambda step, row: {}, seed: int = 0) -> list[Row]:
    rows = [healthy(step, seed) for step in range(1, steps + 1)]
    return [row | change(row["step"], row) for row in rows]


def raised(rows: list[Row], settings: Profile | None = None) -> list[tuple[int, str]]:
    """(step, code) of every alarm of a run, in order."""
    watch = Watch(settings or profile())
    return [(row["step"], alarm.code) for n, row in enumerate(rows, 1) for alarm in watch.stepped(rows, n)]


def after(first: int, **values: float) -> Change:
    """From step `first` on, these values in place of the healthy ones."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return lambda step, row: named if step >= first else {}


def test_every_code_has_a_sign_and_advice() -> None:
    assert {*STEPS, "reward-hacking"} == set(get_args(AlarmCode)) == set(ADVICE)


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_none(seed: int) -> None:
    assert raised(run(300, seed=seed)) == []


CASES: dict[str, tuple[AlarmCode, int, Change]] = {
    # name: code, the step at which it is raised, and what is different
    "both ends clamp": ("clamp", 9, after(7, train__advantage_clamped_low=0.3, train__advantage_clamped_high=0.21)),
    "a step that teaches nothing": ("zero-spread", 7, after(7, reward__zero_spread_groups=float(ROWS))),
    "what is left teaches nothing": (
        "zero-spread", 3, after(3, reward__zero_spread_groups=3.0, reward__dropped_groups=1.0),
    ),
    "weights never move": ("policy-frozen", 1, after(1, policy__distance=0.0)),
    "weights stop": ("policy-frozen", 8, after(7, policy__distance=0.5)),
    "old is the policy": ("old-not-moving", 4, after(1, train__old_gap=0.0)),
    "white images": ("images-saturating", 12, after(8, images__saturation=0.3)),
    "white from the first update": ("images-saturating", 6, after(2, images__saturation=0.4)),
    "grain": ("images-noisy", 12, after(8, images__high_frequency=0.22)),
    "grain from the first update": ("images-noisy", 6, after(2, images__high_frequency=0.4)),
    "mush": ("images-noisy", 12, after(8, images__high_frequency=0.035)),
    "one image per prompt": ("diversity-collapse", 12, after(8, images__diversity=0.045)),
    "one image from the first update": ("diversity-collapse", 6, after(2, images__diversity=0.02)),
    "the loss jumps": ("loss-exploding", 30, after(30, train__loss=-12.0)),
    "the loss jumps at once": ("loss-exploding", 2, after(2, train__loss=12.0)),
    "gradients jump": ("grad-exploding", 30, after(30, train__grad_norm=4.0)),
    "gradients jump at once": ("grad-exploding", 2, after(2, train__grad_norm=4.0)),
    "the reward falls": ("reward-collapse", 24, after(20, train__reward_mean=0.02)),
    "the reward falls at once": ("reward-collapse", 6, after(2, train__reward_mean=0.02)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_sign_raises_its_own_alarm_and_no_other(case: str) -> None:
    code, step, change = CASES[case]
    found = raised(run(60, change))
    assert found[0][0] <= step
    assert {name for _, name in found} == {code}
    assert raised(run(found[0][0] - 1, change)) == []


def test_an_alarm_is_raised_once_until_its_sign_has_been_away() -> None:
    def change(step: int, row: Row) -> Row:
        flat = 10 <= step < 20 or step in (24, 40)
        return {"reward/zero_spread_groups": float(ROWS)} if flat else {}

    assert 24 - 20 < QUIET_STEPS <= 40 - 25
    assert raised(run(60, change)) == [(10, "zero-spread"), (40, "zero-spread")]


def test_a_copied_old_need_not_move(tmp_path: Path) -> None:
    still = run(30, after(1, train__old_gap=0.0))
    for old in ({"decay": "copy"}, {"decay": "delayed"}, {"decay": "constant"}, {"build_old": False}):
        settings = Profile.model_validate({"rl": {"old": {"update_every": 1, **old}}, "data": {"rows_per_step": ROWS}})
        assert raised(still, settings) == []
    kept = {"old": {"update_every": 1, "decay": "constant", "constant": 0.5}}
    assert raised(still, profile(**kept)) == [(4, "old-not-moving")]


def test_steps_without_a_signal_are_no_measure_of_gradients() -> None:
    def change(step: int, row: Row) -> Row:
        return {} if step % 4 == 1 else {"reward/zero_spread_groups": float(ROWS), "train/grad_norm": 1e-7}

    assert {code for _, code in raised(run(40, change))} == {"zero-spread"}


def test_a_policy_without_a_signal_is_not_called_frozen() -> None:
    flat = after(1, reward__zero_spread_groups=float(ROWS), policy__distance=0.0, train__old_gap=0.0)
    assert raised(run(30, flat)) == [(1, "zero-spread")]


def test_rows_that_lack_a_figure_raise_nothing_for_it() -> None:
    rows = run(40, after(1, images__saturation=1.0, policy__distance=0.0))
    for row in rows:
        del row["images/saturation"], row["images/high_frequency"], row["images/diversity"], row["policy/distance"]
    assert raised(rows) == []


def test_narrow_bounds_clamp_more_than_half_and_are_told_of(tmp_path: Path) -> None:
    """[0, 1, 0, 1] has advantages of -+0.9998 at group 4, far within +-5: only narrow bounds clamp them."""
    rewards, kept = torch.tensor([[0.0, 1.0, 0.0, 1.0]] * ROWS, dtype=torch.float64), torch.ones(ROWS, dtype=torch.bool)
    found = advantage.advantages(rewards, kept)
    assert found[0].tolist() == pytest.approx([-0.9998, 0.9998, -0.9998, 0.9998], abs=1e-5)
    for bound, expected in ((5.0, []), (1.0, []), (0.5, [(3, "clamp")])):
        r = advantage.optimality(found.clamp(-bound, bound), "linear", tau=0.5, high=bound)
        row = advantage.statistics(rewards, kept, found, r, low=-bound, high=bound)
        shares = {name: value for name, value in row.items() if "clamped" in name}
        assert raised(run(20, lambda step, row, shares=shares: shares)) == expected  # type: ignore[misc]


# ---- evaluations


def evaluations(*rewards: float, every: int = 10, **more: float) -> list[Row]:
    return [{"step": n * every, "eval/reward": reward, **more} for n, reward in enumerate(rewards)]


def rising(step: int, row: Row) -> Row:
    return {"train/reward_mean": 0.4 + 0.01 * step}


@pytest.mark.parametrize(
    ("held_out", "change", "codes"),
    [
        ((0.5, 0.6, 0.7), rising, []),
        ((0.5, 0.48, 0.5), rising, []),  # within a quarter of the rewards' spread of 0.3
        ((0.5, 0.4), rising, []),  # not risen by as much yet: 0.05 between the means of five rows
        ((0.5, 0.4, 0.3), rising, [20]),
        ((0.5, 0.6, 0.5, 0.45), rising, [30]),  # against the best, and not the first
        ((0.5, 0.4, 0.3), lambda step, row: {"train/reward_mean": 0.4}, []),  # both fall: no hacking
        ((0.5,), rising, []),
    ],
)
def test_hacking_is_a_training_reward_that_rises_while_the_held_out_falls(
    held_out: tuple[float, ...], change: Change, codes: list[int]
) -> None:
    rows, seen = run(40, change), evaluations(*held_out)
    watch, found = Watch(profile()), []
    for n, row in enumerate(seen, 1):
        found += [(row["step"], alarm.code) for alarm in watch.evaluated(rows[: row["step"]], seen[:n])]
    assert found == [(step, "reward-hacking") for step in codes]


@pytest.mark.parametrize(("spread", "found"), [(0.3, 1), (30.0, 0)])
def test_a_fall_is_measured_by_the_spread_of_who_scores_evaluations(spread: float, found: int) -> None:
    seen = [row | {"eval/std": spread} for row in evaluations(0.5, 0.4, 0.3)]
    assert len(Watch(profile()).evaluated(run(40, rising)[:20], seen)) == found


@pytest.mark.parametrize(("kl", "found"), [((0.0, 0.2, 0.4), 0), ((0.0, 0.3, 0.6), 1), ((0.9, 0.8, 0.7), 0)])
def test_hacking_is_also_a_policy_that_leaves_the_reference(kl: tuple[float, ...], found: int) -> None:
    rows = run(40, rising)
    seen = [row | {"eval/kl_distance": x} for row, x in zip(evaluations(0.5, 0.6, 0.7), kl, strict=True)]
    assert len(Watch(profile()).evaluated(rows[:20], seen)) == found


# ---- a run that goes on


@pytest.mark.parametrize("case", [*CASES, "healthy"])
def test_whoever_reads_the_rows_knows_what_stands(case: str) -> None:
    """At every step: what a straight run has standing, and what is raised after it, a resumed one has too."""
    rows = run(45, CASES[case][2] if case in CASES else lambda step, row: rising(step, row))
    seen = evaluations(0.6, 0.5, 0.2, 0.7, 0.1)
    straight, history = Watch(profile()), []
    for n, row in enumerate(rows, 1):
        found = straight.stepped(rows, n)
        known = [e for e in seen if e["step"] <= row["step"]]
        if known[-1]["step"] == row["step"]:
            found += straight.evaluated(rows[:n], known)
        history.append((found, dict(straight.standing)))
        assert Watch.of(profile(), rows[:n], known).standing == straight.standing
    assert any(found for found, _ in history) or case == "healthy"


def test_only_both_ends_of_a_long_run_are_looked_at() -> None:
    history = alarms.History.of(profile(), run(500), 400)
    assert [row["step"] for row in history.first] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in history.recent] == list(range(401 - RECENT, 401))


# ---- what is written


@pytest.fixture
def observation(tmp_path: Path) -> Callable[..., Observation]:
    def make(stop: list[str], *, enabled: bool = True) -> Observation:
        settings = profile().model_copy(update={"alarms": profile().alarms.model_copy(update={"stop": stop})})
        files = [JsonLines(tmp_path / name, keep_through=0) for name in ("metrics", "evaluations", "scores", "alarms")]
        board: Any = Board()
        return Observation(settings, Quiet(), *files, board, Watch(settings) if enabled else None)

    return make


class Board:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def scalars(self, row: Row) -> None:
        self.rows.append(row)


FLAT = after(3, reward__zero_spread_groups=float(ROWS))


def test_an_alarm_is_written_said_and_fatal_where_the_profile_says_so(
    observation: Callable[..., Observation], tmp_path: Path
) -> None:
    made = observation(["zero-spread"])
    for row in run(5, FLAT):
        made.step(row, [[0.5] * 4] * ROWS, 9)
        assert (made.fatal is None) is (row["step"] < 3)
    assert isinstance(made.fatal, Alarm)
    (noted,) = JsonLines(tmp_path / "alarms", keep_through=9).rows
    assert noted == {
        "step": 3, "alarm": "zero-spread", "message": made.fatal.message, "advice": ADVICE["zero-spread"],
        "value": 4.0, "limit": 4.0,
    }  # fmt: skip
    board: Any = made.board
    assert [row for row in board.rows if "alarms/zero-spread" in row] == [{"step": 3, "alarms/zero-spread": 4.0}]
    assert not any(key.startswith("alarms/") for row in made.metrics.rows for key in row)
    reporter: Any = made.reporter
    (warning,) = reporter.warnings
    assert warning == f"step 3: zero-spread: {made.fatal.message}; {ADVICE['zero-spread']}"


def test_without_a_word_about_it_no_alarm_ends_a_run(observation: Callable[..., Observation]) -> None:
    made = observation(["clamp"])
    for row in run(5, FLAT):
        made.step(row, [None] * ROWS, 9)
    assert made.fatal is None
    assert [row["step"] for row in made.alarms.rows] == [3]


def test_a_run_may_want_no_alarms_and_still_hears_of_dropped_groups(observation: Callable[..., Observation]) -> None:
    made = observation([], enabled=False)
    for row in run(5, lambda step, row: FLAT(step, row) | {"reward/dropped_groups": float(step == 4)}):
        made.step(row, [[0.5] * 4] * ROWS, 9)
    reporter: Any = made.reporter
    assert reporter.warnings == ["step 4: 1 groups dropped, their scores failed"]
    assert made.alarms.rows == []
    assert [row["step"] for row in made.scores.rows] == [1, 2, 3, 4, 5]
