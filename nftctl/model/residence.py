"""Where a frozen prompt encoder lives while no prompt is encoded: on the device, in host memory, or nowhere.

Owns the visits of its weights to the device and their count: of all its modules together, or of one at a time, so that
the device never holds more than the largest. What is brought is the same to the bit in every way. Refuses weight files
that are no longer those that the run began from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from nftctl.errors import CheckpointUnusable


class Residence:
    """On the device for good. The others say what a visit, and the time of one module in it, begin and end with."""

    needs_room = False
    """Whether a visit takes as much of the device as all of the weights."""

    def __init__(self) -> None:
        self.visits = 0
        """Times that prompts had to be encoded, all prompts of one `visit` together."""
        self._nested = 0
        self._here = False

    @contextmanager
    def visit(self) -> Iterator[None]:
        """What `arrive` brings inside stays until the end of the outermost visit. Costs nothing where nothing comes."""
        self._nested += 1
        try:
            yield
        finally:
            self._nested -= 1
            if not self._nested and self._here:
                self._here = False
                self._end()

    def arrive(self) -> None:
        """Begin to encode: weights that come together come now. Only inside `visit`."""
        if not self._nested:
            raise RuntimeError("the weights of a prompt encoder are only there during a visit")
        if not self._here:
            self._here = True
            self.visits += 1
            self._begin()

    @contextmanager
    def unit(self, module: nn.Module) -> Iterator[None]:
        """Have the weights of one module on the device inside. Only after `arrive`."""
        if not self._here:
            raise RuntimeError("a unit of a prompt encoder is only there once its visit has begun")
        try:
            self._enter(module)
            yield
        finally:
            self._exit(module)

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        pass

    def _enter(self, module: nn.Module) -> None:
        pass

    def _exit(self, module: nn.Module) -> None:
        pass


class Visiting(Residence, ABC):
    """Modules that come to the device for a visit, or `one_by_one`, each for its own `unit` alone."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, *, one_by_one: bool) -> None:
        super().__init__()
        self._modules, self._device, self._one_by_one = tuple(modules), device, one_by_one
        self.needs_room = not one_by_one

    def _begin(self) -> None:
        if not self._one_by_one:
            for module in self._modules:
                self._bring(module)

    def _end(self) -> None:
        if not self._one_by_one:
            for module in self._modules:
                self._leave(module)
        # Not after each unit: the next one takes the same memory, in the order of one stream, without waiting.
        give_back(self._device)

    def _enter(self, module: nn.Module) -> None:
        if self._one_by_one:
            self._bring(module)

    def _exit(self, module: nn.Module) -> None:
        if self._one_by_one:
            self._leave(module)

    @abstractmethod
    def _bring(self, module: nn.Module) -> None:
        """Have a module's weights on the device."""

    @abstractmethod
    def _leave(self, module: nn.Module) -> None:
        """Undo `_bring`, also where it failed half way."""


class InHostMemory(Visiting):
    """In host memory, pinned where the device is a GPU. Frozen weights need no way back: their copy is dropped."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, *, one_by_one: bool = False) -> None:
        super().__init__(modules, device, one_by_one=one_by_one)
        self._held = {module: self._settled(module) for module in self._modules}

    def _settled(self, module: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
        for buffer in module.buffers():  # small, and some are computed and in no file
            buffer.data = buffer.data.to(self._device)
        for parameter in module.parameters():
            if self._device.type == "cuda":
                parameter.data = parameter.data.pin_memory()
        return [(parameter, parameter.data) for parameter in module.parameters()]

    def _bring(self, module: nn.Module) -> None:
        for parameter, host in self._held[module]:
            parameter.data = host.to(self._device, non_blocking=True)

    def _leave(self, module: nn.Module) -> None:
        for parameter, host in self._held[module]:
            parameter.data = host


class ReadAnew(Visiting):
    """Nowhere: `read` makes the weights of one of the modules real on the device, from `files`."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        read: Callable[[nn.Module], None],
        files: Sequence[Path],
        device: torch.device,
        *,
        one_by_one: bool = False,
    ) -> None:
        super().__init__(modules, device, one_by_one=one_by_one)
        self._read = read
        self._files = {file: _stamp(file) for file in files}

    def _begin(self) -> None:
        for file, stamp in self._files.items():
            if _stamp(file) != stamp:
                raise CheckpointUnusable(
                    f"{file} is not what it was when this run began, and new prompts need it",
                    hint='put the base back; model.prompt_encoder = "offload" reads it only at the start',
                )
        super()._begin()

    def _bring(self, module: nn.Module) -> None:
        self._read(module)

    def _leave(self, module: nn.Module) -> None:
        forget(module)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def give_back(device: torch.device) -> None:
    """Let the denoiser, which is gathered next, and NCCL have the memory in whole pieces."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def forget(module: nn.Module) -> None:
    """Put every parameter on the meta device, where it takes no memory; buffers stay."""
    named = module.named_parameters(remove_duplicate=False)  # T5 has its embedding under two names
    shells = {name: torch.empty_like(parameter, device="meta") for name, parameter in named}
    module.load_state_dict(shells, strict=False, assign=True)
