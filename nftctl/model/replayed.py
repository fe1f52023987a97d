"""A frozen module's forward as a CUDA graph: recorded once for each shape of its input, and replayed ever after.

For modules whose many small kernels take longer to launch than to run, such as a text encoder that reads one prompt at
a time. Replays are the same kernels on the same shapes, so an input's output does not depend on what ran before it.
Refuses nothing: where a forward cannot be recorded, that is logged once and it goes on running as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("nftctl.model")

WARM = 2
"""Runs before recording, on a stream of their own: libraries set themselves up in the first."""


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: Any
    given: Tensor
    output: Any


class Replayed:
    """Stands in for `forward` of a module with frozen weights that stay where they are.

    Takes one tensor and keyword arguments that are no tensors. What it returns lies in memory that the next call writes
    anew: copy it, or be done with it before. Only to be called without gradients.
    """

    def __init__(self, forward: Callable[..., Any], name: str) -> None:
        self._forward, self._name = forward, name
        self._recordings: dict[Any, _Recording] = {}
        self._refused = False

    def __call__(self, given: Tensor, **how: Any) -> Any:
        if self._refused or torch.is_grad_enabled():
            return self._forward(given, **how)
        key = (tuple(given.shape), given.dtype, tuple(sorted(how.items())))
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(given, how)
            except RuntimeError as error:
                self._refused = True
                log.error("%s cannot be recorded as a CUDA graph and runs kernel by kernel: %s", self._name, error)
                return self._forward(given, **how)
        recording = self._recordings[key]
        recording.given.copy_(given)
        recording.graph.replay()
        return recording.output

    def _record(self, given: Tensor, how: dict[str, Any]) -> _Recording:
        held, here = given.clone(), torch.cuda.current_stream(given.device)
        aside = torch.cuda.Stream(given.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self._forward(held, **how)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = self._forward(held, **how)
        return _Recording(graph, held, output)


def replay(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Have these frozen modules replayed from now on. Does nothing on the CPU."""
    if device.type != "cuda":
        return
    for module in modules:
        made: Any = Replayed(module.forward, type(module).__name__)
        module.forward = made
