"""The options of `nftctl bench`, as `app` has those of the other commands. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nftctl.cli import completion
from nftctl.cli.options import JsonOption, ProfileArgument, QuietOption, SetOption
from nftctl.model.shapes import REHEARSAL_SHAPES

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog="""\b
Examples:
  nftctl bench
  nftctl bench profile.toml --compare naive --output where-it-goes
  nftctl bench profile.toml --ranks 1 --set model.height=1024 --set model.width=1024 --json
  nftctl bench --write-base cosmos3-nano /models/random-nano"""
)
def bench(
    profile: ProfileArgument = None,
    sets: SetOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps to measure.")] = 5,
    warm: Annotated[int, typer.Option("--warm", min=0, metavar="N", help="Steps before them; compilers need two.")] = 2,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            metavar="N",
            show_default=False,
            help="Ranks, one GPU each. Default: the profile's. With 1 it is one rank's work, and not an NFT run.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="NAME",
            autocompletion=completion.one_of("naive"),
            help="naive: also time diffusers' own forward, one sample at a time, and compare velocities.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FOLDER",
            show_default=False,
            help="A new folder for figures and chart. Default: the chart alone, in a temporary folder.",
        ),
    ] = None,
    base: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--write-base",
            metavar="SHAPE FOLDER",
            show_default=False,
            help=f"Only write a base with random weights. Shapes: {', '.join(REHEARSAL_SHAPES)}.",
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time training steps here, and say where they go."""
    from nftctl.cli import bench as command
    from nftctl.cli.console import Console

    console = Console(json=json, quiet=quiet)
    if base is not None:
        command.write_base(console, profile, *base)
    else:
        command.bench(console, profile, sets or [], command.Wishes(steps, warm, ranks, compare, output))
