"""The folder of a run's checkpoints: step names, what is complete, what was cut off, what may be removed.

`step_000100` is a checkpoint, `step_000100.partial` one that is being (or was never fully) written. Refuses to remove
the newest complete checkpoint, and never takes an older one for the newest.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from nftctl.run.manifest import MANIFEST_NAME, verify

_COMPLETE = re.compile(r"step_(\d{6,})")
_PARTIAL = re.compile(r"step_(\d{6,})\.partial")
_LEFTOVER = re.compile(r"\.(?:pruned|replaced)-step_\d{6,}")


def step_name(step: int) -> str:
    """Folder name of a step. Example: 100 gives `step_000100`."""
    return f"step_{step:06d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; what an earlier attempt left there is removed."""
    folder = checkpoints / f"{step_name(step)}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def list_steps(checkpoints: Path) -> list[tuple[int, Path]]:
    """Step folders that carry a final name, oldest first, whether or not they are whole."""
    return _matching(checkpoints, _COMPLETE)


def list_partials(checkpoints: Path) -> list[tuple[int, Path]]:
    """Folders of checkpoints that were not written to the end, oldest first."""
    return _matching(checkpoints, _PARTIAL)


def newest_complete(checkpoints: Path) -> Path | None:
    """The newest checkpoint whose every file verifies, or None."""
    return next((path for _, path in reversed(list_steps(checkpoints)) if not verify(path)), None)


def discard_partials(checkpoints: Path) -> list[Path]:
    """Remove what interrupted writing or pruning left behind. Only for the one process that holds the run's lock."""
    gone = [path for _, path in list_partials(checkpoints)] + [path for _, path in _matching(checkpoints, _LEFTOVER)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return gone


def set_aside_newer(checkpoints: Path, step: int) -> list[Path]:
    """Give checkpoints beyond `step` a name that no command takes for one. For damaged ones that a resume went behind:
    nothing is deleted, and the run's newest checkpoint is again the one it goes on from."""
    moved = []
    for number, path in list_steps(checkpoints):
        if number > step:
            target = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            moved.append(path.rename(target))
    return moved


def prune(checkpoints: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Remove old checkpoints and return them. Call it when the newest one is durable.

    Kept: the newest `keep_last` (at least one) that have a manifest, those whose step is a multiple of `keep_every`
    (0: none), and whatever has no manifest, which is not ours to judge.
    """
    have = [(step, path) for step, path in list_steps(checkpoints) if (path / MANIFEST_NAME).is_file()]
    old = have[: -max(keep_last, 1)]
    gone = [path for step, path in old if not keep_every or step % keep_every]
    for path in gone:
        # Renamed first, so that a removal cut short never looks like a damaged checkpoint.
        doomed = path.with_name(f".pruned-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    return gone


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    real = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = [(path, match) for path in real if (match := pattern.fullmatch(path.name))]
    return sorted((int(match.group(1)) if match.groups() else 0, path) for path, match in found)
