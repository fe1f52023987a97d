"""Every fault of a reward service, in mid-run: trained through without a trace, or told in the reward's own words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine import fault_runs
from tests.engine.fault_runs import HARMLESS, PASSING, Outcome, check_failed, check_recovered
from tests.engine.test_runs import QUIET, http_profile, serve, start, wait_for
from tests.reward.fault_server import FAULTS

pytestmark = [pytest.mark.soak, pytest.mark.ray]

LASTING = [fault for fault in FAULTS if fault not in ("none", *HARMLESS)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run against the sound service."""
    outcome = fault_runs.run(tmp_path_factory.mktemp("clean"), "none")
    check_recovered(outcome, outcome)
    return outcome


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_can_be_trusted_is_used(tmp_path: Path, clean: Outcome, fault: str) -> None:
    check_recovered(fault_runs.run(tmp_path, fault), clean)


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_within_the_retries_changes_no_bit(tmp_path: Path, clean: Outcome, fault: str) -> None:
    check_recovered(fault_runs.run(tmp_path, fault, times=2), clean)


@pytest.mark.parametrize("fault", LASTING)
def test_what_lasts_ends_the_run_in_time_and_by_its_name(tmp_path: Path, clean: Outcome, fault: str) -> None:
    outcome = fault_runs.run(tmp_path, fault)
    print(f"{fault}: exit {outcome.code}, {outcome.seconds:.1f} s after the fault")
    check_failed(outcome, fault, clean)


def test_a_service_that_is_killed_ends_the_run_with_its_own_code(tmp_path: Path) -> None:
    """The program's own service, between any two of its answers."""
    service, url = serve(tmp_path)
    process = start(
        tmp_path, "launch", http_profile(tmp_path, url), "--steps", "500", "--name", "cut", *QUIET,
        "--set", "checkpoint.every=1",
    )  # fmt: skip
    run = tmp_path / "runs" / "cut"
    wait_for(run / "metrics.jsonl", r'"step":2,')
    service.kill()
    _, err = process.communicate(timeout=60)
    service.communicate()
    assert process.returncode == 4, err
    assert url in err
    assert "nftctl resume" in err
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    assert newest.name == f"step_{rows[-1]:06d}"
