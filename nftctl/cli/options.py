"""Arguments and options that several commands take, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

from nftctl.cli import completion
from nftctl.errors import UsageRefused

ProfileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROFILE",
        show_default=False,
        autocompletion=completion.profile_names,
        help="A .toml file, the name of a bundled profile, or - for stdin. "
        "Default: $NFTCTL_PROFILE, then ./profile.toml, then scenes_t2i_cpu.",
    ),
]


def refuse_empty(value: str | None) -> str | None:
    """An unset variable of a script must not name the working folder."""
    if value is not None and not value.strip():
        raise UsageRefused(
            "the name of the checkpoint is empty", hint="give a run's name or a folder; the one you are in is `.`"
        )
    return value


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        callback=refuse_empty,
        autocompletion=completion.checkpoint_names,
        help="A step folder, a checkpoints folder, a run folder, or the name of a run.",
    ),
]


def refuse_empty_run(values: str | list[str] | None) -> str | list[str] | None:
    """An unset variable of a script must not name the working folder."""
    given = [values] if isinstance(values, str) else values or []
    if any(not value.strip() for value in given):
        raise UsageRefused(
            "the name of the run is empty", hint="give a run's name or a folder; the one you are in is `.`"
        )
    return values


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        callback=refuse_empty_run,
        autocompletion=completion.checkpoint_names,
        help="A run folder, or the name of a run.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.set_keys,
        help="Override one value, written as in TOML; repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no talk; warnings and errors stay.")]
RestartsOption = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        metavar="N",
        help="Go on by itself, so many times, after a rank or node was lost.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan; start and write nothing.")]
