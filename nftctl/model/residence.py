"""Where a frozen prompt encoder lives while no prompt is encoded: on the device, in host memory, or nowhere.

Owns the visits of its weights to the device and their count. What is brought is the same to the bit in every way.
Refuses weight files that are no longer those that the run began from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from nftctl.errors import CheckpointUnusable


class Residence:
    """On the device for good. The others say what a visit begins and ends with."""

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
                self._leave()

    def arrive(self) -> None:
        """Have the weights on the device. Only inside `visit`."""
        if not self._nested:
            raise RuntimeError("the weights of a prompt encoder are only there during a visit")
        if not self._here:
            self._here = True
            self.visits += 1
            self._bring()

    def _bring(self) -> None:
        pass

    def _leave(self) -> None:
        pass


class InHostMemory(Residence):
    """In host memory, pinned where the device is a GPU. Frozen weights need no way back: their copy is dropped."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._held = []
        for module in modules:
            for buffer in module.buffers():  # small, and some are computed and in no file
                buffer.data = buffer.data.to(device)
            for parameter in module.parameters():
                if device.type == "cuda":
                    parameter.data = parameter.data.pin_memory()
                self._held.append((parameter, parameter.data))

    def _bring(self) -> None:
        for parameter, host in self._held:
            parameter.data = host.to(self._device, non_blocking=True)

    def _leave(self) -> None:
        for parameter, host in self._held:
            parameter.data = host
        give_back(self._device)


class ReadAnew(Residence):
    """Nowhere: `read` makes the weights real on the device, from `files`, and `drop` lets go of them."""

    def __init__(
        self, read: Callable[[], None], drop: Callable[[], None], files: Sequence[Path], device: torch.device
    ) -> None:
        super().__init__()
        self._read, self._drop, self._device = read, drop, device
        self._files = {file: _stamp(file) for file in files}

    def _bring(self) -> None:
        for file, stamp in self._files.items():
            if _stamp(file) != stamp:
                raise CheckpointUnusable(
                    f"{file} is not what it was when this run began, and new prompts need it",
                    hint='put the base back; model.prompt_encoder = "offload" reads it only at the start',
                )
        self._read()

    def _leave(self) -> None:
        self._drop()
        give_back(self._device)


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
