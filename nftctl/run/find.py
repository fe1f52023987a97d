"""From what a person calls a run to its folder. Reads names alone; refuses what is no run, and says which there are."""

from __future__ import annotations

import difflib
from pathlib import Path

from nftctl.errors import CheckpointUnusable
from nftctl.run.directory import RunDirectory


def find_run(target: str, runs: Path) -> RunDirectory:
    """The run that `target` names: a run folder, a folder of checkpoints in it, or a run's name below `runs`.

    Raises CheckpointUnusable when there is none, or when it is not whole.
    """
    try:
        for path in (Path(target).expanduser(), runs / target):
            if path.is_dir():
                return RunDirectory.open(_run_of(path))
        if Path(target).expanduser().exists():
            raise CheckpointUnusable(f"{target} is a file, not a run folder")
    except (OSError, RuntimeError, ValueError):
        pass  # too long for a name, of a user who is not there: no name of anything
    known = sorted(path.parent.name for path in runs.glob("*/run.json"))
    close = difflib.get_close_matches(target, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"runs below {runs}: {', '.join(known) or 'none'}"
    raise CheckpointUnusable(f"no run folder and no run named {target}", hint=hint)


def _run_of(path: Path) -> Path:
    """The run that a folder is, or that it belongs to as its checkpoints or one of them."""
    resolved = path.resolve()
    for above in (resolved.parent, resolved.parent.parent):
        inside = resolved.relative_to(above).parts[0] == "checkpoints"
        if inside and (above / "run.json").is_file() and not (path / "run.json").is_file():
            return above
    return path
