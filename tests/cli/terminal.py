"""A pseudo-terminal for what only shows on one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE_S = 60


def read_terminal(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    code: int = 0,
    stdout: bool = False,
    meanwhile: Callable[[subprocess.Popen[bytes], str], tuple[int, int] | None] = lambda process, seen: None,
    size: tuple[int, int] = (24, 100),
) -> str:
    """What `command` writes to a terminal of (lines, columns), which is its stderr, and its stdout where wanted.

    `meanwhile` is called whenever something came, with all that has come so far; it may give the terminal another size.
    """
    master, slave = pty.openpty()
    _resize(slave, size)
    # The terminal's own size counts, not that of the one which the tests are run on.
    own = {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, cwd=folder, env=own, stdin=subprocess.DEVNULL, stderr=slave,
        stdout=slave if stdout else subprocess.PIPE,
    )  # fmt: skip
    os.close(slave)
    seen = b""
    while select.select([master], [], [], PATIENCE_S)[0]:
        try:
            seen += os.read(master, 65536)
        except OSError:  # nobody writes to it any more
            break
        if other := meanwhile(process, seen.decode(errors="replace")):
            _resize(master, other)
    os.close(master)
    assert process.wait(timeout=PATIENCE_S) == code, seen.decode(errors="replace")
    return seen.decode()


def _resize(terminal: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def plain(seen: str) -> str:
    """Without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
