"""Optimizer steps of the recipes: on a GPU a whole step is recorded once and replayed, since it is all small kernels.

Owns the optimizer and its learning rate. Refuses nothing: a step that cannot be recorded fails as CUDA says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

B = TypeVar("B", bound=tuple[Tensor, ...])


class Trainer(Generic[B]):
    """One optimizer step after another on batches of one shape; a batch is a tuple of tensors."""

    UNRECORDED = 3

    def __init__(
        self,
        loss: Callable[[B], Tensor],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        *,
        weight_decay: float = 0.01,
        recorded: bool = True,
    ) -> None:
        self._compute, self._parameters = loss, list(parameters)
        self._cuda, self._recorded = device.type == "cuda", recorded
        self._rate: Any = torch.zeros((), device=device) if self._cuda else 0.0
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=self._rate, betas=(0.9, 0.99), weight_decay=weight_decay, capturable=self._cuda
        )
        self._batch: B | None = None
        self._loss = torch.zeros(())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    def step(self, batch: B, rate: float) -> Tensor:
        """Take a step; returns the loss, a tensor that the next step may overwrite."""
        group = self._optimizer.param_groups[0]
        if not self._cuda:
            group["lr"] = rate
            self._work(batch)
            return self._loss
        group["lr"].fill_(rate)
        if self._batch is None:
            self._batch = type(batch)(*(part.clone() for part in batch))  # type: ignore[call-arg]
        for mine, new in zip(self._batch, batch, strict=True):
            mine.copy_(new)
        if self._graph is None:
            self._first(self._batch)
        else:
            self._graph.replay()
        return self._loss

    def _first(self, batch: B) -> None:
        self._steps += 1
        if self._steps <= self.UNRECORDED or not self._recorded:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._work(batch)
            torch.cuda.current_stream().wait_stream(side)
            return
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._work(batch)
        self._graph = graph
        graph.replay()

    def _work(self, batch: B) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._compute(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._loss = loss.detach()
