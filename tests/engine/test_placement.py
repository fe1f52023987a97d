"""What a node says of its code, and why Ray did not start; Ray itself is started in test_world and test_clusters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nftctl import itself
from nftctl.engine.placement import (
    _not_started,
    judge_node,
    own_code,
    own_logs,
    refuse_other_folder,
    refuse_shadowed,
)
from nftctl.engine.worker import Worker
from nftctl.errors import EnvironmentUnfit

OURS = {"nftctl": "1.0", "torch": "2.13.0", "source": "aa"}


def facts(**changes: Any) -> dict[str, Any]:
    return {"host": "node7", "python": "/usr/bin/python3", "code": dict(OURS), "unseen": [], **changes}


def test_a_node_with_the_same_code_is_taken() -> None:
    judge_node(facts(), OURS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fault": "ModuleNotFoundError: No module named 'nftctl'"}, "cannot import nftctl: ModuleNotFoundError"),
        ({"code": {**OURS, "torch": "2.12.0"}}, "torch 2.12.0 there, 2.13.0 here"),
        ({"code": {**OURS, "source": "bb"}}, "source bb there, aa here"),
        ({"code": {"nftctl": "1.0", "torch": "2.13.0"}}, "source None there, aa here"),
        ({"unseen": ["/runs/a/logs"]}, "node node7 does not see /runs/a/logs"),
    ],
)
def test_a_node_that_is_not_as_here_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentUnfit) as caught:
        judge_node(facts(**changes), OURS)
    assert said in caught.value.message
    assert "node7" in caught.value.message
    assert caught.value.hint


def test_the_code_of_this_process_has_versions_and_a_hash() -> None:
    code = own_code()
    assert code == own_code()
    assert set(code) == {"nftctl", "torch", "diffusers", "peft", "source"}
    assert len(code["source"]) == 64


def test_why_ray_did_not_start_is_said_in_its_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    logs = tmp_path / "ray" / f"session_2026-01-02_03-04-05_6_{os.getpid()}" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "ray" / "session_2027-01-02_03-04-05_6_1").mkdir()  # of another process
    assert own_logs(os.environ) == logs
    error = ConnectionError("Failed to connect")
    error.__cause__ = RuntimeError("no port\nis free")
    unfit = _not_started(error, None)
    assert unfit.message == (
        "Ray did not start: ConnectionError: Failed to connect; because of RuntimeError: no port is free"
    )
    assert str(logs) in unfit.hint
    (logs / "raylet.err").write_text("[1 C] (raylet) Check failed: x Timed out waiting for file /p\n*** Stack\n")
    assert _not_started(error, None).message.endswith("; its raylet ended with: x Timed out waiting for file /p")


def test_a_working_folder_with_another_nftctl_is_refused(tmp_path: Path) -> None:
    refuse_shadowed(tmp_path)
    (tmp_path / "nftctl").mkdir()
    refuse_shadowed(tmp_path)  # a folder of somebody's, which Python does not prefer to a package
    (tmp_path / "nftctl" / "__init__.py").touch()
    with pytest.raises(EnvironmentUnfit, match="ranks would run the nftctl that lies in the working folder") as caught:
        refuse_shadowed(tmp_path)
    assert str(tmp_path / "nftctl") in caught.value.message
    refuse_shadowed(itself.folder().parent)


def test_ranks_that_found_another_nftctl_are_refused() -> None:
    own = Worker(0, None).about()
    refuse_other_folder([own])
    for other in ({"code": "/home/me/nftctl"}, {"code": own["code"] + "/.."}):
        with pytest.raises(EnvironmentUnfit, match=r"rank 1 would run nftctl from .*, and this process runs it from"):
            refuse_other_folder([own, {**own, "rank": 1, **other}])
    older = {name: value for name, value in own.items() if name != "code"}
    with pytest.raises(EnvironmentUnfit, match="an older nftctl"):
        refuse_other_folder([older])
