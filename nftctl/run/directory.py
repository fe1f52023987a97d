"""The folder of a run: what lies where, who may write to it, and how a command line names a checkpoint in it.

    runs/<name>/  profile.toml · profile.resolved.json · run.json · metrics.jsonl · samples/ · .lock
                  checkpoints/step_000100/ · checkpoints/latest · logs/attempt_1/ · logs/latest

Refuses to reuse a folder, to open one that is not a run, and to pass over a newest checkpoint that is not whole.
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nftctl.errors import CheckpointUnusable
from nftctl.run.canonical import pretty_bytes
from nftctl.run.checkpoints import list_partials, list_steps, newest_complete
from nftctl.run.disk import atomic_write, cure, point_link, sync_folder
from nftctl.run.manifest import in_words, verify

__all__ = [
    "RunDirectory",
    "atomic_write",
    "begin_again",
    "find_checkpoint",
    "go_on",
    "refuse_impossible",
    "refuse_used",
]

_STEP_FOLDER = re.compile(r"step_\d+(\.partial)?")
_ATTEMPT = re.compile(r"attempt_(\d+)")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run on disk. Example: `RunDirectory.open(Path("runs/tiny"))`."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run, which is the name of its folder."""
        return self.path.name

    @property
    def profile_toml(self) -> Path:
        """The profile as it was given, byte for byte."""
        return self.path / "profile.toml"

    @property
    def resolved_json(self) -> Path:
        """Every value the run uses, defaults included."""
        return self.path / "profile.resolved.json"

    @property
    def run_json(self) -> Path:
        """Identity, versions and command line."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON row per step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Image grids."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Step folders and the `latest` link."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """One folder per attempt and the `latest` link."""
        return self.path / "logs"

    @classmethod
    def create(
        cls, parent: Path, name: str, *, profile_text: str, resolved: Mapping[str, Any], record: Mapping[str, Any]
    ) -> RunDirectory:
        """Make the folder of a new run. run.json is written last, so a folder that has one is whole.

        Raises CheckpointUnusable when the folder is in use already or cannot be made.
        """
        if name in {"", ".", ".."} or "/" in name or "\0" in name:
            raise CheckpointUnusable(f"{name!r} cannot be the name of a folder", hint="choose another --name")
        run = cls(parent / name)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _claim(run.path)
            for folder in (run.samples, run.checkpoints, run.logs):
                folder.mkdir()
            (run.path / ".lock").touch()
            atomic_write(run.profile_toml, profile_text.encode())
            atomic_write(run.resolved_json, pretty_bytes(resolved))
            atomic_write(run.run_json, pretty_bytes(record))
            sync_folder(parent)
        except OSError as error:
            raise CheckpointUnusable(f"cannot create {run.path}: {error.strerror}", hint=cure(error)) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run. Raises CheckpointUnusable when a part that every run has is missing."""
        run = cls(path)
        missing = [f.name for f in (run.run_json, run.resolved_json, run.profile_toml) if not f.is_file()]
        if missing:
            raise CheckpointUnusable(
                f"{path} is not a run folder: no {', no '.join(missing)}",
                hint="a checkpoint is resumed from inside its run folder: RUN/checkpoints/step_000100",
            )
        return run

    def read_record(self) -> dict[str, Any]:
        """The content of run.json. Raises CheckpointUnusable when it is damaged."""
        return _read_json(self.run_json)

    def read_resolved(self) -> dict[str, Any]:
        """The content of profile.resolved.json. Raises CheckpointUnusable when it is damaged."""
        return _read_json(self.resolved_json)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process. Raises CheckpointUnusable at once when a live process holds it."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise _running(self.path, _holder(self.path)) from error
        except OSError as error:
            raise CheckpointUnusable(f"cannot lock {self.path}: {error.strerror}", hint=cure(error)) from error
        try:
            yield
        finally:
            lock.release()

    def holder(self) -> str:
        """The live process that holds the run, in words; empty when none does. Writes nothing."""
        return _holder(self.path)

    def retire(self) -> Path:
        """Move a run that never had a checkpoint out of the way, whole: `<name>.unsaved-1`. Call it under the lock."""
        numbers = range(1, 10_000)
        target = next(p for n in numbers if not (p := self.path.with_name(f"{self.name}.unsaved-{n}")).exists())
        self.path.rename(target)
        sync_folder(target.parent)
        return target

    def new_attempt(self) -> Path:
        """A fresh folder for the logs of this launch or resume; `logs/latest` points at it."""
        self.logs.mkdir(exist_ok=True)
        numbers = [int(m.group(1)) for path in self.logs.iterdir() if (m := _ATTEMPT.fullmatch(path.name))]
        folder = self.logs / f"attempt_{max(numbers, default=0) + 1}"
        folder.mkdir()
        point_link(self.logs / "latest", folder.name)
        return folder


def find_checkpoint(target: str, runs: Path) -> tuple[RunDirectory, Path]:
    """The run and the checkpoint that `target` names: a step folder, a checkpoints folder, a run folder, or a run's
    name below `runs`.

    Presence and sizes are checked, not contents. Raises CheckpointUnusable when nothing is there, or when the one that
    is meant is incomplete; the newest complete one is then named, never taken.
    """
    path = _locate(target, runs)
    if _STEP_FOLDER.fullmatch(path.name):
        run = RunDirectory.open(path.parent.parent)
        _refuse_incomplete(run, path, asked_for=True)
        return run, path
    run = RunDirectory.open(path.parent if path.name == "checkpoints" else path)
    complete, cut_off = list_steps(run.checkpoints), list_partials(run.checkpoints)
    if not complete and (holder := _holder(run.path)):
        raise _running(run.path, holder, " and has no checkpoint yet")
    if not complete and not cut_off:
        raise CheckpointUnusable(f"{run.path} has no checkpoint yet", hint=begin_again(run))
    # A cut-off folder counts as the newest only beyond the last one that was put into place.
    newest = max(complete[-1:] + cut_off[-1:], key=lambda item: (item[0], not item[1].name.endswith(".partial")))[1]
    _refuse_incomplete(run, newest, asked_for=False)
    return run, newest


def begin_again(run: RunDirectory) -> str:
    """The command that begins a run without a checkpoint again, from what was typed, so that no override is lost.

    It works as it stands: it keeps the name where `--auto-resume` can, and it is for the folder in which it was typed.
    """
    record, job = run.read_record(), run.read_resolved().get("job", {})
    typed = record.get("argv")
    if not isinstance(typed, list) or len(typed) < 2:
        words = ["launch", str(run.profile_toml), "--name", run.name, "--run-dir", str(run.path.parent)]
        return f"begin again under the same name with: {shlex.join(['nftctl', *words, '--auto-resume'])}"
    words = list(map(str, typed[1:]))
    # What came from stdin is gone, and the run has kept it; from there again, what it extends is where it was.
    kept = f" < {shlex.quote(str(run.profile_toml.absolute()))}" if "-" in words else ""
    if record.get("parent"):  # a fork is begun by `resume`, which cannot take over a folder
        words, under = _under_free_name(words, run.path), " under another name"
    elif job.get("name"):
        words, under = [*words, *(["--auto-resume"] if "--auto-resume" not in words else [])], " under the same name"
    else:
        under = ""  # the name had the time in it, and the next one has another
    return f"begin again{under} with: {_from_where(run.path, job.get('run_dir'))}{shlex.join(['nftctl', *words])}{kept}"


def _under_free_name(words: list[str], path: Path) -> list[str]:
    """The words of a fork, with a name that no folder beside `path` has."""
    numbers = range(2, 10_000)
    name = next(n for i in numbers if not os.path.lexists(path.with_name(n := f"{path.name}-{i}")))
    values = [i + 1 for i, word in enumerate(words) if word == "--fork"]
    return [
        name if i in values else f"--fork={name}" if word.startswith("--fork=") else word
        for i, word in enumerate(words)
    ]


def _from_where(path: Path, run_dir: object) -> str:
    """`cd FOLDER && ` where the command of the run at `path` was typed elsewhere; empty where that is not known."""
    tail = Path(str(run_dir), path.name).parts
    whole = path.absolute().parts
    if run_dir is None or not 0 < len(tail) < len(whole) or whole[-len(tail) :] != tail:
        return ""
    folder = Path(*whole[: -len(tail)])
    return "" if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && "


def go_on(path: Path) -> str:
    """The command that goes on with the run at `path`; empty when it is no run, or has no complete checkpoint.

    Presence and sizes are checked, not contents.
    """
    try:
        find_checkpoint(str(path), path.parent)
    except CheckpointUnusable:
        steps = list_steps(path / "checkpoints") if _is_run(path) else []
        whole = next((step for _, step in reversed(steps) if not verify(step, hashes=False)), None)
        return f"nftctl resume {shlex.quote(str(whole))}" if whole else ""
    return f"nftctl resume {shlex.quote(str(path))}"


def _is_run(path: Path) -> bool:
    try:
        RunDirectory.open(path)
    except CheckpointUnusable:
        return False
    return True


def _locate(target: str, runs: Path) -> Path:
    given = Path(target).expanduser()
    for path in (given, runs / target):
        if path.is_dir():
            # Resolved, so that `checkpoints/latest` and `.` have the names of what they stand for.
            return path.resolve() if path.is_symlink() or path.name in {"", ".."} else path
    if given.exists():
        raise CheckpointUnusable(f"{target} is a file, not a checkpoint folder")
    known = sorted(path.parent.name for path in runs.glob("*/run.json"))
    close = difflib.get_close_matches(target, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"runs below {runs}: {', '.join(known) or 'none'}"
    raise CheckpointUnusable(f"no checkpoint, run folder or run named {target}", hint=hint)


def _refuse_incomplete(run: RunDirectory, path: Path, *, asked_for: bool) -> None:
    cut_off = path.name.endswith(".partial")
    # "X is not a complete checkpoint: no manifest.json" would say X twice.
    problems = ["its writing was cut off"] if cut_off else verify(path, hashes=False)
    problems = [text.removeprefix(f"{path} is not a complete checkpoint: ") for text in problems]
    if not problems:
        return
    which = "checkpoint" if asked_for else "the newest checkpoint"
    whole = newest_complete(run.checkpoints)
    hint = (
        f"go on from the newest complete one: nftctl resume {shlex.quote(str(whole))}"
        if whole
        else "no complete checkpoint is left in this run"
    )
    if not list_steps(run.checkpoints):  # nothing was ever whole, so nothing is lost by it
        hint += f"; {begin_again(run)}"
    raise CheckpointUnusable(f"{which} {path} is incomplete: {in_words(problems)}", hint=hint)


def refuse_used(path: Path, other: str = "use another --name", again: str = "add --auto-resume") -> None:
    """Raise CheckpointUnusable, with the ways out, when a new run cannot have the folder `path`.

    `other` says how the command at hand names another folder; it is the only way out beside a run that is running.
    `again` says how it takes over the folder of a run that never had a checkpoint; empty where it cannot.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if holder := _holder(path):
        raise CheckpointUnusable(f"{path} is in use by {holder}", hint=other)
    if not os.path.lexists(path):
        return
    ways = [other, f"remove {path}"]
    if way := go_on(path):
        raise CheckpointUnusable(f"{path} is in use already", hint="; or ".join([f"go on with it: {way}", *ways]))
    if again and _is_run(path) and not list_steps(path / "checkpoints"):
        ways = [f"{again} to begin again under this name", *ways]
    hint = f"it has no complete checkpoint to go on from; {'; or '.join(ways)}"
    raise CheckpointUnusable(f"{path} is in use already", hint=hint)


def _holder(path: Path) -> str:
    """The live process that holds the run at `path`, in words; empty when none does. Writes nothing."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _pid_at_lock(os.fstat(descriptor))
        return "a running nftctl" + (f" (process {pid})" if pid else "")
    except OSError:
        return ""  # a file system without locks
    else:
        return ""
    finally:
        os.close(descriptor)


def _pid_at_lock(file: os.stat_result) -> str:
    """The process that Linux names for the lock of `file`; empty elsewhere, and where it lies out of sight."""
    mark = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    return next((row[4] for row in rows if row[1] == "FLOCK" and row[5] == mark and int(row[4]) > 0), "")


def _running(path: Path, holder: str, more: str = "") -> CheckpointUnusable:
    message = f"{path} is in use by {holder or 'a running nftctl'}{more}"
    return CheckpointUnusable(message, hint="wait for it to end, or stop it with Ctrl-C")


def refuse_impossible(path: Path) -> None:
    """Raise CheckpointUnusable when no folder can be made at `path`, as far as that shows without making one."""
    nearest = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not nearest.is_dir():
        kind = "a link that leads nowhere" if nearest.is_symlink() else "a file"
        raise CheckpointUnusable(
            f"cannot create {path}: {nearest} is {kind}, not a folder", hint="choose another --run-dir"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointUnusable(
            f"cannot create {path}: {nearest} cannot be written to",
            hint="get the right to write there, or choose another --run-dir",
        )


def _claim(path: Path) -> None:
    """Make the folder, or take it over when it is empty. Two processes cannot both succeed."""
    refuse_used(path)
    if path.is_dir():
        path.rmdir()
    try:
        path.mkdir()
    except FileExistsError:
        refuse_used(path)
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise CheckpointUnusable(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointUnusable(f"{path} is not a JSON object")
    return document
