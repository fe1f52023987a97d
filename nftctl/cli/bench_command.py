"""The options of `nftctl bench`, as `app` has those of the other commands. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nftctl.cli import completion
from nftctl.cli.options import JsonOption, QuietOption, SetOption
from nftctl.errors import UsageRefused
from nftctl.model.shapes import REHEARSAL_SHAPES

LEARNING = "learning"
"""The word behind `bench` that makes it another command."""

commands = typer.Typer(rich_markup_mode=None)


def offered(incomplete: str) -> list[str]:
    """What may follow `bench`: a profile, or the word."""
    return completion.one_of(LEARNING)(incomplete) + completion.profile_names(incomplete)


def refuse_word(value: str | None) -> str | None:
    """Anywhere but right behind `bench` the word would be taken for a profile's name."""
    if value == LEARNING:
        raise UsageRefused(
            "`learning` has to stand right behind `bench`",
            hint=f"nftctl bench {LEARNING} --help; a profile of that name is ./{LEARNING}",
        )
    return value


BenchArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROFILE",
        show_default=False,
        callback=refuse_word,
        autocompletion=offered,
        help="A .toml file, the name of a bundled profile, or - for stdin. "
        "Default: $NFTCTL_PROFILE, then ./profile.toml, then scenes_t2i_cpu.",
    ),
]


@commands.command(
    epilog="""\b
Examples:
  nftctl bench
  nftctl bench profile.toml --compare naive --output where-it-goes
  nftctl bench profile.toml --ranks 1 --set model.height=1024 --set model.width=1024 --json
  nftctl bench --write-base cosmos3-nano /models/random-nano

Something else: nftctl bench learning --help compares ways to learn."""
)
def bench(
    profile: BenchArgument = None,
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


@commands.command(
    name="bench learning",
    epilog="""\b
Examples:
  nftctl bench learning --output learning
  nftctl bench learning --budget 150 --jobs 30 --output learning
  nftctl bench learning --methods nft,flow-grpo --seeds 3 --trials 2 --budget 20 --json""",
)
def learning(
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="PROFILE",
            show_default=False,
            autocompletion=completion.profile_names,
            help="What is learned: a .toml file or the name of a bundled profile. Default: the embedded default.",
        ),
    ] = None,
    sets: SetOption = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="NAMES",
            show_default=False,
            help="Only these, with commas between: nft, flow-grpo, best-of-group, guidance, control.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="Runs of each method.")] = 5,
    trials: Annotated[
        int, typer.Option("--trials", min=1, max=12, metavar="N", help="Settings tried for each method before.")
    ] = 6,
    budget: Annotated[
        float, typer.Option("--budget", min=0.001, metavar="SECONDS", help="Training that a run spends, on one thread.")
    ] = 60.0,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=1,
            metavar="N",
            show_default=False,
            help="Samples that it makes; it goes on until both are spent. Default: those of a run of the profile.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, metavar="N", show_default=False, help="Runs at once, a thread each. Default: one per CPU."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FOLDER",
            show_default=False,
            help="A new folder for figures, tables and curves. Default: a temporary one.",
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare ways to learn, in processes of their own: equal seconds, equal samples."""
    from nftctl.cli import learning as command
    from nftctl.cli.console import Console

    wishes = command.Wishes(seeds, trials, budget, samples, jobs, methods, output)
    command.learning(Console(json=json, quiet=quiet), profile, sets or [], wishes)
