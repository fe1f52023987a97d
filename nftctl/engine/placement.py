"""Ray, started for one run: a private instance, one bundle per rank, nothing of the user's own Ray touched.

Refuses a machine that has fewer GPUs than ranks. Never joins a cluster that the profile does not name, and never
shells out to `ray stop`, which would end every Ray on the host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from nftctl.errors import TrainingFailed
from nftctl.profile.schema import Grid


def start_ray(grid: Grid, ranks: int) -> str:
    """Start a private Ray on this machine with the resources of the run; returns the device, `cpu` or `cuda`.

    Raises TrainingFailed when there are GPUs, or GPUs are asked for, and they are fewer than the ranks.
    """
    import ray

    os.environ.pop("RAY_ADDRESS", None)
    # Ray's usage report and its log de-duplication have no place in a tool that promises quiet and complete logs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with warnings.catch_warnings(), _own_signals():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=ranks,
            num_gpus=0 if grid.device == "cpu" else None,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    return choose_device(grid, ranks, int(ray.cluster_resources().get("GPU", 0)))


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put our signal handlers back at once: Ray's would end the process at the first SIGTERM, unsaved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def choose_device(grid: Grid, ranks: int, gpus: int) -> str:
    """`auto` takes GPUs when there is one for every rank, and the CPU only when there is none at all."""
    if grid.device == "cpu" or (grid.device == "auto" and gpus == 0):
        return "cpu"
    if gpus < ranks:
        raise TrainingFailed(
            f"{ranks} GPUs are needed, one per rank (rl.group_size = {ranks}); {gpus} are visible",
            hint='lower rl.group_size, or set grid.device = "cpu"',
        )
    return "cuda"


def place(ranks: int, device: str, timeout_s: float = 60.0) -> Any:
    """A placement group with one bundle per rank, ready; TrainingFailed when it is not within `timeout_s`."""
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
    group = placement_group([dict(bundle) for _ in range(ranks)], strategy="STRICT_PACK")
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        raise TrainingFailed(f"no room for {ranks} ranks of {bundle}: Ray has {free} free") from None
    return group
