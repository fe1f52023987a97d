"""Where ranks run, given what there is; Ray itself is started in test_world and test_runs."""

from __future__ import annotations

import pytest

from nftctl.engine.placement import choose_device
from nftctl.errors import TrainingFailed
from nftctl.profile.schema import Grid


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "chosen"),
    [
        ("auto", 4, 0, "cpu"),
        ("auto", 4, 4, "cuda"),
        ("auto", 2, 8, "cuda"),
        ("cpu", 4, 0, "cpu"),
        ("cpu", 4, 8, "cpu"),
        ("cuda", 4, 4, "cuda"),
    ],
)
def test_the_device_of_a_run(device: str, ranks: int, gpus: int, chosen: str) -> None:
    assert choose_device(Grid(device=device), ranks, gpus) == chosen


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("auto", 3), ("cuda", 0), ("cuda", 3)])
def test_too_few_gpus_are_said_with_both_numbers_and_a_way_out(device: str, gpus: int) -> None:
    with pytest.raises(TrainingFailed, match=rf"4 GPUs are needed.*rl\.group_size = 4.*{gpus} are visible") as caught:
        choose_device(Grid(device=device), 4, gpus)
    assert 'grid.device = "cpu"' in caught.value.hint
