"""The group's decision in a world of three: one matrix, one verdict, and nobody's failure stays his own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nftctl.algorithm.image_statistics import ImageLook
from nftctl.errors import RewardFailed
from nftctl.profile.schema import Profile
from tests.model.world import run_world
from tests.roles.samples import picture

RANKS = 3
REWARDS = np.array([[0.0, 1.0, 2.0], [5.0, 5.0, 8.0], [0.25, 0.25, 0.25], [-1.0, 0.0, 4.0]])
"""Row 2 has no spread."""
SCORES = REWARDS + np.arange(RANKS)
OTHER = 100.0 * np.array([[3.0, 1.0, 2.0], [0.0, 1.0, 0.0], [7.0, 7.0, 7.0], [1.0, 1.0, 1.0]])
"""Raw scores of the providers `a` and `b`; the latter has no spread in rows 2 and 3."""

SATURATION = np.array([[0.1, 0.2, 0.3], [0.0, 0.0, 0.6], [0.5, 0.5, 0.5], [1.0, 0.0, 0.0]])
DETAIL = 0.01 * np.arange(12.0).reshape(4, 3)
GREY = np.array([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.0, 0.25, 0.5], [1.0, 1.0, 1.0]])
"""What is seen in the images: two shares, and the level of a thumbnail of one shade."""

Row = dict[str, Any]


def settings(rl: Row | None = None, reward: Row | None = None) -> Profile:
    providers = [{"name": "a"}, {"name": "b", "weight": -2.0, "scale": 0.5, "clip": [20.0, 400.0]}]
    return Profile.model_validate({"rl": rl or {}, "reward": {"providers": providers, **(reward or {})}})


DROP = {"on_failure": "drop-group", "max_dropped_groups": 1}
CASES: dict[str, tuple[Profile, dict[tuple[int, int], str]]] = {
    # name: settings, and (row, rank) -> what went wrong there
    "sound": (settings(), {}),
    "sigmoid": (settings({"r_map": "sigmoid", "r_tau": 0.5}), {}),
    "narrow": (settings({"advantage_low": -0.5, "advantage_high": 1.0}), {}),
    "dropped": (settings(reward=DROP), {(1, 1): "HTTP 500 from there"}),
    "dropped-twice-in-a-row": (settings(reward=DROP), {(1, 1): "HTTP 500 from there", (1, 2): "it hangs"}),
    "global": (settings({"advantage_std": "global"}, DROP), {(1, 1): "HTTP 500 from there"}),
    "too-many": (settings(reward=DROP), {(3, 1): "HTTP 500 from there", (0, 2): "it hangs"}),
    "fail": (settings(), {(3, 2): "it hangs"}),
    "gdpo": (settings(reward={"aggregation": "gdpo"}), {}),
    "gdpo-dropped": (settings(reward=DROP | {"aggregation": "gdpo"}), {(1, 1): "HTTP 500 from there"}),
    "everything": (settings(reward=DROP | {"max_dropped_groups": 4}), {(n, 0): "é" * 800 for n in range(4)}),
}


def commits(rank: int, folder: str) -> None:
    """Every case, one after another, in one world."""
    import torch.distributed as dist

    from nftctl.roles.replay import ReplayRole

    seen: dict[str, Row] = {}
    for name, (profile, faults) in CASES.items():
        samples = [picture(0, number=40 + n) for n in range(len(REWARDS))]
        for n, sample in enumerate(samples):
            if name != "global":
                thumbnail = np.full((2, 2, 3), GREY[n, rank])
                sample.look = ImageLook(SATURATION[n, rank], DETAIL[n, rank], thumbnail)
            sample.failures = {"a": faults[n, rank]} if (n, rank) in faults else {}
            sample.reward = None if sample.failures else REWARDS[n, rank]
            if not sample.failures:
                sample.components = {"a": SCORES[n, rank], "a/even": float(n)} if rank < 2 else {"a": SCORES[n, rank]}
                sample.components["b"] = OTHER[n, rank]
                sample.latency_s = {"a": 0.25 + rank + n / 8, "b": 0.125}
        try:
            commit = ReplayRole(profile, ["a", "a/even", "a/nobody", "b"], dist.group.WORLD).commit(samples)
        except RewardFailed as error:
            seen[name] = {"error": error.message}
            continue
        seen[name] = {
            "kept": [t.row.number for t in commit.trajectories],
            "advantage": [t.advantage for t in samples],
            "optimality": [t.optimality for t in samples],
            "metrics": commit.metrics,
            "rewards": commit.rewards,
        }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Row]]:
    folder = tmp_path_factory.mktemp("replay")
    run_world(commits, RANKS, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture
def of(ranks: list[dict[str, Row]]) -> Callable[[str, str], np.ndarray]:
    """`of(case, key)`: a [rows, ranks] matrix put together from what each rank holds of its own samples."""
    return lambda case, key: np.array([rank[case][key] for rank in ranks]).T


def expected(rewards: np.ndarray) -> np.ndarray:
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, keepdims=True) + 1e-4)


def test_each_rank_gets_its_own_column_of_one_matrix(of: Any) -> None:
    wanted = expected(REWARDS)
    wanted[2] = 0.0
    np.testing.assert_allclose(of("sound", "advantage"), wanted, rtol=1e-12)
    np.testing.assert_allclose(of("sound", "optimality"), wanted / 10 + 0.5, rtol=1e-12)


def test_all_ranks_report_one_row_to_the_bit(ranks: list[dict[str, Row]]) -> None:
    for case in ("sound", "sigmoid", "narrow", "dropped", "global", "gdpo", "gdpo-dropped"):
        assert ranks[0][case]["metrics"] == ranks[1][case]["metrics"] == ranks[2][case]["metrics"]


def test_metrics_are_means_over_all_samples(ranks: list[dict[str, Row]]) -> None:
    row = ranks[0]["sound"]["metrics"]
    r = expected(REWARDS) / 10 + 0.5
    r[2] = 0.5
    assert row["train/reward_mean"] == pytest.approx(REWARDS.mean(), rel=1e-12)
    assert row["train/optimality_mean"] == pytest.approx(0.5, rel=1e-12)
    assert row["train/optimality_second_moment"] == pytest.approx((r**2).mean(), rel=1e-12)
    assert row["reward/std"] == pytest.approx(REWARDS.std(), rel=1e-12)
    assert row["reward/group_std"] == pytest.approx(REWARDS.std(axis=1).mean(), rel=1e-12)
    assert row["reward/dropped_groups"] == 0.0


def test_a_row_without_spread_teaches_nothing_and_is_counted(of: Any, ranks: list[dict[str, Row]]) -> None:
    assert of("sound", "advantage")[2].tolist() == [0.0] * RANKS
    assert of("sound", "optimality")[2].tolist() == [0.5] * RANKS
    assert of("sigmoid", "optimality")[2].tolist() == [0.5] * RANKS
    assert [rank["sound"]["metrics"]["reward/zero_spread_groups"] for rank in ranks] == [1.0] * RANKS
    assert [rank["sound"]["kept"] for rank in ranks] == [[40, 41, 42, 43]] * RANKS


def test_the_sigmoid_map(of: Any) -> None:
    a = of("sigmoid", "advantage")
    np.testing.assert_allclose(of("sigmoid", "optimality"), 1 / (1 + np.exp(-2 * a)), rtol=1e-12)


def test_narrow_bounds_clamp_and_say_how_much(of: Any, ranks: list[dict[str, Row]]) -> None:
    raw = expected(REWARDS)
    raw[2] = 0.0
    assert (raw < -0.5).sum() == 4
    assert (raw > 1.0).sum() == 3
    np.testing.assert_allclose(of("narrow", "advantage"), raw.clip(-0.5, 1.0), rtol=1e-12)
    np.testing.assert_allclose(of("narrow", "optimality"), raw.clip(-0.5, 1.0) / 2 + 0.5, rtol=1e-12)
    row = ranks[1]["narrow"]["metrics"]
    assert (row["train/advantage_clamped_low"], row["train/advantage_clamped_high"]) == (4 / 12, 3 / 12)
    assert row["train/advantage_mean"] == pytest.approx(raw.clip(-0.5, 1.0).mean(), rel=1e-12)


@pytest.mark.parametrize("case", ["dropped", "dropped-twice-in-a-row"])
def test_one_ranks_failure_drops_the_row_everywhere(case: str, of: Any, ranks: list[dict[str, Row]]) -> None:
    assert [rank[case]["kept"] for rank in ranks] == [[40, 42, 43]] * RANKS
    others = [0, 2, 3]
    np.testing.assert_array_equal(of(case, "advantage")[others], of("sound", "advantage")[others])
    row = ranks[0][case]["metrics"]
    assert row["reward/dropped_groups"] == 1.0
    assert row["reward/zero_spread_groups"] == 1.0
    assert row["train/reward_mean"] == pytest.approx(REWARDS[others].mean(), rel=1e-12)
    assert row["reward/std"] == pytest.approx(REWARDS[others].std(), rel=1e-12)


def test_a_global_spread_leaves_the_dropped_row_out(of: Any) -> None:
    others = REWARDS[[0, 2, 3]]
    wanted = (others - others.mean(axis=1, keepdims=True)) / (others.std() + 1e-4)
    np.testing.assert_allclose(of("global", "advantage")[[0, 2, 3]], wanted, rtol=1e-12, atol=1e-12)
    assert of("global", "advantage")[1].tolist() == [0.0] * RANKS


def test_components_are_means_over_the_kept_samples_that_have_them(ranks: list[dict[str, Row]]) -> None:
    sound, dropped = (ranks[0][case]["metrics"] for case in ("sound", "dropped"))
    assert sound["reward/a"] == pytest.approx(SCORES.mean(), rel=1e-12)
    assert dropped["reward/a"] == pytest.approx(SCORES[[0, 2, 3]].mean(), rel=1e-12)
    assert sound["reward/a/even"] == pytest.approx(1.5, rel=1e-12)
    assert dropped["reward/a/even"] == pytest.approx(5 / 3, rel=1e-12)
    assert "reward/a/nobody" not in sound


def test_each_provider_has_its_spreads_failures_and_latency(ranks: list[dict[str, Row]]) -> None:
    sound, dropped = (ranks[0][case]["metrics"] for case in ("sound", "dropped-twice-in-a-row"))
    for name, scores in (("a", SCORES), ("b", OTHER)):
        for row, kept in ((sound, scores), (dropped, scores[[0, 2, 3]])):
            assert row[f"reward/{name}/std"] == pytest.approx(kept.std(), rel=1e-12)
            assert row[f"reward/{name}/group_std"] == pytest.approx(kept.std(axis=1).mean(), rel=1e-12)
    assert (sound["reward/a/failures"], dropped["reward/a/failures"], dropped["reward/b/failures"]) == (0.0, 2.0, 0.0)
    # The slowest sample of the slowest rank, known to all of them.
    assert (sound["timer/reward/a"], sound["timer/reward/b"]) == (2.625, 0.125)
    assert not [key for key in sound if "std" in key and "even" in key]


def test_gdpo_weighs_what_was_normalised_in_its_own_group(of: Any, ranks: list[dict[str, Row]]) -> None:
    def unit(scores: np.ndarray) -> np.ndarray:
        spread = scores.std(axis=1, keepdims=True)
        return np.divide(scores - scores.mean(axis=1, keepdims=True), spread, out=0 * scores, where=spread > 0)

    clipped = np.clip(0.5 * OTHER, 20.0, 400.0)
    for case, kept in (("gdpo", [0, 1, 2, 3]), ("gdpo-dropped", [0, 2, 3])):
        total = unit(SCORES[kept]) - 2.0 * unit(clipped[kept])
        np.testing.assert_allclose(of(case, "advantage")[kept], (total - total.mean()) / total.std(), atol=1e-9)
        row = ranks[0][case]["metrics"]
        assert row["train/reward_mean"] == pytest.approx(REWARDS[kept].mean(), rel=1e-12)
        assert row["reward/zero_spread_groups"] == 0.0
    assert of("gdpo-dropped", "advantage")[1].tolist() == [0.0] * RANKS


def test_too_many_dropped_groups_end_the_step_on_every_rank_with_one_sentence(ranks: list[dict[str, Row]]) -> None:
    said = {rank["too-many"]["error"] for rank in ranks}
    assert said == {"2 of 4 groups have no scores (rows [40, 43]), 1 may be dropped: HTTP 500 from there"}


def test_without_the_policy_no_group_may_be_dropped(ranks: list[dict[str, Row]]) -> None:
    said = {rank["fail"]["error"] for rank in ranks}
    assert said == {"1 of 4 groups have no scores (rows [43]), 0 may be dropped: it hangs"}


def test_a_step_of_which_nothing_is_left_is_refused_however_many_may_go(ranks: list[dict[str, Row]]) -> None:
    said = {rank["everything"]["error"] for rank in ranks}
    assert len(said) == 1
    assert "4 of 4 groups have no scores" in said.pop()


def test_images_are_told_of_by_means_over_all_samples_of_all_ranks(ranks: list[dict[str, Row]]) -> None:
    """Those of a dropped group too: they were made. Pairs of a group differ by 1, 1, 0; not at all; 1/4, 1/2, 1/4."""
    for case in ("sound", "dropped"):
        row = ranks[2][case]["metrics"]
        assert row["images/saturation"] == pytest.approx(SATURATION.mean(), rel=1e-12)
        assert row["images/high_frequency"] == pytest.approx(DETAIL.mean(), rel=1e-12)
        assert row["images/diversity"] == pytest.approx((2 / 3 + 0 + 1 / 3 + 0) / 4, rel=1e-12)
    assert not [key for key in ranks[0]["global"]["metrics"] if key.startswith("images/")]


def test_every_reward_of_the_step_is_known_and_none_of_a_dropped_group(ranks: list[dict[str, Row]]) -> None:
    assert [rank["sound"]["rewards"] for rank in ranks] == [REWARDS.tolist()] * RANKS
    dropped = [None if n == 1 else row for n, row in enumerate(REWARDS.tolist())]
    assert [rank["dropped"]["rewards"] for rank in ranks] == [dropped] * RANKS
