"""The commands that make model files of other model files: export, sample, convert. Options only, as in `app`.

Their own Typer, which `app` takes in: a run is a matter of profiles and run folders, these are one of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nftctl.cli import completion
from nftctl.cli.options import CheckpointArgument, JsonOption

commands = typer.Typer(rich_markup_mode=None)

OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="A new folder; one that holds something is never written to.")
]
BaseOption = Annotated[
    str,
    typer.Option(
        "--base", metavar="FOLDER", show_default=False, help="Where the base is now. Default: where the run had it."
    ),
]


@commands.command(
    epilog="""\b
Examples:
  nftctl export first --to lora first-lora
  nftctl export runs/first/checkpoints/step_000100 --to merged first-merged
  nftctl export first --to diffusers --weights old pipeline --base /models/Cosmos3-Nano"""
)
def export(
    checkpoint: CheckpointArgument,
    out: OutArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            autocompletion=completion.one_of("lora", "merged", "diffusers"),
            help="lora: the adapter alone. merged: a whole pipeline with the adapter folded in. "
            "diffusers: the base as it is with the adapter beside it.",
        ),
    ],
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            metavar="NAME",
            autocompletion=completion.one_of("policy", "old", "ema"),
            help="policy; old: the copy that samples in training; ema: the running average, where one is kept.",
        ),
    ] = "policy",
    base: BaseOption = "",
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a folder that diffusers loads."""
    from nftctl.cli.export import export as command

    command(checkpoint, out, to=to, weights=weights, base=base, json=json)


@commands.command(
    epilog="""\b
Examples:
  nftctl sample first
  nftctl sample first --prompt "a red circle" --prompt "two red squares" --seed 7 --out two.png
  nftctl sample first --prompt-file held_out.txt --weights base,policy --images singles"""
)
def sample(
    checkpoint: CheckpointArgument,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A row of the grid; repeatable. Default: the run's own grid."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file", metavar="FILE", help="A .txt or .jsonl with a row in each line, below those of --prompt."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="LIST", help="The columns, by default all that there are: base,old,ema,policy."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, metavar="N", help="Root of the noise. Default: the run's eval.seed."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Sampler steps. Default: as the run evaluates.")
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option("--guidance", metavar="G", help="Guidance, 0 or more. Default: as the run evaluates."),
    ] = None,
    shift: Annotated[
        float | None,
        typer.Option("--shift", metavar="S", help="Shift of the noise levels, above 0. Default: the run's."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The grid, a new .png; an old one is never overwritten.")
    ] = Path("sample.png"),
    images: Annotated[
        Path | None,
        typer.Option("--images", metavar="DIR", help="Also write each image on its own into this new folder."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME",
            autocompletion=completion.one_of("auto", "cpu", "cuda"),
            help="auto, cpu or cuda; auto takes a GPU when there is one.",
        ),
    ] = "auto",
    base: BaseOption = "",
    json: JsonOption = False,
) -> None:
    """Sample base and trained weights side by side."""
    from nftctl.cli.sample import Wishes
    from nftctl.cli.sample import sample as command

    wishes = Wishes(prompts or [], prompt_file, weights, seed, steps, guidance, shift, device, base)
    command(checkpoint, wishes, out, images, json=json)


@commands.command(
    epilog="""\b
Examples:
  nftctl convert /models/Cosmos3-Nano nano-dcp
  nftctl convert trained-dcp trained --like /models/Cosmos3-Nano
  nftctl convert foreign-dcp out --config Cosmos3-Nano/transformer --strip-prefix model."""
)
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A folder in diffusers layout, or a distributed checkpoint (DCP).")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new folder of the other kind; never written over.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FOLDER", help="DCP only: the folder of the transformer's config.json."),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option("--like", metavar="BASE", help="DCP only: a whole base; copies its other parts and its config."),
    ] = None,
    strip_prefix: Annotated[
        str,
        typer.Option(
            "--strip-prefix",
            metavar="TEXT",
            show_default=False,
            help="DCP only: take the tensors whose names begin so, without it, and leave the others.",
        ),
    ] = "",
    json: JsonOption = False,
) -> None:
    """Turn a diffusers folder into a DCP folder, or back."""
    from nftctl.cli.convert import convert as command

    command(source, target, config=config, like=like, strip_prefix=strip_prefix, json=json)
