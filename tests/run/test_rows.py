"""A file of rows holds each step once, and nothing that is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import orjson
import pytest

from nftctl.errors import CheckpointUnusable, TrainingFailed
from nftctl.run.rows import JsonLines, done_again, read_rows, require_finite


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "train/reward_mean": step / 10, **values}


def written(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Five steps, of which a checkpoint was made at the third."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, keep_through=0)
    for step in range(1, 6):
        lines.append(row(step, attempt=1))
    lines.close()
    return path


def test_a_resumed_run_writes_each_step_once(metrics: Path) -> None:
    lines = JsonLines(metrics, keep_through=3)
    assert [r["step"] for r in lines.rows] == [1, 2, 3]
    for step in (4, 5, 6):
        lines.append(row(step, attempt=2))
    lines.close()
    assert [(r["step"], r["attempt"]) for r in written(metrics)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert lines.rows == written(metrics)


@pytest.mark.parametrize(
    ("step", "steps", "rows"),
    [
        (3, "steps 4 to 5 had been taken {} are", "2 rows of metrics.jsonl are"),
        (4, "step 5 had been taken {} is", "1 row"),
    ],
)
def test_steps_that_are_done_again_are_named(metrics: Path, step: int, steps: str, rows: str) -> None:
    lines = JsonLines(metrics, keep_through=step)
    lines.close()
    said = done_again(lines, step)
    assert said.startswith(f"{steps.format('after that checkpoint and')} done again; {rows}")
    assert said.endswith(" replaced")


def test_where_no_step_is_done_again_nothing_is_said(metrics: Path) -> None:
    lines = JsonLines(metrics, keep_through=5)
    lines.close()
    assert done_again(lines, 5) == ""


def test_rows_are_in_the_file_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.append(row(1))
    assert written(tmp_path / "m.jsonl") == [row(1)]
    lines.close()


def test_what_a_crash_cut_off_is_left_out_and_overwritten(metrics: Path) -> None:
    whole = metrics.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        metrics.write_bytes(whole[:-cut] if cut > 1 else whole[:-2])
        assert [r["step"] for r in read_rows(metrics)] == [1, 2, 3, 4]
    lines = JsonLines(metrics, keep_through=4)
    lines.append(row(5, attempt=2))
    lines.close()
    assert [(r["step"], r["attempt"]) for r in written(metrics)] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]


@pytest.mark.parametrize("bad", [b"garbled \x00", b"", b"[1]", b'{"step": "2"}', b'{"a": 1}', b'{"step": 2'])
def test_a_damaged_line_is_refused_by_its_number_and_nothing_is_lost(metrics: Path, bad: bytes) -> None:
    lines = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([lines[0], bad, *lines[2:]]) + b"\n")
    before = metrics.read_bytes()
    for read in (lambda: read_rows(metrics), lambda: JsonLines(metrics, keep_through=5)):
        with pytest.raises(CheckpointUnusable, match=r"metrics\.jsonl:2: this line is no row"):
            read()
    assert metrics.read_bytes() == before


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_not_written(tmp_path: Path, bad: float) -> None:
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.append(row(1))
    with pytest.raises(TrainingFailed, match=r"step 2: not finite: a, b$"):
        lines.append(row(2, b=bad, a=bad, c=1.0))
    lines.append(row(2))
    lines.close()
    assert [r["step"] for r in written(tmp_path / "m.jsonl")] == [1, 2]


def test_numbers_survive_the_file_to_the_bit(tmp_path: Path) -> None:
    values = {str(n): float(v) for n, v in enumerate(np.random.default_rng(0).standard_normal(100) * 1e-7)}
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.append({"step": 1, **values})
    lines.close()
    assert written(tmp_path / "m.jsonl") == [{"step": 1, **values}]
    require_finite({"step": 1, "text": "nan", "count": 3})


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "absent.jsonl") == []


# ---- pictures
