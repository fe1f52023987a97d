"""The entry point: runs one command and turns every ending into an exit code and a message that says what to do.

Owns the mapping from exceptions to exit codes, and the JSON object of a failure. Refuses `--` on every command line:
nothing is ever accepted after it, so nothing behind it can be dropped in silence.
"""

from __future__ import annotations

import os
import signal
import sys

LONG = ("launch", "resume", "bench", "sample")
"""Commands that take seconds to say what they are doing, most of it for libraries that they have to load."""


def _first_words() -> None:
    """Say at once to somebody who looks on that there is somebody."""
    quiet = {"--quiet", "-q", "--help"} & set(sys.argv)
    if sys.argv[1:2] and sys.argv[1] in LONG and not quiet and os.isatty(2):
        os.write(2, f"nftctl {sys.argv[1]}: loading\n".encode())


try:
    _first_words()
    import atexit
    import contextlib
    import traceback
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    import typer

    from nftctl.cli.app import COMMANDS, app
    from nftctl.cli.console import Console
    from nftctl.cli.signals import Interrupted, Stopped, write_now
    from nftctl.errors import ExitCode, NftctlError, ProfileRefused, ResumeRefused, TrainingFailed, UsageRefused
except KeyboardInterrupt:
    # Half of a command's time is its imports, and nobody who interrupts them wants to see where.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(2, b"interrupted\n")
    os._exit(130)

PROGRAM = "nftctl"
INTERRUPTED = "interrupted"


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        for stream in (sys.stdout, sys.stderr):
            # A name that is not valid text must not end a message half way.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        return _left(run(sys.argv[1:]))
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush into the closed pipe again.
        # They have what they wanted: `nftctl ... | head -1` did its work.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except KeyboardInterrupt:  # before the command line was looked at, or just when another one was about to be told
        _hear_no_more()
        write_now(f"{INTERRUPTED}\n")
        return ExitCode.SIGINT


def _hear_no_more() -> None:
    """Ignore interrupts while this process ends: one press can come as several signals, and the interpreter would be
    killed by the next one while it leaves."""
    with contextlib.suppress(ValueError):  # not in the main thread, which alone is interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _left(code: int) -> int:
    """The exit code; of a process that cannot leave its Ray cluster any more, it is the last thing that it says."""
    # What is done cannot be interrupted any more; what is left of a Ray may hang, and then somebody wants out.
    if code in (ExitCode.SIGINT, ExitCode.SIGTERM) or "ray" not in sys.modules:
        _hear_no_more()
    head = sys.modules.get("nftctl.engine.head")
    abandoned = head is not None and head.abandoned
    # A Ray that was interrupted while it started can crash the interpreter that takes it down, after all is said.
    broken = code in (ExitCode.SIGINT, ExitCode.SIGTERM) and "ray" in sys.modules
    if broken and not abandoned:
        atexit._run_exitfuncs()
    if abandoned or broken:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run(arguments: Sequence[str]) -> int:
    """Run one command line; every failure is printed here and comes back as its exit code."""
    failure = _Failure(Console(json="--json" in arguments), _command(arguments))
    stdout = sys.stdout
    try:
        if "--" in arguments:
            raise UsageRefused(
                "nothing is accepted after `--`", hint="write every option and value in front, without `--`"
            )
        code = app(args=list(arguments), prog_name=PROGRAM, standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except BrokenPipeError:
        raise
    except SystemExit:
        # Typer's own answer to a closed pipe, which it shows by putting a wrapper in place of stdout.
        if sys.stdout is stdout:
            raise
        return ExitCode.OK
    except typer.TyperException as error:
        return failure.usage(error)
    except NftctlError as error:
        return failure.known(error)
    except Stopped as error:
        _hear_no_more()
        return failure.stopped(str(error), error.exit_code)
    except (KeyboardInterrupt, Interrupted, typer.Abort):
        _hear_no_more()
        return failure.stopped(INTERRUPTED, ExitCode.SIGINT)
    except Exception as error:
        return failure.bug(error)


def _command(arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if argument in COMMANDS), "")


class _Failure:
    """Says how a command ended, to people and as JSON."""

    def __init__(self, console: Console, command: str) -> None:
        self._console = console
        self._command = command

    def usage(self, error: typer.TyperException) -> int:
        message = error.format_message()
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else f"{PROGRAM} {self._command}".rstrip()
        parameters = getattr(getattr(context, "command", None), "params", ())
        named = "unexpected extra argument" in message and any("--profile" in p.opts for p in parameters)
        self._console.error(message, f"a profile is named by an option here: {path} --profile PROFILE" if named else "")
        self._console.say(f"try: {path} --help")
        return self._end(error.exit_code, message, f"{path} --help")

    def known(self, error: NftctlError) -> int:
        extra: dict[str, Any] = {}
        findings = error.findings if isinstance(error, ProfileRefused) else []
        self._console.findings(findings)
        self._console.error(error.message, error.hint)
        if isinstance(error, ResumeRefused):
            self._console.differences(error.differences)
            extra["differences"] = [{"key": d.key, "was": d.was, "now": d.now, "why": d.why} for d in error.differences]
        if isinstance(error, TrainingFailed):
            extra |= {"rank": error.rank, "log": error.log}
            for line in _tail(error.log):
                self._console.say(f"  | {line}")
            if error.log:
                self._console.say(f"log: {error.log}")
        if os.environ.get("NFTCTL_DEBUG"):
            traceback.print_exception(error)
        return self._end(error.exit_code, error.message, error.hint, findings, **extra)

    def stopped(self, message: str, code: int) -> int:
        self._console.say(message)
        return self._end(code, message, "")

    def bug(self, error: Exception) -> int:
        summary = f"this is a bug in nftctl: {type(error).__name__}: {error}"
        if os.environ.get("NFTCTL_DEBUG"):
            traceback.print_exception(error)
            hint = "please report it with the traceback above"
        else:
            hint = f"the traceback is in {_write_traceback(error)}; NFTCTL_DEBUG=1 prints it here"
        self._console.error(summary, hint)
        return self._end(ExitCode.BUG, summary, hint)

    def _end(self, code: int, message: str, hint: str, findings: Sequence[Any] = (), **extra: Any) -> int:
        error = {"message": message, "hint": hint, **extra}
        self._console.result(self._command, findings, exit_code=code, error=error)
        return int(code)


def _tail(log: str, lines: int = 20) -> list[str]:
    """The last lines of the log of the rank to blame; what it wrote last is usually the reason."""
    try:
        text = Path(log).read_text(errors="backslashreplace") if log else ""
    except OSError:
        return []
    return text.splitlines()[-lines:]


def _write_traceback(error: Exception) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="nftctl-", suffix=".log", delete=False) as log:
        log.writelines(traceback.format_exception(error))
    return log.name
