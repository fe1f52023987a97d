"""Seconds of repeated work on a device: CUDA events on a GPU, the process's clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int, warm: int) -> list[float]:
    """Run `work` `warm` times and then `repeats` times; the seconds of each of those, the device waited for."""
    for _ in range(warm):
        work()
    return [_gpu(work, device) if device.type == "cuda" else _cpu(work) for _ in range(repeats)]


def _gpu(work: Callable[[], object], device: torch.device) -> float:
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3


def _cpu(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
