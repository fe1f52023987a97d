"""What rollouts in FP8 do to samples, to rewards and to learning, against rollouts in the base's precision.

Builds one rank of a profile in this process and makes the samples of its groups twice from equal noise, one rank of the
group after the other. Prints

1. how far the latents of both are apart after every sampler step, relative 2-norms, and how far the decoded images are;
2. in how many groups another sample becomes the best or the worst under the profile's own scorer, and by how much
   rewards move: the share that unrelated samples would show stands beside it;
3. with `--learn STEPS`, the learning curves of runs of the profile with equal seeds, and their held-out figures.

Samples are those of a run's start: its adapter has done nothing yet. On CPUs FP8 is emulated, the same rounded numbers
multiplied in float32, so times say nothing here. `--shape` takes the recipe of that shape's family on a base of random
weights with a packaged scorer in place of a profile: what is said of its images and rewards is then said of noise.

    python benchmarks/fp8_effect.py [--profile tiny_t2i_cpu] [--set K=V ...] [--rows 64] [--learn 60 --seeds 0 1]
    python benchmarks/fp8_effect.py --shape cosmos3-nano --base FOLDER [--set rl.group_size=4 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from one_rank import base_of, device_of, one_rank, resolve

from nftctl.algorithm import draws, sampler
from nftctl.engine.worker import Worker
from nftctl.model.fp8 import Fp8Rollout
from nftctl.model.shapes import SHAPES
from nftctl.profile.load import Resolved, find_profile, load_profile
from nftctl.profile.prompts import base_folder, resolve_prompt_file
from nftctl.profile.schema import Profile
from nftctl.profile.t2i import T2I_PROFILES
from nftctl.reward.protocol import Item
from nftctl.roles.trajectory import Sampling, SourceRow

FP8 = "rl.rollout_precision=fp8"
PRECISIONS = ("base", "fp8")
POINTS = 6
"""Points of a learning curve: means over equal parts of the run."""


@dataclass(slots=True)
class Found:
    """Of every group: samples in both precisions. G is the group's size.

    latents   [samples, steps]: relative 2-norm of the difference after each sampler step
    images    [samples]: mean |difference| in 8-bit units
    rewards   precision -> [groups, G]
    """

    latents: Tensor
    images: Tensor
    rewards: dict[str, Tensor]


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The states after every step of the trajectories that are sampled inside, the clamped last one included."""
    states: list[Tensor] = []
    whole = sampler.sample

    def noting(velocity: sampler.Velocity, noise: Tensor, **how: Any) -> Tensor:
        def seen(x: Tensor, sigma: Tensor) -> Tensor:
            states.append(x)
            return velocity(x, sigma)

        x0 = whole(seen, noise, **how)
        # The first state that a velocity is asked at is the noise.
        states[:] = [*states[1:], x0]
        return x0

    sampler.sample = noting
    try:
        yield states
    finally:
        sampler.sample = whole


def noise_of(profile: Profile, shape: Sequence[int], rows: Sequence[SourceRow], rank: int) -> Tensor:
    """What that rank of a run would start these rows from."""
    rl = profile.rl
    steps = [row.number // profile.data.rows_per_step for row in rows]
    ticks = [draws.rollout_tick(rl.rollout_seed_clock, row.number, step) for row, step in zip(rows, steps, strict=True)]
    return draws.rollout_noise(shape, seed=rl.seed, ticks=ticks, rank=rank)


def measure(worker: Worker, lowered: Fp8Rollout, count: int) -> Found:
    """Sample and score `count` groups in both precisions, in the rollout's own micro-batches."""
    roles, profile = worker.roles, worker.spec.profile
    group = profile.rl.group_size
    how = Sampling(profile.rl.sample_steps, profile.rl.sampler_shift, profile.rl.guidance)
    latents: list[Tensor] = []
    images: list[Tensor] = []
    rewards: dict[str, list[Tensor]] = {precision: [] for precision in PRECISIONS}
    for rows in batches(worker, count):
        conditions, negative = roles.rollout.encode([row.prompt.text for row in rows], how)
        scores: dict[str, list[list[float]]] = {precision: [] for precision in PRECISIONS}
        for rank in range(group):
            noise = noise_of(profile, roles.family.latent_shape, rows, rank)
            made: dict[str, Tensor] = {}
            states: dict[str, Tensor] = {}
            for precision in PRECISIONS:
                chosen = lowered if precision == "fp8" else None
                with recorded() as seen:
                    _, made[precision] = roles.rollout.denoise(
                        conditions, negative, noise, how, roles.rollout.weights, chosen
                    )
                states[precision] = torch.stack([x.flatten(1).float() for x in seen], dim=1)
                scores[precision].append(scored(worker, rows, made[precision], f"{precision}/{rank}"))
            latents.append(relative(states["fp8"], states["base"]).cpu())
            images.append((made["fp8"].float() - made["base"].float()).abs().flatten(1).mean(1))
        for precision in PRECISIONS:
            rewards[precision].append(torch.tensor(scores[precision]).T)
    return Found(torch.cat(latents), torch.cat(images), {name: torch.cat(parts) for name, parts in rewards.items()})


def batches(worker: Worker, count: int) -> Iterator[list[SourceRow]]:
    """The first `count` rows of a run, cut as a rollout cuts them."""
    roles, per_step = worker.roles, worker.spec.profile.data.rows_per_step
    size = roles.rollout._micro_batch
    for cursor in range(0, count, per_step):
        rows = roles.data.next(cursor)[: count - cursor]
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


def relative(x: Tensor, y: Tensor) -> Tensor:
    """||x - y|| / ||y|| over the last dimension."""
    error: Tensor = torch.linalg.vector_norm(x - y, dim=-1) / torch.linalg.vector_norm(y, dim=-1)
    return error


def scored(worker: Worker, rows: Sequence[SourceRow], images: Tensor, label: str) -> list[float]:
    """The reward of each image, as the profile weighs its providers."""
    items = [
        Item(
            id=f"{label}/{row.number}",
            prompt=row.prompt.reward_text,
            metadata=row.prompt.metadata,
            image=images[i][0].contiguous().numpy(),
        )
        for i, row in enumerate(rows)
    ]
    return [reward for reward, _ in worker.roles.reward.score_images(items, label)]


def changed(base: Tensor, other: Tensor) -> float:
    """Share of groups [groups, G] in which none of the samples that are best in `base` is among the best in `other`."""
    best = (base == base.amax(1, keepdim=True)) & (other == other.amax(1, keepdim=True))
    return 1 - best.any(1).float().mean().item()


def effect(found: Found) -> dict[str, Any]:
    """The figures of the first two parts."""
    base, low = found.rewards["base"].double(), found.rewards["fp8"].double()
    spread = [r - r.mean(1, keepdim=True) for r in (base, low)]
    together = (spread[0] * spread[1]).sum() / (spread[0].norm() * spread[1].norm()).clamp(min=1e-12)
    return {
        "samples": len(found.images),
        "latent_error": [round(e, 5) for e in found.latents.mean(0).tolist()],
        "latent_error_worst_sample": [round(e, 5) for e in found.latents.amax(0).tolist()],
        "image_difference": round(found.images.mean().item(), 3),
        "image_difference_worst_sample": round(found.images.max().item(), 3),
        "groups": len(base),
        "group_size": base.shape[1],
        "zero_spread_groups": int((base.amax(1) == base.amin(1)).sum()),
        "best_changes": round(changed(base, low), 4),
        "worst_changes": round(changed(-base, -low), 4),
        "unrelated_samples_would_change": round(1 - 1 / base.shape[1], 4),
        "reward": {"base": round(base.mean().item(), 4), "fp8": round(low.mean().item(), 4)},
        "reward_difference": round((low - base).abs().mean().item(), 4),
        "reward_group_std": round(base.std(1).mean().item(), 4),
        "correlation_within_groups": round(together.item(), 4),
    }


def one_run(options: argparse.Namespace, precision: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train the profile; its curve and what it scored before and after."""
    name = f"{precision}-{seed}"
    settings = [
        f"rl.seed={seed}",
        f"rl.rollout_precision={precision}",
        "samples.prompts=0",
        "logging.tensorboard=false",
    ]
    command = [sys.executable, "-m", "nftctl", "launch", options.profile, "--json", "--quiet", "--name", name]
    command += ["--steps", str(options.learn), "--run-dir", str(folder)]
    command += [part for text in (*options.set, *settings) for part in ("--set", text)]
    # What a run prints on stderr is for whoever watches this.
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    before, after = (json.loads(answer.stdout)["summary"]["eval"][when] for when in ("before", "after"))
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["train/reward_mean"] for row in rows]
    cuts = [round(i * len(rewards) / POINTS) for i in range(POINTS + 1)]
    parts = [rewards[a:b] for a, b in pairwise(cuts) if b > a]
    return {
        "seed": seed,
        "precision": precision,
        "steps": len(rows),
        "curve": [round(sum(part) / len(part), 4) for part in parts],
        "held_out": {
            key.removeprefix("eval/"): [round(before[key], 4), round(after[key], 4)]
            for key in sorted(after)
            if key == "eval/reward" or key.endswith("judge")
        },
    }


def told_effect(found: dict[str, Any]) -> None:
    """Print the first two parts."""
    print(f"{found['base']}; {found['device']}, {found['lowered_modules']} linear modules in FP8")
    print(f"1. {found['samples']} samples, FP8 against {found['dtype']} from equal noise")
    print("   sampler step   relative latent error, mean   worst sample")
    for step, pair in enumerate(zip(found["latent_error"], found["latent_error_worst_sample"], strict=True), 1):
        print(f"   {step:12d}   {pair[0]:27.4f}   {pair[1]:12.4f}")
    print(
        f"   images: mean |difference| {found['image_difference']} of 255, "
        f"worst sample {found['image_difference_worst_sample']}"
    )
    print(
        f"2. {found['groups']} groups of {found['group_size']} ({found['zero_spread_groups']} without spread), "
        f"scored by {found['scorers']}"
    )
    print(
        f"   another best sample in {found['best_changes']:.1%} of groups, "
        f"another worst in {found['worst_changes']:.1%}, where unrelated samples would "
        f"in {found['unrelated_samples_would_change']:.1%}"
    )
    print(
        f"   reward {found['reward']['base']} -> {found['reward']['fp8']}, mean |difference| "
        f"{found['reward_difference']}, standard deviation within groups {found['reward_group_std']}, "
        f"correlation within groups {found['correlation_within_groups']}",
        flush=True,
    )


def told_run(run: dict[str, Any]) -> None:
    """Print one learning curve."""
    curve = " ".join(f"{point:.3f}" for point in run["curve"])
    held_out = ", ".join(f"{name} {a:.3f} -> {b:.3f}" for name, (a, b) in run["held_out"].items())
    print(f"   seed {run['seed']} {run['precision']:4} training reward {curve}; held out: {held_out}", flush=True)


def profile_of(options: argparse.Namespace, folder: Path) -> tuple[Resolved, str, str]:
    """The profile with its places resolved, the family's name, and what is known of the base."""
    sets = [*options.set, FP8]
    if options.shape:
        base = base_of(options.shape, options.base, folder)
        prompts = [f"a photo of {n} red cubes on a table, seen from above" for n in range(options.rows)]
        resolved = resolve(options.shape, base, folder, prompts, sets)
        return resolved, SHAPES[options.shape].family, f"base of RANDOM weights, shape {options.shape}"
    resolved = load_profile(find_profile(options.profile, {}, Path.cwd())[0], sets=sets)
    profile = resolved.profile
    rl = profile.rl.model_copy(update={"init_from": str(base_folder(profile.rl.init_from))})
    data = profile.data.model_copy(update={"prompt_file": str(resolve_prompt_file(profile.data.prompt_file, "train"))})
    placed = replace(resolved, profile=profile.model_copy(update={"rl": rl, "data": data}))
    return placed, T2I_PROFILES[rl.profile].family, f"profile {options.profile}, base {profile.rl.init_from}"


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The first two parts."""
    resolved, family, base = profile_of(options, folder)
    profile = resolved.profile
    # The hardware's product gives no float32.
    name = "cpu" if options.device == "auto" and profile.model.dtype == "float32" else options.device
    device = device_of(name)
    with one_rank(resolved, family, device, folder) as worker:
        lowered = worker.roles.rollout._lowered
        if lowered is None or not lowered.modules:
            raise SystemExit("no linear module of this base's layers can be multiplied in FP8: widths not of 16")
        found = effect(measure(worker, lowered, options.rows))
        return found | {
            "base": base,
            "random_weights": bool(options.shape),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (FP8 emulated)",
            "dtype": profile.model.dtype,
            "lowered_modules": lowered.modules,
            "scorers": " + ".join(p.scorer or p.name for p in profile.reward.providers),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="tiny_t2i_cpu", help="a file or the name of a bundled profile")
    parser.add_argument("--shape", choices=list(SHAPES), help="a base of random weights in place of a profile")
    parser.add_argument("--base", default="", help="folder of the shape's base; written there if it is not there yet")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=64, help="groups; 0 leaves parts 1 and 2 out")
    parser.add_argument("--learn", type=int, default=0, metavar="STEPS", help="steps of each run of part 3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of part 3, two runs for each")
    options = parser.parse_args()
    if options.learn and options.shape:
        parser.error("--learn trains a profile: nothing is to be learned from random weights")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.rows:
            document["effect"] = compare(options, Path(folder))
            told_effect(document["effect"])
        if options.learn:
            document["learn"] = []
            print(f"3. {options.learn} steps of {options.profile}, means over {POINTS} parts of each run")
            # Both precisions of a seed in turn, so that runs that are cut short still come in pairs.
            for seed in options.seeds:
                for precision in PRECISIONS:
                    document["learn"].append(one_run(options, precision, seed, Path(folder)))
                    told_run(document["learn"][-1])
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
