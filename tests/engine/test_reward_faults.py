"""A service that misbehaves in mid-run: one fault that passes and one that lasts, of all that `make soak` runs.

That a score which is no number is refused is also in tests/reward/test_client.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine import fault_runs
from tests.engine.fault_runs import Outcome, check_failed, check_recovered

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def clean(world4: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run against the sound service."""
    return fault_runs.run_on(world4, tmp_path_factory.mktemp("clean"), "none")


def test_the_service_saw_every_image_once(clean: Outcome) -> None:
    # 4 steps x 2 rows x 4 ranks, one request per rank and step.
    assert clean.requests == 4 * 4
    assert clean.images == 4 * 2 * 4
    last = json.loads((clean.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["system/reward_images"] == clean.images
    assert last["system/reward_retries"] == 0


def test_a_service_that_recovers_within_the_retries_changes_no_bit(world4: Any, tmp_path: Path, clean: Outcome) -> None:
    check_recovered(clean, clean)
    recovered = fault_runs.run_on(world4, tmp_path, "status-503", times=2)
    check_recovered(recovered, clean)
    # The two that were refused were sent again, and scored once.
    assert (recovered.requests, recovered.images) == (clean.requests + 2, clean.images)
    last = json.loads((recovered.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["system/reward_retries"] == 2


def test_a_service_that_does_not_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    """Through the installed command: the exit code and what is said are the program's."""
    check_failed(fault_runs.run(tmp_path, "hang"), "hang")
