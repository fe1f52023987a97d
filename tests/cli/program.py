"""Runs the real program in a process of its own, away from whatever the surroundings set.

Most of these processes are forked from one that has imported the program, which is what nearly all of a start costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import forks

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "diffusers", "peft", "transformers")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without nftctl's variables and without anything that decides on colour."""
    dropped = ("NFTCTL_", "_NFTCTL", "NO_COLOR", "FORCE_COLOR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(extra or {})


def nftctl(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "", started: bool = False
) -> subprocess.CompletedProcess[str]:
    """`nftctl ARGUMENTS` in the folder `cwd`; `started`: by a new interpreter in any case."""
    words, variables = list(map(str, arguments)), environment(env)
    if not started and forks.forkable(variables, stdin):
        return forks.run(words, cwd=cwd, env=variables, stdin=stdin, timeout=120)
    command = [sys.executable, "-m", "nftctl", *words]
    return subprocess.run(
        command, cwd=cwd, env=variables, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def the_object(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object on stdout; fails when there is anything else on it."""
    document = json.loads(answer.stdout)
    assert isinstance(document, dict)
    assert answer.stdout.startswith("{\n")
    assert answer.stdout.endswith("\n}\n")
    assert "\x1b" not in answer.stdout
    assert document["ok"] == (answer.returncode == 0)
    assert document["exit_code"] == answer.returncode
    return document


def python(
    code: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A short Python program beside the package."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=120, check=False
    )
