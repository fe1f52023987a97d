"""Tensors that are sent are those that arrive; on a CPU nothing is copied."""

from __future__ import annotations

import torch

from nftctl.staging import send


def test_a_cpu_tensor_stays_where_it_is() -> None:
    x = torch.arange(3)
    assert send(x, torch.device("cpu")) is x


def test_what_is_sent_to_a_gpu_is_pinned_and_nobody_waits() -> None:
    calls: list[tuple[str, object]] = []

    class Seen:
        is_cuda = False

        def pin_memory(self) -> Seen:
            calls.append(("pin", None))
            return self

        def to(self, device: torch.device, non_blocking: bool = False) -> Seen:
            calls.append((str(device), non_blocking))
            return self

    send(Seen(), torch.device("cuda"))  # type: ignore[arg-type]
    assert calls == [("pin", None), ("cuda", True)]
