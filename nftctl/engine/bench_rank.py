"""The rank's side of `bench`: functions that the driver has every rank run on its worker, and what they keep meanwhile.

Latents and weights stay here, figures go back. Needs a worker that has built its roles; `compare` lets go of them, so
that their model and the stock one never lie in memory together.
"""

from __future__ import annotations

import gc
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nftctl.errors import TrainingFailed

if TYPE_CHECKING:
    import torch

    from nftctl.engine.worker import Worker
    from nftctl.model.family import Family
    from nftctl.model.naive import Work
    from nftctl.roles.timing import StepTimes, Watch

PROBE_SIGMA = 0.7
"""Where velocities are compared: noise enough that the model works, and not so much that its answer is the noise."""
FORWARDS, TRAININGS, WARM = 6, 3, 2
"""Stock forwards and forward-backward pairs that are timed, and how many of each run before."""
ROOM = 1.1
"""Memory that a stock transformer needs, in units of its parameters."""


@dataclass(slots=True)
class _Bench:
    """What a rank keeps between the driver's calls: the watch, the sample to compare with, velocities on the CPU.

    lowered   ours as the rollout makes them where it multiplies in a lower precision than the base's
    """

    watch: Watch | None
    work: Work | None = None
    ours: torch.Tensor | None = None
    lowered: torch.Tensor | None = None
    stock: torch.Tensor | None = None


_benches: dict[int, _Bench] = {}
"""By worker, of which a process has one; tests may have several."""


def attach(worker: Worker) -> None:
    """Begin to watch the worker's roles."""
    from nftctl.roles.timing import Watch

    _benches[id(worker)] = _Bench(Watch(worker.roles, worker.device))


def detach(worker: Worker) -> None:
    """Stop watching and forget."""
    bench = _benches.pop(id(worker), None)
    if bench is not None and bench.watch is not None:
        bench.watch.remove()


def read(worker: Worker) -> StepTimes:
    """The step since the last reading."""
    watch = _benches[id(worker)].watch
    if watch is None:
        raise TrainingFailed("the roles are no longer watched")
    return watch.read()


def facts(worker: Worker) -> dict[str, Any]:
    """The device and its measured matmul rate, operations per second: in the base's precision, on CPUs in float32."""
    import torch

    from nftctl.model.arithmetic import matmul_rate, sustained_rate

    cuda = worker.device.type == "cuda"
    # What a CPU makes of bfloat16 is no measure of what it can do.
    dtype = worker.spec.profile.model.dtype if cuda else "float32"
    sharding = worker.roles.family.denoiser.sharding
    return {
        "rank": worker.rank,
        "device": torch.cuda.get_device_name(worker.device) if cuda else platform.processor() or platform.machine(),
        "threads": None if cuda else torch.get_num_threads(),
        "matmul_flops_per_second": matmul_rate(worker.device, getattr(torch, dtype)),
        "sustained_flops_per_second": sustained_rate(worker.device, getattr(torch, dtype)) if cuda else None,
        "matmul_dtype": dtype,
        "shard": None if sharding is None else str(sharding.policy),
    }


def arithmetic(worker: Worker, cursors: Sequence[int]) -> list[dict[str, Any]]:
    """What the steps beginning at those cursors need on this rank, as `operations` counts it, and tokens."""
    from nftctl.algorithm.plan import rows_per_velocity
    from nftctl.engine.least import operations
    from nftctl.model.arithmetic import count_forward

    spec, roles = worker.spec, worker.roles
    rl = spec.profile.rl
    forward = count_forward(spec.family, spec.base, roles.family.latent_shape)
    against = _tokens(roles.family, rl.negative_prompt, True) if rl.guidance != 1.0 else 0
    found = []
    for cursor in cursors:
        lengths = [_tokens(roles.family, row.prompt.text, False) for row in roles.data.next(cursor)]
        needed = operations(forward, spec.profile, lengths, against)
        pairs = len(lengths) * rl.timesteps_per_sample * rl.updates_per_rollout
        found.append(
            {
                "image_tokens": forward.tokens,
                "prompt_tokens": lengths,
                "negative_tokens": against or None,
                "rollout_forwards": len(lengths) * rows_per_velocity(rl.guidance) * rl.sample_steps,
                "rollout_flops": needed.rollout,
                "pairs": pairs,
                "row_flops": sum(map(forward.flops, lengths)) / len(lengths),
                "pair_flops": needed.trained / pairs,
            }
        )
    return found


def _tokens(family: Family, text: str, negative: bool) -> int:
    """Prompt tokens that the denoiser's attention reads."""
    (encoded,) = family.encoder.encode([text], negative=negative)
    return encoded.tokens[0]


def probe(worker: Worker, cursor: int) -> StepTimes:
    """Keep our velocities for one sample, made by a batch of the rollout's own shape while the weights are the base's.

    Collective: the weights are gathered for it. Returns what was counted on the way.
    """
    import torch

    from nftctl.algorithm import draws
    from nftctl.model import shard
    from nftctl.model.naive import Work, stock_of
    from nftctl.roles.trajectory import Sampling

    roles, spec = worker.roles, worker.spec
    family, rl = roles.family, spec.profile.rl
    rows = roles.data.next(cursor)[: spec.profile.model.rollout_micro_batch or None]
    texts, negative = [row.prompt.text for row in rows], rl.guidance != 1.0
    positive = rl.guidance != 0.0
    stock = stock_of(spec.family)
    prompts = [stock.prompt(family, rl.negative_prompt, True)] if negative else []
    prompts += [stock.prompt(family, texts[0], False)] if positive else []
    how = Sampling(rl.sample_steps, rl.sampler_shift, rl.guidance)
    conditions, against = roles.rollout.encode(texts, how)
    noise = draws.rollout_noise(family.latent_shape, seed=rl.seed, ticks=[row.number for row in rows], rank=0)
    batch = ([against] * len(rows) if against is not None else []) + (conditions if positive else [])
    x = torch.cat([noise] * (len(batch) // len(rows))).to(worker.device)
    sigma = torch.full((len(batch),), PROBE_SIGMA, device=worker.device)
    with torch.no_grad(), roles.policy.copies.use(roles.rollout.weights):
        shard.gather(family.denoiser)
        joined, bench = family.batch(batch), _benches[id(worker)]
        bench.ours = family.denoiser(x, sigma, joined)[:: len(rows)].float().cpu()
        precision = roles.rollout._lowered
        if precision is not None:
            with precision.use():
                bench.lowered = family.denoiser(x, sigma, joined)[:: len(rows)].float().cpu()
    roles.release()
    roles.policy.skip_forwards()
    bench.work = Work(noise[:1].clone(), PROBE_SIGMA, tuple(prompts))
    return read(worker)


def compare(worker: Worker) -> dict[str, Any]:
    """Time the stock transformer on this rank in place of ours, which is let go. Collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from nftctl.model import naive
    from nftctl.model.copies import copies_of

    bench, spec = _benches[id(worker)], worker.spec
    if bench.work is None or bench.ours is None:
        raise TrainingFailed("the stock transformer was asked for before ours was probed")
    trained, lora = list(copies_of(worker.roles.family.denoiser).parameters), spec.profile.model.lora
    _let_go(worker, bench)
    held = _allocated(worker)
    stock = naive.stock_of(spec.family).load(_loading(worker, getattr(torch, spec.profile.model.dtype)))
    world, gathers = dist.get_world_size(), None
    if world > 1:
        gathers = stock.shard(init_device_mesh(worker.device.type, (world,)))
    bench.stock = naive.velocities_of(stock, bench.work)
    before = 0 if gathers is None else gathers.calls
    forwards = naive.time_sampling(stock, bench.work, repeats=FORWARDS, warm=WARM)
    after = 0 if gathers is None else gathers.calls
    parameters = stock.train(trained, lora.rank, lora.alpha)
    pairs = naive.time_training(stock, bench.work, parameters, repeats=TRAININGS, warm=WARM)
    return {
        "rank": worker.rank,
        "forward_s": forwards,
        "pair_s": pairs,
        "units": len(stock.units()),
        "gathers_per_call": (after - before) / (FORWARDS + WARM) / _calls(spec.family, len(bench.work.prompts)),
        "ours_to_stock": naive.relative_error(bench.ours, bench.stock),
        "kept_before_gb": held / 1e9,
        "peak_gb": _peak(worker) / 1e9,
    }


def _calls(family: str, branches: int) -> int:
    """Calls of the transformer per sampler's step of one sample, as the pipeline makes them."""
    return branches if family == "cosmos3" else 1


def reference(worker: Worker) -> dict[str, Any]:
    """Ours and the stock transformer's velocities against the stock one in float32, whole on this rank.

    `skipped` says why there are no errors where a float32 transformer has no room.
    """
    import torch

    from nftctl.model import naive
    from nftctl.profile.artifacts import inspect_folder

    bench, spec = _benches[id(worker)], worker.spec
    if bench.work is None or bench.ours is None or bench.stock is None:
        raise TrainingFailed("there are no velocities to compare")
    _collect(worker)
    loading = _loading(worker, torch.float32)
    numbers = sum(map(math.prod, inspect_folder(spec.base).weights().shapes.values()))
    need = int(numbers * 4 * ROOM)
    free = torch.cuda.mem_get_info(worker.device)[0] if worker.device.type == "cuda" else need
    if free < need:
        return {"skipped": f"a float32 transformer needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"}
    exact = naive.velocities_of(naive.stock_of(spec.family).load(loading), bench.work)
    return {
        "ours": naive.relative_error(bench.ours, exact),
        "lowered": None if bench.lowered is None else naive.relative_error(bench.lowered, exact),
        "stock": naive.relative_error(bench.stock, exact),
        "skipped": "",
    }


def _loading(worker: Worker, dtype: torch.dtype) -> Any:
    from nftctl.model.naive import Loading

    rl = worker.spec.profile.rl
    return Loading(worker.spec.base, dtype, worker.device, tuple(rl.init_keys_to_skip_loading), rl.seed)


def _let_go(worker: Worker, bench: _Bench) -> None:
    """Free everything that the run holds on the device."""
    import torch

    if bench.watch is not None:
        bench.watch.remove()
        bench.watch = None
    worker.close()
    worker._trajectories = []
    torch._dynamo.reset()
    _collect(worker)


def _collect(worker: Worker) -> None:
    import torch

    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(worker.device)


def _allocated(worker: Worker) -> int:
    import torch

    return torch.cuda.memory_allocated(worker.device) if worker.device.type == "cuda" else 0


def _peak(worker: Worker) -> int:
    import torch

    return torch.cuda.max_memory_allocated(worker.device) if worker.device.type == "cuda" else 0
