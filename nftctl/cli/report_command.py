"""The options of `nftctl report`, as `app` has those of the other commands. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nftctl.cli import completion
from nftctl.cli.options import JsonOption, RunArgument, refuse_empty_run

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog="""\b
Examples:
  nftctl report first
  nftctl report runs/first --compare second --compare third --output three.html
  nftctl report first --json | jq -r .run.verdict.headline"""
)
def report(
    run: RunArgument,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="RUN",
            callback=refuse_empty_run,
            autocompletion=completion.checkpoint_names,
            help="Draw this run in the same frames; repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            show_default=False,
            help="The file to write; an older report is replaced, nothing else is. Default: RUN/report.html.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a run as one page: verdict, curves, samples."""
    from nftctl.cli.console import Console
    from nftctl.cli.report import report as command

    command(Console(json=json), run, compare or [], output)
