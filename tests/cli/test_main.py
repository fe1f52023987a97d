"""Every way a command can end becomes an exit code, a message with a next step, and one JSON object."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nftctl.cli.console import Console, shorten, show, table, wants_colour
from nftctl.errors import Difference, Finding

from .program import environment, nftctl, python, the_object
from .terminal import read_terminal

RAISE = """
import sys
import nftctl.cli.main as program
from nftctl.errors import *
def ending(**kwargs): {body}
program.app = ending
sys.argv = ["nftctl", *sys.argv[1:]]
sys.exit(program.main())
"""

ENDINGS = [
    ("raise UsageRefused('no such thing', hint='write another')", 2, "help: write another"),
    ("raise ProfileRefused([Finding('rule', 'k', 'wrong', origin='p.toml', line=3)])", 3, "p.toml:3: error[rule]"),
    ("raise RewardFailed('the service is gone')", 4, "error: the service is gone"),
    ("raise CheckpointUnusable('cut off')", 5, "error: cut off"),
    ("raise ResumeRefused('changed', [Difference('rl.beta', 1.0, 2.0, 'it matters')])", 6, "rl.beta  1.0  2.0  it"),
    ("raise TrainingFailed('rank 2 died', rank=2, log='/logs/rank_2.log')", 7, "log: /logs/rank_2.log"),
    ("raise KeyboardInterrupt", 130, "interrupted"),
    ("from nftctl.cli.signals import Stopped; raise Stopped(15)", 143, "stopped at once by SIGTERM"),
    ("raise ZeroDivisionError('secret sauce')", 1, "a bug in nftctl: ZeroDivisionError: secret sauce"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "code", "said"), ENDINGS, ids=[str(code) for _, code, _ in ENDINGS])
def test_an_ending_has_its_code_and_its_words(tmp_path: Path, body: str, code: int, said: str) -> None:
    answer = python(RAISE.format(body=body), "launch", "--json", cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert answer.returncode == code
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    document = the_object(answer)
    assert (document["command"], document["exit_code"]) == ("launch", code)
    assert document["error"]["message"]


def test_a_refused_resume_lists_differences_in_json(tmp_path: Path) -> None:
    document = the_object(python(RAISE.format(body=ENDINGS[4][0]), "resume", "--json", cwd=tmp_path))
    assert document["error"]["differences"] == [{"key": "rl.beta", "was": 1.0, "now": 2.0, "why": "it matters"}]


def test_a_bug_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    body = ENDINGS[-1][0]
    answer = python(RAISE.format(body=body), "launch", cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    (log,) = tmp_path.glob("nftctl-*.log")
    assert str(log) in answer.stderr
    assert "NFTCTL_DEBUG=1" in answer.stderr
    assert "ZeroDivisionError: secret sauce" in log.read_text()


def test_debug_prints_the_traceback_and_writes_no_file(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path), "NFTCTL_DEBUG": "1"}
    answer = python(RAISE.format(body=ENDINGS[-1][0]), "launch", cwd=tmp_path, env=env)
    assert answer.returncode == 1
    assert "Traceback (most recent call last)" in answer.stderr
    assert list(tmp_path.glob("*.log")) == []


def test_a_closed_pipe_is_no_bug(tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m nftctl validate --rules | true"
    answer = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0
    assert "Traceback" not in answer.stderr
    assert "bug" not in answer.stderr


class Screen:
    """A stream that says whether it is a terminal."""

    def __init__(self, tty: bool) -> None:
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize(
    ("tty", "env", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_who_wants_colour(tty: bool, env: dict[str, str], expected: bool) -> None:
    assert wants_colour(Screen(tty), env) is expected  # type: ignore[arg-type]


def test_colour_marks_the_severity_and_nothing_else(tmp_path: Path) -> None:
    plain = nftctl("validate", "--set", "rl.beta=0", cwd=tmp_path)
    coloured = nftctl("validate", "--set", "rl.beta=0", cwd=tmp_path, env={"FORCE_COLOR": "1"})
    assert "\x1b" not in plain.stderr + plain.stdout
    assert "\x1b[31m\x1b[1merror[" in coloured.stderr
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.stderr) == plain.stderr


def test_findings_are_never_wrapped_or_boxed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = Finding(
        "rule", "rl.beta", "word " * 100 + "end", help="try " * 60, origin="deep/" * 40 + "p.toml", line=1, column=2
    )
    Console().findings([long])
    first, second, rest = capsys.readouterr().err.split("\n")
    assert first == f"{long.origin}:1:2: error[rule]: {long.message}"
    assert second == f"  help: {long.help}"
    assert rest == ""


def test_control_characters_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Console().findings(
        [Finding("rule", "k", "\x1b[31mred\x07 \u2028\n\u00e9", help="a\tb", origin="p", line=1, column=1)]
    )
    assert capsys.readouterr().err == "p:1:1: error[rule]: \\x1b[31mred\\x07 \\u2028\\n\u00e9\n  help: a\\tb\n"


def test_differences_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    hashes = ("ab" * 32, "cd" * 32)
    Console().differences(
        [Difference("rl.beta", 1.0, 2.0, "sharpness"), Difference("base.fingerprint", *hashes, "weights")]
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "  key               was           now           why",
        "  rl.beta           1.0           2.0           sharpness",
        "  base.fingerprint  abababababab  cdcdcdcdcdcd  weights",
    ]


def test_quiet_keeps_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.say("chatter")
    console.warn("look")
    console.error("broken", "mend it")
    console.data("asked for")
    out, err = capsys.readouterr()
    assert out == "asked for\n"
    assert err == "warning: look\nerror: broken\nhelp: mend it\n"


def test_json_takes_the_place_of_data(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(json=True)
    console.data("for people")
    console.result("validate", extra=1)
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema_version": 1, "command": "validate", "ok": True, "exit_code": 0, "diagnostics": [], "extra": 1,
    }  # fmt: skip


def test_numbers_that_are_not_finite_never_become_json() -> None:
    with pytest.raises(ValueError, match="only finite"):
        Console(json=True).result("launch", summary={"loss": float("nan")})


def test_values_for_people() -> None:
    assert [show(v) for v in (None, True, "a b", [1, 2.5], {"k": 1})] == [
        "unset",
        "true",
        '"a b"',
        "[1, 2.5]",
        '{"k": 1}',
    ]
    assert shorten("f" * 64) == "f" * 12
    assert shorten("x" * 80) == "x" * 41 + "..."
    assert table([("a", "bb"), ("ccc", "d")]) == ["a    bb", "ccc  d"]
    assert table([]) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["launch", "profile.toml"], "nftctl launch: loading\r\n"),
        (["launch", "profile.toml", "--quiet"], ""),
        (["launch", "--help"], ""),
        (["validate", "profile.toml"], ""),
        ([], ""),
    ],
)
def test_a_long_command_speaks_on_a_terminal_before_it_loads_anything(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit(7)\n")  # where loading would begin
    command, env = [sys.executable, "-m", "nftctl", *arguments], environment({"PYTHONPATH": str(tmp_path)})
    assert read_terminal(command, tmp_path, env, code=7) == expected
    apart = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (apart.returncode, apart.stderr) == (7, "")
