"""Commands whose names have two words, such as `bench learning`, beside commands that are their first word alone.

Owns how a command line is read then: two words that are a command are that command, and anything else is what it was.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from nftctl.cli.signals import Interrupted


class Program(TyperGroup):
    """The commands of the program."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an interrupt goes on as one, where Typer would end without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command's name, the command, and what is left of its arguments."""
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """What may stand here: one word at a time, so the second one is offered behind the first."""
        return [item for item in super().shell_complete(ctx, incomplete) if " " not in item.value]
