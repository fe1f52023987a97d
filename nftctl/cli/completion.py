"""What TAB offers: profile names, run names, keys for `--set`, packaged scorers; and the scripts that ask for it.

Never reads more than folder entries and the schema. `python -m nftctl.cli.completion completions` writes the scripts
anew, as the program itself prints them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

RUNS = Path("runs")
SCRIPTS = {"bash": "nftctl.bash", "zsh": "_nftctl", "fish": "nftctl.fish"}
"""Shell -> file name under which that shell looks for our completion."""


def runs_folder() -> Path:
    """Where run names are looked up: the default of `job.run_dir`, or what the environment puts in its place."""
    return Path(os.environ.get("NFTCTL_JOB__RUN_DIR") or RUNS).expanduser()


def profile_names(incomplete: str) -> list[str]:
    """Bundled profiles, and TOML files and folders that the given text leads to."""
    return bundled_names(incomplete) + [path for path in _paths(incomplete) if path.endswith((".toml", "/"))]


def bundled_names(incomplete: str) -> list[str]:
    """Bundled profiles only."""
    from nftctl.profile.artifacts import bundled_profiles

    return [name for name in bundled_profiles() if name.startswith(incomplete)]


def checkpoint_names(incomplete: str) -> list[str]:
    """Names of runs, and folders that the given text leads to."""
    runs = sorted(path.parent.name for path in runs_folder().glob("*/run.json"))
    return [name for name in runs if name.startswith(incomplete)] + [p for p in _paths(incomplete) if p.endswith("/")]


def set_keys(incomplete: str) -> list[str]:
    """Every key of a profile, followed by the equals sign."""
    from nftctl.profile.outline import dotted_keys

    return [f"{key}=" for key in dotted_keys() if key.startswith(incomplete)]


def scorer_names(incomplete: str) -> list[str]:
    """Packaged scorers."""
    folder = Path(__file__).parents[1] / "reward" / "scorers"
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    return [name for name in names if name.startswith(incomplete)]


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Offers some of a few words."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return offered


def _paths(incomplete: str) -> Iterator[str]:
    folder, _, start = incomplete.rpartition("/")
    place = Path(folder or ("/" if incomplete.startswith("/") else ".")).expanduser()
    try:
        entries = sorted(place.iterdir())
    except OSError:
        return
    for path in entries:
        hidden = path.name.startswith(".") and not start.startswith(".")
        if path.name.startswith(start) and not hidden:
            name = incomplete[: len(incomplete) - len(start)] + path.name
            yield f"{name}/" if path.is_dir() else name


def script(shell: str) -> str:
    """The completion script for a shell of `SCRIPTS`, as `_NFTCTL_COMPLETE=source_SHELL nftctl` prints it.

    Blank lines around it are taken away: zsh reads `#compdef` on the first line only.
    """
    import subprocess

    env = os.environ | {"_NFTCTL_COMPLETE": f"source_{shell}"}
    answer = subprocess.run([sys.executable, "-m", "nftctl"], env=env, check=True, capture_output=True, text=True)
    return answer.stdout.strip() + "\n"


if __name__ == "__main__":
    for shell, name in SCRIPTS.items():
        Path(sys.argv[1], name).write_text(script(shell))
