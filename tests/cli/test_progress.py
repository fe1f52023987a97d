"""How a run looks: one plain line per step in a file, one live line on a real terminal, silence with -q."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from nftctl.cli.console import Console
from nftctl.cli.progress import PlainReporter, clock, reporter_for, spark

from .program import environment

ROW = {"step": 3, "train/reward_mean": 0.5531, "train/loss": 4.99812, "timer/step": 0.5}


def test_a_plain_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = reporter_for(Console())
    assert type(reporter) is PlainReporter
    reporter.note("starting Ray")
    reporter.step(ROW, 150)
    reporter.step(ROW | {"step": 4, "timer/step": 1.5}, 150)
    reporter.done()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "starting Ray",
        "step 3/150  reward 0.5531  loss 4.998  0.50 s/step  eta 1:14",
        "step 4/150  reward 0.5531  loss 4.998  1.00 s/step  eta 2:26",
    ]
    assert reporter.last_step == 4


def test_quiet_leaves_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = reporter_for(Console(quiet=True))
    reporter.note("starting")
    reporter.step(ROW, 5)
    reporter.warn("every reward is the same")
    assert capsys.readouterr().err == "warning: every reward is the same\n"


def test_a_row_without_figures_still_counts(capsys: pytest.CaptureFixture[str]) -> None:
    PlainReporter(Console()).step({"step": 1}, 2)
    assert capsys.readouterr().err == "step 1/2  \n"


def test_the_spark_line_spans_its_values() -> None:
    assert spark([0.0, 0.5, 1.0], "utf-8") == "▁▅█"
    assert spark([2.0, 2.0], "UTF-8") == "▁▁"
    assert spark([0.0, 1.0], "ascii") == ""
    assert spark([], "utf-8") == ""


def test_the_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 84, 3600, 7389)] == ["0:00", "1:00", "1:24", "1:00:00", "2:03:09"]


DRAW = """
from nftctl.cli.console import Console
from nftctl.cli.progress import LiveReporter, reporter_for
import sys
reporter = reporter_for(Console())
assert type(reporter) is LiveReporter
assert "rich" not in sys.modules
reporter.note("starting [Ray]")
for step in range(1, 4):
    reporter.step({"step": step, "train/reward_mean": step / 4, "train/loss": 1.0, "timer/step": 0.1}, 3)
    reporter.note(f"saved {step}")
reporter.warn("look")
reporter.done()
reporter.done()
print("end", file=sys.stderr)
"""


def on_a_terminal(code: str, folder: Path) -> str:
    """What a program draws on a pseudo-terminal as its stderr."""
    master, slave = pty.openpty()
    env = environment({"TERM": "xterm-256color", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"})
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=env, stderr=slave, stdout=subprocess.PIPE)
    os.close(slave)
    seen = b""
    while select.select([master], [], [], 60)[0]:
        try:
            seen += os.read(master, 65536)
        except OSError:
            break
        if not seen:
            break
    os.close(master)
    assert process.wait(timeout=60) == 0, seen.decode()
    return seen.decode()


def test_a_live_line_on_a_terminal(tmp_path: Path) -> None:
    seen = on_a_terminal(DRAW, tmp_path)
    assert "starting [Ray]" in seen
    assert "3/3" in seen
    assert "▁▅█" in seen
    assert "saved 2" in seen
    assert "warning: look" in seen
    assert seen.rstrip().endswith("end")
