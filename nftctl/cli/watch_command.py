"""The options of `nftctl watch`, as `app` has those of the other commands. Loads no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from nftctl.cli.options import JsonOption, RunArgument

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog="""\b
Examples:
  nftctl watch first
  nftctl watch runs/first --once
  nftctl watch first --once --json | jq -r .state"""
)
def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show how the run stands, and end.")] = False,
    json: JsonOption = False,
) -> None:
    """Follow a run from its folder until it ends."""
    from nftctl.cli.watch import watch as command

    command(run, once=once, json=json)
