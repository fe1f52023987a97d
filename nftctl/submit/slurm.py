"""A run as one sbatch script: its own Ray cluster over the nodes of the job, requeued when Slurm wants them back.

Owns the script's text and every quote in it: values stand in single words of the shell, the profile in a here-document
that nothing expands, directives in lines that no shell reads. Refuses what cannot stand on one line.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nftctl.errors import UsageRefused
from nftctl.profile.diagnose import printable
from nftctl.submit.portable import without_settings
from nftctl.submit.size import Size
from nftctl.submit.template import fill

EARLY_S = 60
"""So much sooner than it was asked to Slurm may send a signal."""
ATTEMPTS = 5
"""After so many that left no checkpoint at all, a job is not requeued: it is given too little time for one step."""
TEST_TIMEOUT_S = 30.0
"""Longest wait for `sbatch --test-only`."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the profile does not say. `folder`: from there relative paths count; `runs`: that of the runs."""

    folder: str
    runs: str = "runs"
    grace_s: int = 120
    memory: str = ""
    directives: Sequence[str] = ()
    setup: Sequence[str] = ()


def script(profile: str, name: str, size: Size, tokens: Sequence[str], wishes: Wishes) -> str:
    """The text of the sbatch script. `profile` is `portable.profile_text`, `name` the run's, `tokens` variables."""
    for option, lines in (("--sbatch", wishes.directives), ("--setup", wishes.setup)):
        for line in lines:
            refuse_broken_line(option, line)
    for line in wishes.directives:
        if not line.startswith("-"):
            raise UsageRefused(f'--sbatch "{line}" is no option of sbatch', hint='for example --sbatch "--partition=a"')
    refuse_short(wishes.directives, wishes.grace_s)
    gpus = [f"#SBATCH --gpus-per-node={size.gpus}"] if size.gpus else []
    memory = [f"#SBATCH --mem={wishes.memory}"] if wishes.memory else []
    return fill(
        "slurm.template",
        {
            "title": f"Run {printable(name)} of nftctl on Slurm: {size.describe()}",
            "why": f"#\n# {size.why}" if size.why else "",
            "job_name": re.sub(r"[^A-Za-z0-9._-]", "_", name),
            "nodes": str(size.nodes),
            "cpus": str(size.cpus),
            "gpus": str(size.gpus),
            "directives": "\n".join([*gpus, *memory]),
            "grace": str(wishes.grace_s),
            "extra": "\n".join(f"#SBATCH {line}" for line in wishes.directives),
            "folder": shlex.quote(wishes.folder),
            "checkpoints": shlex.quote(str(Path(wishes.runs) / name / "checkpoints")),
            "attempts": str(ATTEMPTS),
            "clear": without_settings(tokens),
            "setup": _relaxed(wishes.setup),
            "profile": profile.rstrip("\n"),
            "mark": mark_outside(profile),
        },
    )


def _relaxed(lines: Sequence[str]) -> str:
    """The lines of --setup, which may read variables that nobody set, as scripts that activate an environment do."""
    return "\n".join(["set +u", *lines, "set -u"]) if lines else ""


def refuse_broken_line(option: str, line: str) -> None:
    """A line break would begin a line of another kind."""
    if not line.strip() or not line.isprintable():
        raise UsageRefused(f'{option} "{printable(line)}" is not one line of text', hint=f"give {option} once per line")


def refuse_short(directives: Sequence[str], grace_s: int) -> None:
    """A time limit within which a job hears nothing but the word to stop, and would go back into the queue for ever."""
    limit = time_limit(directives)
    if limit is not None and limit <= grace_s + EARLY_S:
        raise UsageRefused(
            f"--sbatch gives the job {limit} s, and {grace_s} s before their end (--grace), or up to {EARLY_S} s "
            "sooner, it is told to stop: no step would ever be taken",
            hint="give it more --time, or a shorter --grace",
        )


def time_limit(directives: Sequence[str]) -> int | None:
    """Seconds of the last --time among options of sbatch; None without one, and for what sbatch may judge by itself."""
    words = [word for line in directives for word in line.split()]
    found = ""
    for number, word in enumerate(words):
        if word in ("--time", "-t"):
            found = " ".join(words[number + 1 : number + 2])
        elif match := re.fullmatch(r"--time=(.+)|-t(?!-)(.+)", word):
            found = match[1] or match[2]
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", found)
    if not match:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    first, second, third = parts
    if days is None and third is None:  # minutes, or minutes and seconds
        first, second, third = 0, first, second
    return (((days or 0) * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0) or None


def mark_outside(text: str, word: str = "END_OF_PROFILE") -> str:
    """A word that ends a here-document and is no line of `text`."""
    mark = word
    while mark in text.splitlines():
        mark += "_"
    return mark


def test_only(text: str) -> tuple[bool, str] | None:
    """What `sbatch --test-only` says to the script, which submits nothing: accepted, words. None without an sbatch."""
    program = shutil.which("sbatch")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--test-only"], input=text, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"sbatch --test-only: {error}"
    return answer.returncode == 0, (answer.stderr or answer.stdout).strip() or f"ended with {answer.returncode}"
