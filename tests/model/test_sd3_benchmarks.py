"""The plain loop that the SD3 benchmark measures against does the same work: losses and gradients agree in float32."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sd3_plain_loop

    yield sd3_plain_loop
    for name in ("sd3_plain_loop", "one_rank"):
        sys.modules.pop(name, None)


@pytest.mark.soak
def test_the_plain_loop_does_the_same_work(benchmark: Any) -> None:
    found = benchmark.check(torch.device("cpu"))
    assert found["agree"], found
    last = found["losses"][-1]
    assert last["train/kl_loss"][0] > 0.01
    assert len(found["relative_difference"]) == 3
