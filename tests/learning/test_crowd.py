"""Processes side by side: results in order, failures with their log, and none left behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nftctl.errors import TrainingFailed
from nftctl.learning.crowd import Crowd
from nftctl.learning.order import Budget, Order
from nftctl.learning.task import Task

ECHO = """
import json, os, sys, time
order = json.load(sys.stdin)
print(json.dumps({"look": 1}), flush=True)
if order["method"] == "waits":
    open(os.environ["NFTCTL_TEST_PID"], "w").write(str(os.getpid()))
    time.sleep(60)
if order["method"] == "fails":
    sys.exit("no such luck")
print(json.dumps({"result": {"seed": order["seed"], "threads": os.environ["OMP_NUM_THREADS"]}}))
"""


def order(seed: int, method: str = "nft") -> Order:
    return Order(method, {}, seed, "test", Budget(1.0, 1, 1), {})


def crowd(folder: Path, jobs: int = 2) -> Crowd:
    return Crowd(jobs, folder, [sys.executable, "-c", ECHO])


def test_results_come_in_the_order_of_the_orders(tmp_path: Path) -> None:
    heard: list[Any] = []
    with crowd(tmp_path) as made:
        results = made.make(
            [order(3), order(1), order(2)], lambda asked, result: heard.append((asked.seed, result["seed"]))
        )
    assert [result["seed"] for result in results] == [3, 1, 2]
    assert {result["threads"] for result in results} == {"1"}
    assert sorted(heard) == [(1, 1), (2, 2), (3, 3)]


def test_a_run_that_ends_badly_is_named_with_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(TrainingFailed, match="the run of fails with seed 5 ended with code 1") as failed,
        crowd(tmp_path) as made,
    ):
        made.make([order(5, "fails")], lambda *_: None)
    assert "no such luck" in Path(failed.value.log).read_text()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_closing_ends_what_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    monkeypatch.setenv("NFTCTL_TEST_PID", str(note))

    def close_when_it_waits() -> None:
        while not (note.exists() and note.read_text()):
            time.sleep(0.01)
        made.close()

    made = crowd(tmp_path)
    threading.Thread(target=close_when_it_waits, daemon=True).start()
    with pytest.raises(TrainingFailed):
        made.make([order(0, "waits")], lambda *_: None)
    assert not alive(int(note.read_text()))


def test_a_real_run_comes_back_from_its_process(tmp_path: Path, profile: Any) -> None:
    plain = profile("eval.samples_per_prompt=1").model_dump(mode="json")
    asked = Order("guidance", {}, 4, "tuning", Budget(1.0, 1, 1), plain, guidances=(1.0,))
    with Crowd(1, tmp_path) as made:
        (result,) = made.make([asked], lambda *_: None)
    assert (result["method"], result["seed"]) == ("guidance", 4)
    assert result["guided"][0]["reward"] == pytest.approx(
        Task(profile("eval.samples_per_prompt=1"), 4).look("tuning").reward
    )
