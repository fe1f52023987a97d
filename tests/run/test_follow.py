"""Reading a file that grows and is replaced: each row once, in the order in which the run wrote it."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from nftctl.run.directory import RunDirectory
from nftctl.run.disk import atomic_write
from nftctl.run.ending import Ending, attempt_of, describe, ending_of
from nftctl.run.follow import Follower, Tail
from nftctl.run.rows import JsonLines
from tests.run.make import make_run


def line(step: int, value: float = 0.0) -> bytes:
    return orjson.dumps({"step": step, "a": value}) + b"\n"


def steps(entries: list[tuple[dict[str, object], int]]) -> list[object]:
    return [row["step"] for row, _ in entries]


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_bytes(line(1) + line(2)[:5])
    replaced, entries = tail.read()
    assert (replaced, steps(entries)) == (False, [1])
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        file.write(line(2)[5:] + line(3))
    replaced, entries = tail.read()
    assert (replaced, steps(entries)) == (False, [2, 3])


def test_what_is_no_row_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b'{"step": \n' + b"[1]\n" + b'{"step": "2"}\n' + b"\xff\n" + b"\n" + line(4))
    assert steps(Tail(path).read()[1]) == [4]


@pytest.mark.parametrize(
    "row",
    [
        {"step": 2, "train/loss": None},
        {"step": 2, "eval/reward": "0.5"},
        {"step": 2, "train/loss": True},
        {"step": 2, "alarm": "clamp", "advice": "widen"},
        {"step": 2, "alarm": 3, "message": "m", "advice": "a"},
        {"step": True},
    ],
)
def test_a_row_without_its_figures_or_words_is_passed_over(tmp_path: Path, row: dict[str, object]) -> None:
    path = tmp_path / "rows"
    path.write_bytes(line(1) + orjson.dumps(row) + b"\n" + line(3))
    assert steps(Tail(path).read()[1]) == [1, 3]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(line(1) + line(2))
    tail = Tail(path)
    tail.read()
    atomic_write(path, line(1) + line(2) + line(3))
    replaced, entries = tail.read()
    assert (replaced, steps(entries)) == (True, [1, 2, 3])
    path.unlink()
    assert tail.read() == (True, [])
    path.write_bytes(line(1))
    assert steps(tail.read()[1]) == [1]


@pytest.mark.parametrize("content", [line(1) + line(2, 7.0) + line(3), line(1), b"", line(1) + line(2, 7.0)])
def test_other_content_under_the_same_number_of_a_file_is_noticed(tmp_path: Path, content: bytes) -> None:
    """The system may give a new file the number of one that has gone."""
    path = tmp_path / "rows"
    path.write_bytes(line(1) + line(2))
    tail = Tail(path)
    tail.read()
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    replaced, entries = tail.read()
    assert replaced
    assert steps(entries) == [orjson.loads(row)["step"] for row in content.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = make_run(tmp_path, "tiny")
    found.new_attempt()
    return found


def test_a_resume_that_was_faster_than_the_looks_is_noticed(run: RunDirectory) -> None:
    """Rows are compared and not counted: the new file already has as many as the old one had."""
    metrics = JsonLines(run.metrics, keep_through=0)
    for step in (1, 2, 3):
        metrics.append({"step": step, "attempt": 1})
    follower = Follower(run)
    assert [row for _, row in follower.look().events] == metrics.rows
    metrics.close()
    again = JsonLines(run.metrics, keep_through=1)
    for step in (2, 3, 4):
        again.append({"step": step, "attempt": 2})
    look = follower.look()
    assert (look.rewound, look.kept) == (1, [{"step": 1, "attempt": 1}])
    assert [row for _, row in look.events] == again.rows[1:]


def test_the_same_rows_in_a_new_file_are_not_told_again(run: RunDirectory) -> None:
    JsonLines(run.metrics, keep_through=0).append({"step": 1})
    follower = Follower(run)
    assert len(follower.look().events) == 1
    JsonLines(run.metrics, keep_through=1).append({"step": 2})
    look = follower.look()
    assert (look.rewound, look.events) == (None, [("step", {"step": 2})])


def test_nothing_of_a_step_is_told_before_the_step(run: RunDirectory) -> None:
    """As when a row is written after the metrics were read and before the others are."""
    evaluations = JsonLines(run.path / "evaluations.jsonl", keep_through=0)
    alarms = JsonLines(run.path / "alarms.jsonl", keep_through=0)
    for step in (0, 2):
        evaluations.append({"step": step})
    for code in ("clamp", "reward-hacking"):
        alarms.append({"step": 2, "alarm": code, "message": "m", "advice": "a"})
    metrics = JsonLines(run.metrics, keep_through=0)
    metrics.append({"step": 1})
    follower = Follower(run)
    assert [(kind, row["step"]) for kind, row in follower.look().events] == [("evaluation", 0), ("step", 1)]
    metrics.append({"step": 2})
    assert [(kind, row.get("alarm")) for kind, row in follower.look().events] == [
        ("step", None), ("alarm", "clamp"), ("evaluation", None), ("alarm", "reward-hacking"),
    ]  # fmt: skip


def test_looking_opens_no_file_that_has_not_changed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    JsonLines(run.metrics, keep_through=0).append({"step": 1})
    follower = Follower(run)
    with run.lock():
        follower.look()
        opened, original = [], Path.open

        def watched(path: Path, *how: object, **more: object) -> object:
            opened.append(path)
            return original(path, *how, **more)  # type: ignore[call-overload]

        monkeypatch.setattr(Path, "open", watched)
        monkeypatch.setattr(RunDirectory, "read_record", lambda run: pytest.fail("read again"))
        assert follower.look().ending.state == "running"
        assert [path for path in opened if path.is_relative_to(run.path)] == []
        assert opened  # where the system tells who holds a lock


def test_a_run_counts_as_crashed_only_when_it_stays_without_a_holder(run: RunDirectory) -> None:
    follower = Follower(run, certain=3)
    states = [follower.look().ending.state for _ in range(2)]
    with run.lock():  # as by a resume, which lets go once between reading and running
        states.append(follower.look().ending.state)
    states += [follower.look().ending.state for _ in range(3)]
    assert states == ["running", "running", "running", "running", "running", "crashed"]


def test_attempts_and_endings_without_logs(tmp_path: Path) -> None:
    found = make_run(tmp_path, "bare")
    assert attempt_of(found) == 0
    assert ending_of(found, 0).state == "crashed"
    found.new_attempt()
    found.new_attempt()
    assert attempt_of(found) == 2


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending("running"), "running, after step 2 of 5"),
        (Ending("finished"), "finished after step 2 of 5"),
        (Ending("stopped", "SIGINT", 130), "stopped by SIGINT after step 2 of 5"),
        (Ending("stopped", "at once", 130), "stopped at once after step 2 of 5"),
        (Ending("failed", "rank 1 died", 7), "failed after step 2 of 5: rank 1 died"),
    ],
)
def test_an_ending_in_words(ending: Ending, words: str) -> None:
    assert describe(ending, 2, 5) == words
