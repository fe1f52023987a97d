"""`--max-restarts N`: a run whose attempts are processes of their own, each but the first a resume of the one before.

Owns what counts as a loss that another attempt may outlive: a rank, a node or a head that went away, or a driver that
was ended from outside. Everything else ends the run as it would without this option. Waits for room, for a time that it
says, and never longer. Signals go on to the attempt, so a run that is asked to stop saves and stops. The way back is
said only where nobody goes it by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import orjson
import typer

from nftctl import itself
from nftctl.cli.completion import runs_folder
from nftctl.cli.console import SCHEMA_VERSION, Console
from nftctl.cli.signals import AT_ONCE, RESTARTS_LEFT, SIGNALS, TYPED
from nftctl.errors import EnvironmentUnfit, ExitCode, NftctlError, UsageRefused
from nftctl.profile.schema import Profile

PAUSE_S = 5.0
"""Seconds between two looks for room."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def launch(
    console: Console,
    argument: str | None,
    sets: Sequence[str],
    flags: Mapping[str, object],
    *,
    auto_resume: bool,
    restarts: int,
) -> NoReturn:
    """`nftctl launch` in a process of its own; ends this one with the last attempt's exit code."""
    from nftctl.engine.plan import run_folder_name
    from nftctl.profile.load import find_profile, load_profile

    if argument == "-":
        raise UsageRefused("--max-restarts reads the profile more than once", hint="give it as a file and not as `-`")
    path, _ = find_profile(argument, os.environ, Path.cwd())
    given = {key: value for key, value in flags.items() if value is not None}
    resolved = load_profile(path, sets=sets, flags=given)
    name = run_folder_name(resolved)
    words = ["launch", *([argument] if argument else []), *_settings(sets), "--name", name]
    if flags.get("rl.max_steps") is not None:
        words += ["--steps", str(flags["rl.max_steps"])]
    if flags.get("job.run_dir") is not None:
        words += ["--run-dir", str(flags["job.run_dir"])]
    words += ["--auto-resume"] if auto_resume else []
    run = Path(resolved.profile.job.run_dir).expanduser() / name
    _end(console, Attempts(console, run, resolved.profile, restarts).go(words))


def resume(
    console: Console, target: str, steps: int | None, sets: Sequence[str], *, fork: str | None, restarts: int
) -> NoReturn:
    """`nftctl resume` in a process of its own; ends this one with the last attempt's exit code."""
    from nftctl.profile.load import load_resolved
    from nftctl.run.directory import find_checkpoint

    if fork is not None:
        raise UsageRefused(
            "--max-restarts goes on with a run, and --fork begins one",
            hint="fork without it, then: nftctl resume NAME --max-restarts N",
        )
    run, _ = find_checkpoint(target, runs_folder())
    resolved = load_resolved(run.read_resolved(), name=run.name, text="", sets=sets, env=os.environ)
    words = ["resume", target, *_settings(sets), *([] if steps is None else ["--steps", str(steps)])]
    _end(console, Attempts(console, run.path, resolved.profile, restarts, _settings(sets)).go(words))


def goes_on_by_itself(error: NftctlError, env: Mapping[str, str]) -> bool:
    """In the process of an attempt: whether another one follows this error, so that nobody has to type the way back."""
    from nftctl.engine.lost import RanksLost

    return isinstance(error, RanksLost) and env.get(RESTARTS_LEFT, "0") != "0"


def _settings(sets: Sequence[str]) -> list[str]:
    return [word for value in sets for word in ("--set", value)]


def _end(console: Console, code: int) -> NoReturn:
    raise typer.Exit(_as_exit_code(code))


def _as_exit_code(code: int) -> int:
    """As a shell has it: of a process that a signal ended, 128 and the signal."""
    return code if code >= 0 else 128 - code


@dataclass(slots=True)
class Attempts:
    """The attempts of one run. `settings` are options that every resume of it repeats."""

    console: Console
    run: Path
    profile: Profile
    restarts: int
    settings: Sequence[str] = ()
    spoken: list[str] = field(default_factory=list)
    used: int = 0
    """Restarts that were tried for."""
    made: int = 0
    """Those for which there was room."""
    ending: dict[str, str] = field(default_factory=dict)
    """Message and hint of an ending that no attempt could tell of."""
    stopped: int = 0
    child: subprocess.Popen[str] | None = None

    def go(self, first: Sequence[str]) -> int:
        """Make the first attempt, and as many more as are needed and allowed; the exit code of the last."""
        with self._handing_on():
            code = self._all(first)
        said = "".join(self.spoken[-1:])
        if self.console.json:
            from nftctl.run.canonical import pretty_bytes

            said = pretty_bytes(self._document(first[0], said, _as_exit_code(code))).decode()
        sys.stdout.write(said)
        sys.stdout.flush()
        return code

    def _all(self, first: Sequence[str]) -> int:
        before = self._attempt()
        code = self._try(first)
        while (reason := self._lost(code, before)) and self.used < self.restarts and not self.stopped:
            self.used += 1
            self.console.warn(f"{reason}; restart {self.used} of {self.restarts}")
            before, code = self._attempt(), self._restart(reason)
        if self.stopped and code not in (ExitCode.OK, 128 + self.stopped):
            # Between two attempts, or in one that was lost as well.
            if reason:
                self._leave(reason)
            return 128 + self.stopped
        if reason:
            self.console.say(f"no restart is left of {self.restarts}")
            if code < 0:  # it had no time to say so itself
                self._leave(reason)
        return code

    def _leave(self, message: str, hint: str = "") -> None:
        """Say the way back, which an attempt leaves out that another one was to follow."""
        way = self._way_back()
        self.console.say(way)
        self.ending = {"message": message, "hint": "; ".join(filter(None, (hint, way)))}

    def _way_back(self) -> str:
        from nftctl.run.checkpoints import list_steps
        from nftctl.run.directory import RunDirectory, begin_again

        with contextlib.suppress(NftctlError, OSError):  # the storage may be what was lost
            if not list_steps(self.run / "checkpoints"):
                return begin_again(RunDirectory(self.run))
        return f"go on with: {shlex.join(['nftctl', 'resume', str(self.run), *self.settings])}"

    def _document(self, command: str, said: str, code: int) -> dict[str, Any]:
        """The object of the last attempt that had one, as that of the command that was typed, with the restarts."""
        try:
            document: dict[str, Any] = orjson.loads(said)
        except ValueError:  # killed before it could say anything
            error = {"message": f"the process of the run ended with exit code {code}", "hint": ""}
            document = {"schema_version": SCHEMA_VERSION, "diagnostics": [], "error": error}
        ended = {"command": command, "ok": code == 0, "exit_code": code, "restarts": self.made}
        return document | ended | ({"error": self.ending} if self.ending else {})

    def _restart(self, reason: str) -> int:
        """Wait for room, then go on; a place that turns out unfit after all is waited for again."""
        limit = self.profile.grid.restart_wait_s
        end, code = time.monotonic() + limit, int(ExitCode.ENVIRONMENT)
        while code == ExitCode.ENVIRONMENT and not self.stopped and self._room(end, limit):
            code = self._try(["resume", str(self.run), *self.settings, "--restart", reason])
            if code == ExitCode.ENVIRONMENT and not self._has_time(end, limit):
                break
        self.made += code != ExitCode.ENVIRONMENT
        if code == ExitCode.ENVIRONMENT and not self.ending:  # stopped in the meantime
            self._leave(reason)
        return code

    def _has_time(self, end: float, limit: float) -> bool:
        """Pause; whether there is time for one more attempt. What is amiss where there is room may be so for good."""
        self._sleep(end)
        if time.monotonic() < end:
            return True
        message = f"no attempt could go on within {limit:.0f} s{self._last_error()}"
        self.console.error(message, "")
        self._leave(message)
        return False

    def _last_error(self) -> str:
        """What the last attempt's object says was wrong, ready to end a sentence; without one stderr has said it."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return f": {orjson.loads(self.spoken[-1])['error']['message']}"
        return ""

    def _room(self, end: float, limit: float) -> bool:
        from nftctl.engine.cluster import find_cluster

        said = ""
        while not self.stopped:
            try:
                find_cluster(self.profile, os.environ, lambda text: None)
                return True
            except EnvironmentUnfit as unfit:
                if not said:
                    self.console.say(f"waiting for room, {limit:.0f} s at the most: {unfit.message}")
                said = unfit.message
                if time.monotonic() >= end:
                    message = f"no room to go on within {limit:.0f} s: {said}"
                    self.console.error(message, unfit.hint)
                    self._leave(message, unfit.hint)
                    return False
                self._sleep(end)
        return False

    def _sleep(self, end: float) -> None:
        until = min(end, time.monotonic() + PAUSE_S)
        while not self.stopped and time.monotonic() < until:
            time.sleep(0.1)

    def _attempt(self) -> tuple[str, int]:
        """Name and inode of the newest attempt's folder; empty before the first.

        A run without a checkpoint may be moved away and begun anew, and its first attempt then has the same name.
        """
        latest = self.run / "logs" / "latest"
        try:
            return latest.readlink().name, latest.stat().st_ino
        except OSError:
            return "", 0

    def _lost(self, code: int, before: tuple[str, int]) -> str:
        """Why another attempt may do better, in words; empty when it would not, or none was made."""
        from nftctl.engine.lost import read_loss

        now = self._attempt()
        if not now[0] or now == before:
            return ""
        if code == ExitCode.TRAINING and (loss := read_loss(self.run / "logs" / now[0])):
            return loss.message
        return f"the process of the run was ended by {signal.Signals(-code).name}" if code < 0 else ""

    def _try(self, words: Sequence[str]) -> int:
        options = [*(["--json"] if self.console.json else []), *(["--quiet"] if self.console.quiet else [])]
        self.child = subprocess.Popen(
            itself.command("nftctl", *words, *options),
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                RESTARTS_LEFT: str(self.restarts - self.used),
                TYPED: json.dumps(sys.argv),
            },
            # Signals of a terminal or a supervisor reach this process alone, which hands on each of them once.
            process_group=0,
            preexec_fn=_end_with_parent,
        )
        if self.stopped:  # it came while there was nobody yet to tell
            self.child.send_signal(self.stopped)
        out, _ = self.child.communicate()
        code, self.child = self.child.returncode, None
        self.spoken.append(out)
        return code

    @contextlib.contextmanager
    def _handing_on(self) -> Iterator[None]:
        def hand_on(signum: int, frame: FrameType | None) -> None:
            again, self.stopped = bool(self.stopped), signum
            if self.child is not None:
                self.child.send_signal(AT_ONCE if again else signum)

        former = {signum: signal.signal(signum, hand_on) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in former.items():
                signal.signal(signum, handler)


def _end_with_parent() -> None:
    """In the attempt's process: save and stop when the process that would hand signals on is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
