"""The clock of a watched step: exclusive spans without gaps, work beside them, and seams put back as they were."""

from __future__ import annotations

import threading

import pytest
import torch

from nftctl.roles import timing
from nftctl.roles.timing import Clock

CPU = torch.device("cpu")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds it one second later."""
    now = iter(range(1000))
    monkeypatch.setattr("nftctl.roles.timing.time.perf_counter", lambda: float(next(now)))


@pytest.mark.usefixtures("ticks")
def test_time_belongs_to_the_innermost_span_and_adds_up() -> None:
    clock = Clock(CPU)
    with clock.span("/sample"):  # from 0 to 7
        # 1 to 4: what hangs around a forward, and from 2 to 3 the forward.
        with clock.span("forward"), clock.span("forward"):
            pass
        with clock.span("decode"):  # 5 to 6
            pass
    # 8 to 13, 9 to 12, 10 to 11.
    with clock.span("/train"), clock.span("/prepare"), clock.span("forward"):
        pass
    seconds, beside = clock.read()
    assert seconds == {
        "sample/rest": 1.0 + 1.0 + 1.0,
        "sample/forward": 3.0,
        "sample/decode": 1.0,
        timing.BETWEEN: 1.0,
        "train/rest": 1.0 + 1.0,
        "prepare/rest": 1.0 + 1.0,
        "prepare/forward": 1.0,
    }
    assert sum(seconds.values()) == 13.0
    assert beside == {}
    assert clock.read() == ({}, {})


@pytest.mark.usefixtures("ticks")
def test_an_error_closes_its_spans() -> None:
    clock = Clock(CPU)
    with pytest.raises(ValueError, match="inside"), clock.span("/sample"), clock.span("forward"):
        raise ValueError("inside")
    with clock.span("/train"):
        pass
    assert list(clock.read()[0]) == ["sample/rest", "sample/forward", timing.BETWEEN, "train/rest"]


def test_what_another_thread_does_is_beside_the_step() -> None:
    clock = Clock(CPU)

    def work() -> None:
        with clock.span("image encoding"):
            pass

    with clock.span("/sample"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    seconds, beside = clock.read()
    assert list(seconds) == ["sample/rest"]
    assert list(beside) == ["image encoding"]
