"""Every way nftctl ends other than well, each with its exit code.

NftctlError
├── UsageRefused       2   the command line itself
├── ProfileRefused     3   load or preflight; carries all findings
├── RewardFailed       4   reward service unreachable, wrong revision, bad reply
├── CheckpointUnusable 5   checkpoint or run folder missing, incomplete, damaged, locked
├── ResumeRefused      6   identity, seed contract or rank count differs; carries the differences
├── TrainingFailed     7   a rank raised or died, out of memory, a number that is not finite
└── EnvironmentUnfit   8   Ray, its cluster, GPUs or disk are not what a run needs; nothing was trained

Anything else that reaches the command line is a bug in nftctl and ends with 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal


class ExitCode(IntEnum):
    """Process exit codes; the meaning of each is part of the public interface."""

    OK = 0
    BUG = 1
    USAGE = 2
    PROFILE = 3
    REWARD = 4
    CHECKPOINT = 5
    RESUME = 6
    TRAINING = 7
    ENVIRONMENT = 8
    SIGINT = 130
    SIGTERM = 143


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with (or worth saying about) a profile.

    `origin` is what a person can go to: a file path, `--set`, `env NFTCTL_RL__BETA`. `line` and `column` are 1-based
    and None when the value did not come from a file.
    """

    code: str
    key: str
    message: str
    help: str = ""
    severity: Literal["error", "warning"] = "error"
    origin: str = ""
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that a resumed run would change: dotted key, value in the checkpoint, value now, why it matters."""

    key: str
    was: object
    now: object
    why: str = ""


class NftctlError(Exception):
    """A failure that nftctl understands. `hint` is the next thing to do, in the imperative, or empty."""

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only state has to survive the trip from a Ray actor to the driver.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[NftctlError], state: dict[str, object]) -> NftctlError:
    error = cls.__new__(cls)
    Exception.__init__(error, state.get("message", ""))
    error.__dict__.update(state)
    return error


class UsageRefused(NftctlError):
    """The command line cannot mean anything."""

    exit_code = ExitCode.USAGE


class ProfileRefused(NftctlError):
    """The profile was refused by the loader or by preflight; `findings` holds every finding, warnings included."""

    exit_code = ExitCode.PROFILE

    def __init__(self, findings: list[Finding], *, message: str = "", hint: str = "") -> None:
        errors = sum(f.severity == "error" for f in findings)
        super().__init__(message or f"{errors} error{'s' if errors != 1 else ''} in the profile", hint=hint)
        self.findings = findings


class RewardFailed(NftctlError):
    """The reward service did not give a score that can be trusted."""

    exit_code = ExitCode.REWARD


class CheckpointUnusable(NftctlError):
    """A checkpoint or run folder is missing, incomplete, damaged or in use."""

    exit_code = ExitCode.CHECKPOINT


class ResumeRefused(NftctlError):
    """Resuming would continue a different run; `differences` lists every key that changed."""

    exit_code = ExitCode.RESUME

    def __init__(self, message: str, differences: list[Difference], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.differences = differences


class TrainingFailed(NftctlError):
    """A rank raised, died, or produced a number that is not finite. `rank` is the first one to blame, if known."""

    exit_code = ExitCode.TRAINING

    def __init__(self, message: str, *, rank: int | None = None, hint: str = "", log: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.log = log


class EnvironmentUnfit(NftctlError):
    """Ray, its cluster, the GPUs or the disk are not what a run needs. Says nothing about the run: none has begun."""

    exit_code = ExitCode.ENVIRONMENT
