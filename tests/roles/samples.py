"""Rows, trajectories and weights for the role tests, and services that run beside the test in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

import torch

from nftctl.model import adapters
from nftctl.model.family import Family
from nftctl.profile.prompts import Prompt
from nftctl.roles.trajectory import SourceRow, Trajectory

T = TypeVar("T")
CPU = torch.device("cpu")
PROMPTS = ("a yellow four", "a black one", "a red eight", "a green two", "a blue six")


def source_rows(count: int, first: int = 0) -> list[SourceRow]:
    """Running rows of five prompts that the embedded model knows."""
    texts = [PROMPTS[n % len(PROMPTS)] for n in range(first, first + count)]
    return [SourceRow(first + i, i, Prompt(text, text)) for i, text in enumerate(texts)]


def picture(level: int | Sequence[int], number: int = 0, prompt: str = "any", **metadata: Any) -> Trajectory:
    """A decoded sample of one grey level or one colour, without a model: uint8 [1, 4, 4, 3]."""
    image = torch.empty(1, 4, 4, 3, dtype=torch.uint8)
    image[:] = torch.tensor(level, dtype=torch.uint8)
    row = SourceRow(number, number, Prompt(f"model words: {prompt}", prompt, metadata))
    return Trajectory(row=row, tick=number, x0=torch.zeros(1), conditioning=None, image=image)  # type: ignore[arg-type]


def set_adapter(family: Family, which: str, seed: int, scale: float = 0.05) -> None:
    """Fill one of the two adapters with numbers of its own."""
    parameters = adapters.policy_parameters if which == "policy" else adapters.old_parameters
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters(family.denoiser).values():
        parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


def copies(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Values that later steps cannot reach."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@contextmanager
def running(service: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter an asynchronous context on an event loop in another thread for the time of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        value = asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(10)
        try:
            yield value
        finally:
            asyncio.run_coroutine_threadsafe(service.__aexit__(None, None, None), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end_tasks() -> None:
    """Cancel what still waits on this loop: a service may hang on purpose."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
