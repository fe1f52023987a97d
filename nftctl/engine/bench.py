"""`nftctl bench`: true training steps on this hardware, where their time goes, and the arithmetic's floor beside it.

Starts the ranks as a run does and takes the loop's own steps, but keeps no run folder, no checkpoint, no evaluation.
Figures are of the step with the median time, whose parts add up to it; the steps are all in the document. Refuses
figures of ranks that did not finish: a failure ends as that of a run does.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nftctl.engine import bench_rank, services
from nftctl.engine.cluster import find_cluster
from nftctl.engine.group import Group
from nftctl.engine.loop import ranks_of, spec_of, take_step
from nftctl.engine.plan import JobPlan, plan_versions
from nftctl.engine.reporter import Reporter

if TYPE_CHECKING:
    from nftctl.roles.timing import StepTimes

BETWEEN = "between"
"""What a rank calls the time between two of its stages."""
ONE_RANK = "one rank's work, not an NFT run"
DRIVER = "driver"
"""The part of a step that no rank saw: the first and the last message, and what lies between the stages."""
PARTS = {
    "sample/prompts": "prompt encoding",
    "sample/gather": "gather of weights",
    "sample/forward": "rollout: denoiser forwards",
    "sample/decode": "decode",
    "sample/submit": "hand-over to the scorer",
    "sample/rest": "rollout: noise, solver, copies",
    "prepare/forward": "old and reference forwards",
    "prepare/rest": "training draws",
    "reward/rest": "wait for rewards",
    "commit/rest": "advantages",
    "train/forward": "policy forwards",
    "train/backward": "backward",
    "train/optimizer": "reduction and optimizer",
    "train/rest": "loss and metrics",
    DRIVER: "driver, messages, waiting",
}
"""What the parts of a step are called, in the order of a step; others keep their own names."""
SAME = {"prepare/policy": "train/forward", "train/policy": "train/forward"}
"""Spans of a rank -> the part that they belong to: the policy's forward counts as one, before the rewards or after."""
DENOISER = ("sample/forward", "prepare/forward", "train/forward", "train/backward")
"""Parts that are the denoiser's own work."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """How much to measure: steps before the measured ones, measured steps, and whether against the naive way."""

    steps: int = 5
    warm: int = 2
    naive: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step: the driver's wall time, its metrics row, and each rank's own times."""

    cursor: int
    seconds: float
    row: Mapping[str, Any]
    ranks: Sequence[StepTimes]

    def parts(self, rank: int) -> dict[str, float]:
        """Seconds by `stage/part` on a rank, and what the driver took besides: the sum is the wall time."""
        seconds: dict[str, float] = {}
        for name, value in self.ranks[rank].seconds.items():
            if name != BETWEEN:
                part = SAME.get(name, name)
                seconds[part] = seconds.get(part, 0.0) + value
        return {**seconds, DRIVER: self.seconds - sum(seconds.values())}


def derive(plan: JobPlan, ranks: int) -> JobPlan:
    """The plan with one rank, which no profile may ask for; `ranks` other than 1 are the profile's own business."""
    if ranks != 1:
        return plan
    profile = plan.profile
    grid = profile.grid.model_copy(update={"ranks": None, "shapes": None})
    rl = profile.rl.model_copy(update={"group_size": 1})
    return replace(plan, profile=profile.model_copy(update={"rl": rl, "grid": grid}))


def run_bench(
    plan: JobPlan, wishes: Wishes, logs: Path, reporter: Reporter, group: Group | None = None
) -> dict[str, Any]:
    """Measure and return the document. Starts and ends its own ranks unless a started `group` is lent.

    Raises as `run_job` does: EnvironmentUnfit, RewardFailed, TrainingFailed.
    """
    cluster = find_cluster(plan.profile, os.environ, reporter.note) if group is None else None
    http = services.ask_http(plan.profile, plan.revisions)
    with contextlib.ExitStack() as stack:
        embedded = stack.enter_context(services.embedded(plan.profile, plan.revisions, logs))
        answered = [(http | embedded)[p.name] for p in plan.profile.reward.providers]
        if group is None:
            reporter.note(f"starting Ray with {_count(plan.profile.ranks, 'rank')}")
            group = stack.enter_context(ranks_of(plan, logs, cluster, reporter))
        began = time.perf_counter()
        built = group.call("build", spec_of(plan, answered, logs))[0]
        reporter.note(f"built on {group.device} in {time.perf_counter() - began:.1f} s")
        stack.callback(_quietly, group, bench_rank.detach)
        return _measure(plan, wishes, group, reporter, built)


def _quietly(group: Group, look: Any) -> None:
    """Clean up on ranks that are still there."""
    if group.whole:
        group.call("apply", look)


def _measure(
    plan: JobPlan, wishes: Wishes, group: Group, reporter: Reporter, built: Mapping[str, Any]
) -> dict[str, Any]:
    group.call("apply", bench_rank.attach)
    early: list[list[StepTimes]] = []
    if wishes.naive:
        early.append(group.call("apply", partial(bench_rank.probe, cursor=plan.state.cursor)))
    steps = _steps(plan, wishes, group, reporter)
    early += [list(step.ranks) for step in steps[: wishes.warm]]
    steps = steps[wishes.warm :]
    reporter.note("measuring the device's matrix products")
    facts = group.call("apply", bench_rank.facts)
    needs = group.call("apply", partial(bench_rank.arithmetic, cursors=[step.cursor for step in steps]))
    document = figures(plan, wishes, steps, facts, needs)
    document["gathers"] |= {
        "before_calls": max(sum(times[rank].gathers for times in early) for rank in range(len(facts))),
        "before_bytes": max(sum(times[rank].gathered_bytes for times in early) for rank in range(len(facts))),
    }
    document["built"] = {key: built[key] for key in ("base_parameters", "trained_parameters", "compiled_layers")}
    document["naive"] = _naive(plan, group, reporter, document) if wishes.naive else None
    return document


def _steps(plan: JobPlan, wishes: Wishes, group: Group, reporter: Reporter) -> list[Step]:
    """Warm-up and measured steps, in order."""
    state, taken = plan.state, []
    for number in range(wishes.warm + wishes.steps):
        cursor, began = state.cursor, time.perf_counter()
        row, state, _ = take_step(group, state)
        seconds = time.perf_counter() - began
        times = group.call("apply", bench_rank.read)
        kind = "warm-up" if number < wishes.warm else "step"
        reporter.note(f"{kind} {number + 1} of {wishes.warm + wishes.steps}: {seconds:.3f} s")
        taken.append(Step(cursor, seconds, row, times))
    return taken


def figures(
    plan: JobPlan,
    wishes: Wishes,
    steps: Sequence[Step],
    facts: Sequence[Mapping[str, Any]],
    needs: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """The document: every figure, from steps, the ranks' devices, and the arithmetic by rank and step."""
    ranks, rows = len(facts), plan.profile.data.rows_per_step
    rates = [float(fact["matmul_flops_per_second"]) for fact in facts]
    order = sorted(range(len(steps)), key=lambda i: steps[i].seconds)
    chosen = order[(len(order) - 1) // 2]
    step, need = steps[chosen], [each[chosen] for each in needs]
    seconds = statistics.median(s.seconds for s in steps)
    floors = [_floors(step, need[r], rates[r], r) for r in range(ranks)]
    parts = _parts(step, floors)
    inside = sum(p["seconds"] for p in parts if p["name"] in DENOISER)
    step_floor = _mean([sum(each.values()) for each in floors])
    return {
        "profile": plan.profile_name,
        "label": ONE_RANK if ranks == 1 else "",
        "ranks": ranks,
        "devices": [dict(fact) for fact in facts],
        "versions": plan_versions(),
        "settings": _settings(plan, need[0]),
        "warm": wishes.warm,
        "step": {
            "seconds": seconds,
            "all_seconds": [s.seconds for s in steps],
            "parts_seconds": step.seconds,
            "floor_seconds": step_floor,
            "ratio": step.seconds / step_floor,
            "samples_per_second": rows * ranks / seconds,
            "samples_per_second_per_rank": rows / seconds,
            "mfu": step_floor / step.seconds,
            "outside_denoiser_share": 1.0 - inside / step.seconds,
        },
        "rollout": _rollout(steps, needs, rates),
        "training": _training(steps, needs, rates),
        "parts": parts,
        "beside": _beside(step),
        "forwards": {"planned": int(step.row["forwards/planned"]), "executed": int(step.row["forwards/executed"])},
        "gathers": {
            "calls": max(times.gathers for times in step.ranks),
            "bytes": max(times.gathered_bytes for times in step.ranks),
        },
        "gpu_peak_gb": {
            key.removeprefix("system/gpu_peak_").removesuffix("_gb"): value
            for key, value in step.row.items()
            if key.startswith("system/gpu_peak_")
        },
    }


def _settings(plan: JobPlan, need: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how long a step takes."""
    rl, model = plan.profile.rl, plan.profile.model
    return {
        "family": plan.family,
        "base": str(plan.base),
        "dtype": model.dtype,
        "train": model.train,
        "rollout_precision": rl.rollout_precision,
        "height": model.height,
        "width": model.width,
        "rows_per_step": plan.profile.data.rows_per_step,
        "sample_steps": rl.sample_steps,
        "guidance": rl.guidance,
        "timesteps_per_sample": rl.timesteps_per_sample,
        "updates_per_rollout": rl.updates_per_rollout,
        "image_tokens": need["image_tokens"],
        "prompt_tokens": need["prompt_tokens"],
        "negative_tokens": need["negative_tokens"],
    }


def _floors(step: Step, need: Mapping[str, Any], rate: float, rank: int) -> dict[str, float]:
    """Seconds that the arithmetic of each of the denoiser's parts takes at the measured rate."""
    pairs, early = need["pairs"], step.ranks[rank].rows.get("prepare/forward", 0)
    forward = need["row_flops"] * pairs
    return {
        "sample/forward": need["rollout_flops"] / rate,
        "prepare/forward": need["row_flops"] * early / rate,
        "train/forward": forward / rate,
        "train/backward": (need["pair_flops"] * pairs - forward) / rate,
    }


def _parts(step: Step, floors: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Mean over ranks, in the order of a step; each rank's own beside it."""
    by_rank = [step.parts(rank) for rank in range(len(step.ranks))]
    names = [*PARTS, *dict.fromkeys(name for each in by_rank for name in each if name not in PARTS)]
    parts = []
    for name in names:
        seconds = [each.get(name, 0.0) for each in by_rank]
        if not any(seconds):
            continue
        floor = _mean([each[name] for each in floors]) if name in floors[0] else None
        parts.append(
            {
                "name": name,
                "title": PARTS.get(name, name),
                "seconds": _mean(seconds),
                "by_rank": seconds,
                "share": _mean(seconds) / step.seconds,
                "floor_seconds": floor,
                "ratio": _mean(seconds) / floor if floor else None,
            }
        )
    return parts


def _beside(step: Step) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for times in step.ranks for name in times.beside)
    return [{"name": name, "by_rank": [times.beside.get(name, 0.0) for times in step.ranks]} for name in names]


def _rollout(
    steps: Sequence[Step], needs: Sequence[Sequence[Mapping[str, Any]]], rates: Sequence[float]
) -> dict[str, Any]:
    """Milliseconds of a row's forward in sampling, medians over steps of the mean over ranks.

    `ms_with_solver` also counts all else of sampling but prompts, gathers, decode and hand-over.
    """
    alone, whole, floor, count = [], [], [], 0
    for i, step in enumerate(steps):
        of_rank = [step.parts(rank) for rank in range(len(rates))]
        count = needs[0][i]["rollout_forwards"]
        forward = _mean([parts.get("sample/forward", 0.0) for parts in of_rank])
        alone.append(forward / count)
        whole.append((forward + _mean([parts.get("sample/rest", 0.0) for parts in of_rank])) / count)
        floor.append(_mean([needs[r][i]["rollout_flops"] / rates[r] for r in range(len(rates))]) / count)
    ms, low = 1e3 * statistics.median(alone), 1e3 * statistics.median(floor)
    with_solver = 1e3 * statistics.median(whole)
    return {
        "forwards": count,
        "executed": max(times.rows.get("sample/forward", 0) for times in steps[-1].ranks),
        "ms_per_forward": ms,
        "ms_with_solver": with_solver,
        "floor_ms": low,
        "ratio": ms / low,
        "ratio_with_solver": with_solver / low,
    }


def _training(
    steps: Sequence[Step], needs: Sequence[Sequence[Mapping[str, Any]]], rates: Sequence[float]
) -> dict[str, Any]:
    """Milliseconds of a pair's forward and backward, medians over steps of the mean over ranks."""
    took, floor, pairs = [], [], 0
    for i, step in enumerate(steps):
        pairs = needs[0][i]["pairs"]
        of_rank = [step.parts(rank) for rank in range(len(rates))]
        took.append(_mean([p.get("train/forward", 0.0) + p.get("train/backward", 0.0) for p in of_rank]) / pairs)
        floor.append(_mean([needs[r][i]["pair_flops"] / rates[r] for r in range(len(rates))]))
    ms, low = 1e3 * statistics.median(took), 1e3 * statistics.median(floor)
    return {"pairs": pairs, "ms_per_pair": ms, "floor_ms": low, "ratio": ms / low}


def _naive(plan: JobPlan, group: Group, reporter: Reporter, document: Mapping[str, Any]) -> dict[str, Any]:
    """The same step by stock forwards: measured by the forward, the rest of the step taken from ours."""
    reporter.note("loading the stock transformer in place of ours")
    ranks = group.call("apply", bench_rank.compare)
    reporter.note("loading it once more, in float32, as the reference")
    exact = group.call("apply", bench_rank.reference)[0]
    forward = _mean([statistics.median(rank["forward_s"]) for rank in ranks])
    pair = _mean([statistics.median(rank["pair_s"]) for rank in ranks])
    parts = {part["name"]: part["seconds"] for part in document["parts"]}
    early = document["forwards"]["executed"] - document["rollout"]["forwards"] - document["training"]["pairs"]
    ours = document["step"]["parts_seconds"]
    rest = ours - sum(parts.get(name, 0.0) for name in DENOISER)
    sampling = document["rollout"]["forwards"] * forward
    step = sampling + max(early, 0) * forward + document["training"]["pairs"] * pair + rest
    return {
        "what": "diffusers' unmodified forward as its pipeline calls it, one sample at a time"
        + (", every layer resharded behind its use" if len(ranks) > 1 else ""),
        "extrapolated_from": f"{len(ranks[0]['forward_s'])} sampler steps and {len(ranks[0]['pair_s'])} pairs",
        "ms_per_forward": 1e3 * forward,
        "ms_per_pair": 1e3 * pair,
        "rollout_seconds": sampling,
        "step_seconds": step,
        "forward_ratio": 1e3 * forward / document["rollout"]["ms_per_forward"],
        "pair_ratio": 1e3 * pair / document["training"]["ms_per_pair"],
        "step_ratio": step / ours,
        "units": ranks[0]["units"],
        "gathers_per_call": ranks[0]["gathers_per_call"],
        "kept_before_gb": max(rank["kept_before_gb"] for rank in ranks),
        "peak_gb": max(rank["peak_gb"] for rank in ranks),
        "relative_error": {
            "ours_to_stock": max(rank["ours_to_stock"] for rank in ranks),
            "ours_to_float32": exact.get("ours"),
            "lowered_to_float32": exact.get("lowered"),
            "stock_to_float32": exact.get("stock"),
            "float32_skipped": exact["skipped"],
        },
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
