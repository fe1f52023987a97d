"""Measured steps: parts that add up, counts that are the plan's, the stock forward beside ours, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nftctl.engine import bench
from nftctl.engine.bench import ONE_RANK, Step, Wishes, derive, figures, run_bench
from nftctl.engine.plan import JobPlan, plan_launch
from nftctl.engine.worker import Worker
from nftctl.roles.timing import StepTimes

KEYS = [
    "profile", "label", "ranks", "devices", "versions", "settings", "warm", "step", "rollout", "training", "parts",
    "beside", "forwards", "gathers", "gpu_peak_gb", "built", "naive",
]  # fmt: skip
NESTED = {
    "step": [
        "seconds", "all_seconds", "parts_seconds", "floor_seconds", "ratio", "samples_per_second",
        "samples_per_second_per_rank", "mfu", "outside_denoiser_share",
    ],
    "rollout": [
        "forwards", "executed", "ms_per_forward", "ms_with_solver", "floor_ms", "ratio", "ratio_with_solver",
    ],
    "training": ["pairs", "ms_per_pair", "floor_ms", "ratio"],
    "forwards": ["planned", "executed"],
    "gathers": ["calls", "bytes", "before_calls", "before_bytes"],
    "naive": [
        "what", "extrapolated_from", "ms_per_forward", "ms_per_pair", "rollout_seconds", "step_seconds",
        "forward_ratio", "pair_ratio", "step_ratio", "units", "gathers_per_call", "kept_before_gb", "peak_gb",
        "relative_error",
    ],
}  # fmt: skip
"""The document's keys, on which scripts rely."""


class Alone:
    """A group of one rank that lives in this process."""

    device, whole = "cpu", True

    def __init__(self) -> None:
        self.worker = Worker(0)
        self.worker.join(1, *self.worker.host_store(1, 60.0), "cpu", 60.0)

    def call(self, method: str, *given: Any) -> list[Any]:
        return [getattr(self.worker, method)(*given)]

    def call_one(self, rank: int, method: str, *given: Any) -> Any:
        return self.call(method, *given)[rank]


@pytest.fixture
def alone() -> Iterator[Alone]:
    group = Alone()
    yield group
    group.worker.close()
    dist.destroy_process_group()


@pytest.fixture
def planned(tiny: Any, tmp_path: Path) -> Callable[..., JobPlan]:
    """The tiny profile's plan with four rows, guidance 3 and a copied old, for that many ranks."""

    def make(ranks: int, *sets: str) -> JobPlan:
        size = f"rl.group_size={max(2, ranks)}"
        resolved = tiny(2, (size, "rl.sample_steps=10", "rl.guidance=3.0", 'rl.old.decay="copy"', *sets))
        return derive(plan_launch(resolved, run_dir=tmp_path / "runs"), ranks)

    return make


def check_sums(document: dict[str, Any]) -> None:
    """On every rank the parts are the whole step, and the shares a whole."""
    parts, wall = document["parts"], document["step"]["parts_seconds"]
    for rank in range(document["ranks"]):
        assert sum(part["by_rank"][rank] for part in parts) == pytest.approx(wall, rel=1e-9)
    assert sum(part["share"] for part in parts) == pytest.approx(1.0)
    assert all(second >= 0 for part in parts for second in part["by_rank"])
    denoiser = sum(part["seconds"] for part in parts if part["name"] in bench.DENOISER)
    assert document["step"]["outside_denoiser_share"] == pytest.approx(1 - denoiser / wall)


def test_one_rank_is_measured_and_labelled(
    alone: Alone, planned: Callable[..., JobPlan], reporter: Any, tmp_path: Path
) -> None:
    plan = planned(1, "rl.kl_beta=0.1")
    assert plan.profile.ranks == 1
    document = run_bench(plan, Wishes(steps=2, warm=1, naive=True), tmp_path, reporter, alone)  # type: ignore[arg-type]
    assert list(document) == KEYS
    for key, names in NESTED.items():
        assert list(document[key]) == names
    assert (document["ranks"], document["label"]) == (1, ONE_RANK)
    assert len(document["step"]["all_seconds"]) == 2
    # Four rows, ten steps of two branches; four timesteps of each row, by policy and reference.
    assert document["forwards"] == {"planned": 4 * 10 * 2 + 4 * 4 * 2, "executed": 4 * 10 * 2 + 4 * 4 * 2}
    assert document["rollout"]["forwards"] == document["rollout"]["executed"] == 80
    assert document["training"]["pairs"] == 16
    assert set(document["gathers"].values()) == {0}  # nobody to gather from
    check_sums(document)
    names = [part["name"] for part in document["parts"]]
    assert [name for name in bench.PARTS if name in names] == names
    assert {"sample/forward", "sample/decode", "prepare/forward", "train/backward", "train/optimizer"} <= set(names)
    floors = {part["name"]: part["floor_seconds"] for part in document["parts"]}
    assert floors["train/backward"] == pytest.approx(floors["train/forward"])  # adapters
    assert floors["prepare/forward"] == pytest.approx(floors["train/forward"])  # the reference, once a pair
    errors = document["naive"]["relative_error"]
    assert errors["ours_to_stock"] <= 1e-5
    assert errors["ours_to_float32"] <= 1e-5
    assert errors["stock_to_float32"] == 0.0
    assert document["naive"]["gathers_per_call"] == 0
    assert not (tmp_path / "runs").exists()
    assert not hasattr(torch.autograd.backward, "__wrapped__")


@pytest.mark.ray
def test_four_ranks_gather_once(world4: Any, planned: Callable[..., JobPlan], reporter: Any, tmp_path: Path) -> None:
    document = run_bench(planned(4), Wishes(steps=1, warm=1), tmp_path, reporter, world4)
    assert (document["ranks"], document["label"], document["naive"]) == (4, "", None)
    assert document["forwards"] == {"planned": 96, "executed": 96}
    check_sums(document)
    gathers = document["gathers"]
    assert (gathers["calls"], gathers["bytes"]) == (0, 0)  # frozen weights stay from step to step
    assert gathers["before_calls"] == 6  # four layers, the timestep's embedder, the rest
    # Shards are padded to equal length, so a gathered base may be a little larger than the base.
    parameters = 4 * document["built"]["base_parameters"]
    assert parameters <= gathers["before_bytes"] <= 1.05 * parameters
    assert not (tmp_path / "runs").exists()
    assert not any(world4.call("apply", lambda worker: hasattr(torch.autograd.backward, "__wrapped__")))


@pytest.mark.ray
@pytest.mark.soak
def test_on_four_ranks_the_stock_forward_gathers_every_layer_each_time(
    world4: Any, planned: Callable[..., JobPlan], reporter: Any, tmp_path: Path
) -> None:
    naive = run_bench(planned(4), Wishes(steps=1, warm=0, naive=True), tmp_path, reporter, world4)["naive"]
    assert naive["gathers_per_call"] == naive["units"] == 5  # four layers and the timestep's embedder
    assert naive["relative_error"]["ours_to_stock"] <= 1e-5


def times(scale: float) -> StepTimes:
    seconds = {"sample/forward": 4 * scale, "between": 1 * scale, "prepare/policy": scale, "train/backward": 2 * scale}
    return StepTimes(seconds, {}, {"sample/forward": 160, "prepare/policy": 16}, 6, 100)


def test_figures_are_those_of_the_formulas(planned: Callable[..., JobPlan]) -> None:
    plan = planned(2)
    row = {"forwards/planned": 96.0, "forwards/executed": 96.0, "system/gpu_peak_train_gb": 7.0}
    steps = [Step(4 * i, seconds, row, [times(1.0), times(0.5)]) for i, seconds in enumerate((10.0, 30.0, 12.0))]
    need = {
        "image_tokens": 16, "prompt_tokens": [5], "negative_tokens": 3, "rollout_forwards": 80, "rollout_flops": 8e9,
        "pairs": 16, "row_flops": 1e8, "pair_flops": 2e8,
    }  # fmt: skip
    facts = [{"device": "x", "matmul_flops_per_second": rate, "matmul_dtype": "float32"} for rate in (1e10, 2e10)]
    document = figures(plan, Wishes(3), steps, facts, [[need] * 3] * 2)
    step, rollout, training = document["step"], document["rollout"], document["training"]
    assert (step["seconds"], step["parts_seconds"]) == (12.0, 12.0)
    # 8e9 + 16 x 2e8 operations at 1e10 and at 2e10 a second.
    assert step["floor_seconds"] == pytest.approx((1.12 + 0.56) / 2)
    assert step["mfu"] == pytest.approx(0.84 / 12)
    assert step["samples_per_second"] == pytest.approx(4 * 2 / 12)
    assert step["outside_denoiser_share"] == pytest.approx(1 - (7 + 3.5) / 2 / 12)
    assert rollout["ms_per_forward"] == pytest.approx(1e3 * 3 / 80)
    assert rollout["floor_ms"] == pytest.approx(1e3 * (0.8 + 0.4) / 2 / 80)
    assert training["ms_per_pair"] == pytest.approx(1e3 * (3 + 1.5) / 2 / 16)
    assert training["floor_ms"] == pytest.approx(1e3 * (0.02 + 0.01) / 2)
    driver = document["parts"][-1]
    assert driver["name"] == bench.DRIVER
    assert driver["by_rank"] == pytest.approx([12.0 - 7.0, 12.0 - 3.5])
    assert document["gpu_peak_gb"] == {"train": 7.0}
    assert document["gathers"] == {"calls": 6, "bytes": 100}


def test_only_one_rank_is_derived(planned: Callable[..., JobPlan]) -> None:
    plan = planned(2)
    assert derive(plan, 2) is plan
    assert derive(plan, 1).profile.rl.group_size == 1
    assert plan.profile.rl.group_size == 2
