"""Broken profiles through the real program: exit 0, 2 or 3, one sentence per finding, never a traceback."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.profile.test_mutations import mutations, unknown_keys

from .program import nftctl


def tries(count: int) -> settings:
    """Each example is a process; which ones are tried is the same on every machine."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=checks)


def judged(folder: Path, content: bytes) -> None:
    (folder / "p.toml").write_bytes(content)
    answer = nftctl("validate", "p.toml", "--json", cwd=folder)
    assert answer.returncode in (0, 2, 3), answer.stderr
    assert "Traceback" not in answer.stderr + answer.stdout
    assert "a bug in nftctl" not in answer.stderr
    document = json.loads(answer.stdout)
    assert document["exit_code"] == answer.returncode
    errors = [finding for finding in document["diagnostics"] if finding["severity"] == "error"]
    assert bool(errors) == (answer.returncode == 3)
    if answer.returncode == 0:
        assert unknown_keys(tomllib.loads(content.decode())) == []
    assert [path.name for path in folder.iterdir()] == ["p.toml"]


@tries(8)
@given(mutations())
def test_any_accident_in_a_process(tmp_path: Path, content: bytes) -> None:
    judged(tmp_path, content)


@pytest.mark.soak
@tries(50)
@given(mutations())
def test_any_of_many_accidents_in_a_process(tmp_path: Path, content: bytes) -> None:
    judged(tmp_path, content)
