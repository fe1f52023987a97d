"""Small tensors on their way to a device, for which neither side waits.

A copy from ordinary memory to a GPU waits until everything before it is done, and then the GPU waits for what comes
after; from pinned memory it takes its place in the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`; itself where that is a CPU. It must not be written into afterwards."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
