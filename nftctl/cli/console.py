"""The one sink for everything a command prints: data to stdout, talk to stderr, and one JSON object with `--json`.

Owns colour and the form of messages. Messages are never boxed or wrapped, so that editors and grep find the place in
them. Refuses to put anything but the one object on stdout when `--json` is on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TextIO

import typer

from nftctl.errors import Difference, Finding

SCHEMA_VERSION = 1
"""Version of the JSON objects; raised when a key changes its meaning or disappears."""

COLOURS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "help": typer.colors.CYAN}


def wants_colour(stream: TextIO, env: Mapping[str, str]) -> bool:
    """NO_COLOR wins, then FORCE_COLOR, then whether the stream is a terminal that can show colour."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR"):
        return True
    return env.get("TERM") != "dumb" and stream.isatty()


class Console:
    """Where a command speaks. Example: `Console(json=True).result("validate", warnings, profile=...)`."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._colour = wants_colour(sys.stderr, os.environ)

    def data(self, text: str) -> None:
        """One line of what was asked for, to stdout; with `--json` the object stands for it."""
        if not self.json:
            print(text, flush=True)

    def say(self, text: str) -> None:
        """One line of talk, to stderr; `-q` silences it."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """One line that deserves attention, to stderr, also with `-q`."""
        print(f"{self._label('warning')}: {text}", file=sys.stderr, flush=True)

    def error(self, message: str, hint: str = "") -> None:
        """What went wrong and the next thing to do, to stderr."""
        print(f"{self._label('error')}: {message}", file=sys.stderr)
        if hint:
            print(f"{self._label('help')}: {hint}", file=sys.stderr)
        sys.stderr.flush()

    def findings(self, findings: Iterable[Finding]) -> None:
        """Findings as `file:line:column: error[code]: sentence`, to stderr."""
        for finding in findings:
            from nftctl.profile.diagnose import format_finding, printable  # only when there is something to say

            # What a base's tokenizer says of a prompt has not been through `diagnose`, which does this too.
            text = format_finding(replace(finding, message=printable(finding.message), help=printable(finding.help)))
            mark = f"{finding.severity}[{finding.code}]"
            print(text.replace(mark, self._paint(mark, finding.severity), 1), file=sys.stderr, flush=True)

    def differences(self, differences: Iterable[Difference]) -> None:
        """A table key / was / now / why, to stderr."""
        rows = [(d.key, shorten(d.was), shorten(d.now), d.why) for d in differences]
        for line in table([("key", "was", "now", "why"), *rows]):
            print(f"  {line}", file=sys.stderr)
        sys.stderr.flush()

    def result(self, command: str, diagnostics: Sequence[Finding] = (), *, exit_code: int = 0, **data: Any) -> None:
        """The one JSON object, to stdout; nothing without `--json`."""
        if not self.json:
            return
        from nftctl.run.canonical import pretty_bytes

        document = {
            "schema_version": SCHEMA_VERSION,
            "command": command,
            "ok": exit_code == 0,
            "exit_code": int(exit_code),
            "diagnostics": [asdict(finding) for finding in diagnostics],
            **data,
        }
        sys.stdout.write(pretty_bytes(document).decode())
        sys.stdout.flush()

    def _label(self, kind: str) -> str:
        return self._paint(kind, kind)

    def _paint(self, text: str, kind: str) -> str:
        return typer.style(text, fg=COLOURS[kind], bold=kind != "help") if self._colour else text


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns, two spaces apart, never wrapped."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shorten(value: object, limit: int = 44) -> str:
    """A value for people: hashes by their first 12 digits, long texts cut in the end."""
    text = value if isinstance(value, str) else show(value)
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def show(value: object) -> str:
    """A value as a profile would write it: `true`, `"text"`, `[1, 2]`, and `unset` for None."""
    import json

    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
