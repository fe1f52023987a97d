"""How this program starts a process of its own: with the interpreter and from the folder that it is from itself."""

from __future__ import annotations

import sys
from pathlib import Path


def folder() -> Path:
    """Where this process has its nftctl from."""
    return Path(__file__).resolve().parent


def command(module: str, *words: str) -> list[str]:
    """The command line that runs one of our modules.

    `python -m` looks in the working folder first, where another nftctl may lie, or a file that is called like a module
    of somebody's. So it does not, unless this program is from there.
    """
    flags = [] if Path.cwd() == folder().parent else ["-P"]
    return [sys.executable, *flags, "-m", module, *words]
