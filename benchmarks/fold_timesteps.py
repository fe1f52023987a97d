"""Training timesteps of a sample folded into one batch, against one timestep of all samples at a time.

Builds one rank of the family's recipe on a base of random weights and makes optimizer steps on made-up latents: T = 1,
4 and 9 timesteps of each of `--rows` samples, in micro-batches of `rows` pairs (one by one) and of `rows * T` (folded;
what `model.train_micro_batch` unset does), and of any `--sizes` between. A step is what `policy.prepare` and
`policy.train` do: draws, the old and reference forwards that the recipe needs, forward and backward, reduction, AdamW,
the moving old policy. Prints ms per optimizer step and per pair (medians after warm-up) and the peak memory of each,
and the losses of the first step, which may not depend on the cut.

    python benchmarks/fold_timesteps.py [--shape cosmos3-2b] [--rows 4] [--timesteps 1 4 9] [--sizes 8 16] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from one_rank import base_of, device_of, one_rank, resolve, synchronise

from nftctl.algorithm import draws
from nftctl.engine.worker import Worker
from nftctl.model import shard
from nftctl.model.shapes import SHAPES
from nftctl.profile.schema import Profile
from nftctl.roles.policy import PolicyRole
from nftctl.roles.trajectory import Trajectory
from nftctl.run.state import RunState

WARM = 2
"""Steps before the first that counts: old is the policy in the very first, and shapes are compiled in both."""
SAME = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative difference between the losses of two cuts of the same pairs."""


def samples(worker: Worker, rows: int) -> list[Trajectory]:
    """Made-up results of a rollout: noise for latents, and an optimality of each."""
    roles, seed = worker.roles, worker.spec.profile.rl.seed
    found = roles.data.next(0)[:rows]
    conditions, _ = roles.rollout.encode([row.prompt.text for row in found], roles.rollout._sampling)
    return [
        Trajectory(
            row=row,
            tick=row.number,
            x0=draws.normal(roles.family.latent_shape, seed, "benchmark", row.number).to(worker.device),
            conditioning=conditions[i],
            image=None,
            optimality=float(draws.uniform((1,), seed, "judgement", row.number)),
        )
        for i, row in enumerate(found)
    ]


def cut(profile: Profile, rows: int, timesteps: int, size: int) -> Profile:
    """The profile with that many rows and timesteps, in micro-batches of `size` pairs."""
    return profile.model_copy(
        update={
            "rl": profile.rl.model_copy(update={"timesteps_per_sample": timesteps}),
            "data": profile.data.model_copy(update={"rows_per_step": rows}),
            "model": profile.model.model_copy(update={"train_micro_batch": size}),
        }
    )


def measure(worker: Worker, given: Sequence[Trajectory], timesteps: int, size: int, repeats: int) -> dict[str, Any]:
    """Optimizer steps of one cut, from the adapter that the last one left."""
    device, roles = worker.device, worker.roles
    profile = cut(worker.spec.profile, len(given), timesteps, size)
    policy = PolicyRole(roles.family, profile, rank=0, device=device, control=worker._control)
    state, seconds, first = RunState(), [], None
    try:
        for _ in range(WARM + repeats):
            shard.gather(roles.family.denoiser)
            synchronise(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            before = time.perf_counter()
            policy.skip_forwards()
            policy.prepare(given, state)
            row, state = policy.train(given, state)
            synchronise(device)
            seconds.append(time.perf_counter() - before)
            first = first or {"loss": row["train/loss"], "grad_norm": row["train/grad_norm"]}
    except torch.OutOfMemoryError:
        policy.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return {"timesteps": timesteps, "micro_batch": size, "out_of_memory": True}
    finally:
        # Every cut begins at the start of a run.
        restart(worker, policy)
    step = statistics.median(seconds[WARM:])
    pairs = len(given) * timesteps
    return {
        "timesteps": timesteps,
        "micro_batch": size,
        "micro_batches": -(-pairs // size),
        "step_ms": round(step * 1e3, 2),
        "pair_ms": round(step * 1e3 / pairs, 3),
        "first_steps_s": [round(s, 2) for s in seconds[:WARM]],
        "peak_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None,
        "first": first,
    }


_begun: dict[str, torch.Tensor] = {}


def restart(worker: Worker, policy: PolicyRole) -> None:
    """Give the copies the values that they had when this was first called."""
    if not _begun:
        _begun.update({name: tensor.detach().clone() for name, tensor in policy.copies.state().items()})
    policy.copies.load(_begun)


def agreement(found: Sequence[dict[str, Any]], timesteps: int) -> float:
    """Largest relative difference of the first losses and gradient norms between cuts of the same pairs."""
    rows = [row["first"] for row in found if row["timesteps"] == timesteps and row.get("first")]
    return max(
        (abs(a[key] - b[key]) / max(abs(b[key]), 1e-12) for a in rows for b in rows for key in ("loss", "grad_norm")),
        default=0.0,
    )


def bench(options: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    """Every cut of every number of timesteps."""
    base = base_of(options.shape, options.base, folder)
    family = SHAPES[options.shape].family
    prompts = [f"a photo of {n} red cubes on a table, seen from above" for n in range(options.rows)]
    sets = [f"data.rows_per_step={options.rows}", *options.set]
    found: list[dict[str, Any]] = []
    with one_rank(resolve(options.shape, base, folder, prompts, sets), family, device, folder) as worker:
        dtype = worker.spec.profile.model.dtype
        given = samples(worker, options.rows)
        restart(worker, worker.roles.policy)
        for timesteps in options.timesteps:
            pairs = options.rows * timesteps
            sizes = sorted({options.rows, pairs, *(size for size in options.sizes if size < pairs)})
            for size in sizes:
                found.append(measure(worker, given, timesteps, size, options.repeats))
                print(json.dumps(found[-1]), flush=True)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "shape": options.shape,
        "rows": options.rows,
        "cuts": found,
        "folded_to_one_by_one": {t: _ratio(found, t, options.rows) for t in options.timesteps if t > 1},
        "largest_difference": {t: agreement(found, t) for t in options.timesteps},
        "agree": all(agreement(found, t) <= SAME[dtype] for t in options.timesteps),
    }


def _ratio(found: Sequence[dict[str, Any]], timesteps: int, rows: int) -> float | None:
    """Step time folded over step time one by one."""
    times = {row["micro_batch"]: row.get("step_ms") for row in found if row["timesteps"] == timesteps}
    folded, single = times.get(rows * timesteps), times.get(rows)
    return round(folded / single, 4) if folded and single else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="cosmos3-2b", choices=list(SHAPES))
    parser.add_argument(
        "--base", default="", help="folder of a base of that shape; written there if it is not there yet"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--timesteps", type=int, nargs="+", default=[1, 4, 9])
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="further micro-batches, in pairs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = bench(options, device_of(options.device), Path(folder))
    print(json.dumps(found))
    return 0 if found["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
