"""How a run looks: one plain line per step in a file, a display on a real terminal, silence with -q."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from nftctl.cli.console import Console
from nftctl.cli.display import picture, spark
from nftctl.cli.progress import PlainReporter, reporter_for
from nftctl.cli.view import View, clock

from .program import environment
from .terminal import plain, read_terminal

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


# ---- the display


def view() -> View:
    """A run at step 42 of 150 whose figures are easy to check."""
    found = View("first", samples_per_step=32)
    for step in range(39, 43):
        found.stepped({"step": step, "train/reward_mean": (step - 38) / 8, "timer/step": 0.5}, 150)
    stages = {"timer/sample": 0.25, "timer/prepare": 0.125, "timer/reward_exposed": 0.0, "timer/train": 0.125}
    losses = {"train/policy_loss": 1.75, "train/kl_loss": 0.0125, "train/grad_norm": 0.5}
    old = {"old/version": 41.0, "old/age": 1.0, "old/share": 0.06}
    found.row = {**found.row, **stages, **losses, **old}
    found.evaluated({"step": 0, "eval/reward": 0.471})
    found.evaluated({"step": 30, "eval/reward": 0.503})
    found.alert = "step 40: images-noisy: images grow noisy: fine detail of 0.2; look at samples/"
    found.seen = 0.0
    return found


def drawn(of: View, width: int, *, utf: bool = True) -> list[str]:
    """The picture without colour, line by line, without the spaces at their ends."""
    terminal = RichConsole(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    terminal.print(picture(of, width=width, utf=utf))
    return [line.rstrip() for line in terminal.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_display_in_80_columns() -> None:
    assert drawn(view(), 80) == [
        "╭─ first ──────────────────────────────────────────────────────────────────────╮",
        f"│ step      42/150  {'━' * 11}{'─' * 31}   28%  eta 0:54 │",
        "│ reward    0.5000  ▁▃▆█                                                       │",
        "│ held-out  0.4710 -> 0.5030  +0.0320  step 0 -> 30                            │",
        "│ loss      policy 1.75  kl 0.0125  grad norm 0.5                              │",
        "│ old       version 41  age 1  share kept 0.06                                 │",
        "│ stages    █████████████████████████████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░ │",
        "│           █ sample 50%  ▓ prepare 25%  ▒ reward 0%  ░ train 25%              │",
        "│ pace      0.50 s/step  64 samples/s                                          │",
        "│ ! step 40: images-noisy: images grow noisy: fine detail of 0.2; look at sam… │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
    ]


def test_without_block_characters_there_are_neither_bars_of_them_nor_a_frame() -> None:
    lines = drawn(view(), 80, utf=False)
    assert lines == [
        "first",
        f"step      42/150  {'#' * 12}{'.' * 34}   28%  eta 0:54",
        "reward    0.5000  between 0.1250 and 0.5000",
        "held-out  0.4710 -> 0.5030  +0.0320  step 0 -> 30",
        "loss      policy 1.75  kl 0.0125  grad norm 0.5",
        "old       version 41  age 1  share kept 0.06",
        "stages    sssssssssssssssssssssssssssssssssssppppppppppppppppptttttttttttttttttt",
        "          s sample 50%  p prepare 25%  r reward 0%  t train 25%",
        "pace      0.50 s/step  64 samples/s",
        "! step 40: images-noisy: images grow noisy: fine detail of 0.2; look at samples/",
    ]
    assert "".join(lines).isascii()


@pytest.mark.parametrize("utf", [True, False])
@pytest.mark.parametrize("width", [1, 5, 11, 20, 40, 59, 60, 80, 81, 300])
def test_the_display_fits_every_terminal(width: int, utf: bool) -> None:
    of = view()
    of.state, of.attempt = "running", 2
    lines = drawn(of, width, utf=utf)
    assert max(map(len, lines)) <= min(width, 100)
    assert len(lines) <= 12
    assert ("╭" in lines[0]) == (utf and width >= 60)
    if width >= 40:
        assert any("attempt 2" in line for line in lines)
        assert any("42/150" in line for line in lines)
    assert utf or "".join(lines).isascii()


def test_what_is_not_known_takes_no_line() -> None:
    found = View("first", total=150)
    assert drawn(found, 40) == ["first", f"step      0/150  {'─' * 17}    0%"]
    found.stepped({"step": 1}, 150)
    found.evaluated({"step": 0, "eval/reward": 0.25})
    assert drawn(found, 40)[2:] == ["held-out  0.2500  at step 0"]


def test_square_brackets_are_no_markup_and_line_ends_no_lines() -> None:
    found = view()
    found.alert, found.name = "step 1: [red]x[/red]\nstep 2", "[bold]"
    lines = drawn(found, 80)
    assert lines[0].startswith("╭─ [bold] ─")
    assert lines[-2] == f"│ {'! step 1: [red]x[/red] step 2'.ljust(76)} │"


def test_a_step_that_takes_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = view()
    found.seen = time.monotonic() - 75
    assert drawn(found, 80)[8].startswith("│ pace      0.50 s/step  64 samples/s  this step for 1:15")


# ---- on a pseudo-terminal

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
reporter.evaluated({"step": 3, "eval/reward": 0.5})
reporter.warn("look")
reporter.done()
reporter.done()
print("end", file=sys.stderr)
"""


def on_a_terminal(code: str, folder: Path, env: Mapping[str, str] | None = None) -> str:
    """What a program draws on a pseudo-terminal of 24 lines as its stderr."""
    settings = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code]
    return read_terminal(command, folder, environment(settings | dict(env or {})))


def test_a_display_on_a_terminal(tmp_path: Path) -> None:
    seen = on_a_terminal(DRAW, tmp_path)
    assert "starting [Ray]" in seen
    text = plain(seen)
    assert "3/3" in text
    assert "▁▅█" in text
    assert "0.5000  at step 3" in text
    assert "! look" in text
    # Said once each, in the scrollback; what is drawn is drawn again and again.
    for line in ("saved 2", "warning: look", "held-out reward 0.500 at step 3"):
        assert text.count(line) == 1
    assert text.index("warning: look") < text.rindex("3/3")
    assert seen.rstrip().endswith("end")
    # The cursor is hidden while it is drawn, and is back at the end.
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1"}, True),
    ],
)
def test_colour_is_as_the_environment_wants_it(tmp_path: Path, env: dict[str, str], coloured: bool) -> None:
    seen = on_a_terminal(DRAW, tmp_path, env)
    assert ("\x1b[32m" in seen) == coloured
    assert "3/3" in plain(seen)


def test_a_terminal_of_another_encoding_gets_no_blocks(tmp_path: Path) -> None:
    seen = on_a_terminal(DRAW, tmp_path, {"PYTHONIOENCODING": "ascii:backslashreplace"})
    assert seen.isascii()
    assert "\\u" not in seen
    assert "####" in plain(seen)


PLAIN = """
from nftctl.cli.console import Console
from nftctl.cli.progress import PlainReporter, reporter_for
import sys
reporter = reporter_for(Console(quiet="quiet" in sys.argv))
assert type(reporter) is PlainReporter
reporter.step({"step": 1, "train/reward_mean": 0.5}, 3)
assert "rich" not in sys.modules
"""


def test_a_dumb_terminal_gets_lines(tmp_path: Path) -> None:
    assert on_a_terminal(PLAIN, tmp_path, {"TERM": "dumb"}) == "step 1/3  reward 0.5\r\n"


def test_a_quiet_terminal_gets_none(tmp_path: Path) -> None:
    assert on_a_terminal(PLAIN.replace('"quiet" in sys.argv', "True"), tmp_path) == ""
