"""A service that misbehaves in mid-run: three of the faults that `make soak` runs in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import fault_runs
from tests.engine.fault_runs import Outcome, check_failed, check_recovered

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run against the sound service."""
    return fault_runs.run(tmp_path_factory.mktemp("clean"), "none")


def test_a_service_that_recovers_within_the_retries_changes_no_bit(tmp_path: Path, clean: Outcome) -> None:
    check_recovered(clean, clean)
    check_recovered(fault_runs.run(tmp_path, "status-503", times=2), clean)


@pytest.mark.parametrize("fault", ["nan", "hang"])
def test_a_service_that_does_not_ends_the_run_with_its_own_words(tmp_path: Path, clean: Outcome, fault: str) -> None:
    check_failed(fault_runs.run(tmp_path, fault), fault, clean)
