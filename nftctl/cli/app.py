"""The commands and their options, and nothing else: each hands over to the module that does the work.

The surface is frozen by a test. Every import below the options is inside a function, because `--help` and completion
pay for whatever this file pulls in.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nftctl.cli import bench_command, completion, model_commands, report_command, submit_command, watch_command
from nftctl.cli.options import (
    CheckpointArgument,
    DryRunOption,
    JsonOption,
    ProfileArgument,
    QuietOption,
    RestartsOption,
    SetOption,
    refuse_empty,
)
from nftctl.cli.words import Program
from nftctl.errors import UsageRefused

COMMANDS = (
    "validate",
    "launch",
    "resume",
    "inspect-checkpoint",
    "reward-ping",
    "reward-serve",
    "profiles",
    "init",
    "export",
    "sample",
    "convert",
    "bench",
    "bench learning",
    "report",
    "watch",
    "submit",
)

EXIT_CODES = """\b
Exit codes:
    0  done
    1  a bug in nftctl
    2  the command line is wrong
    3  the profile was refused
    4  a reward service is unreachable, has another revision, or answers wrongly
    5  a checkpoint or run folder is missing, incomplete, damaged or in use
    6  resuming would continue a different run
    7  training failed
    8  Ray, its cluster, GPUs or disk are not what a run needs; nothing was trained
  130  stopped by Ctrl-C
  143  stopped by SIGTERM"""

app = typer.Typer(
    name="nftctl",
    cls=Program,
    # Plain help: no boxes, and rich is not imported for it.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _answer_version(wanted: bool) -> None:
    if wanted:
        from nftctl.cli.version import print_version

        # Answered before the other options are looked at, so that nothing has to be imported for them.
        print_version(json="--json" in sys.argv)
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=EXIT_CODES)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_answer_version, help="Print the version.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="With --version: one JSON object, Python's and torch's too.")
    ] = False,
) -> None:
    """Improve a flow-matching image generator by online reinforcement learning (DiffusionNFT)."""
    if json:
        raise UsageRefused("here --json belongs to --version", hint="write it behind a command: nftctl validate --json")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@app.command(
    epilog="""\b
Examples:
  nftctl validate
  nftctl validate profile.toml --set rl.group_size=8 --show-resolved
  nftctl validate profile.toml --memory --online
  nftctl validate cosmos3_nft_t2i_public --json | jq -e .ok"""
)
def validate(
    profile: ProfileArgument = None,
    sets: SetOption = None,
    show_resolved: Annotated[
        bool, typer.Option("--show-resolved", help="Print every value and where it came from.")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Print the memory that a rank needs, part by part.")] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Also ask reward services and the Ray address, and count GPUs.")
    ] = False,
    rules: Annotated[bool, typer.Option("--rules", help="List every rule of preflight; reads no profile.")] = False,
    json: JsonOption = False,
) -> None:
    """Check a profile against every rule; start nothing."""
    from nftctl.cli import validate as command

    if rules:
        command.list_rules(json=json)
    else:
        command.validate(profile, sets or [], show_resolved=show_resolved, memory=memory, online=online, json=json)


@app.command(
    epilog="""\b
Examples:
  nftctl launch
  nftctl launch profile.toml --steps 400 --name first
  nftctl launch profile.toml --dry-run"""
)
def launch(
    profile: ProfileArgument = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Rollouts in total; sets rl.max_steps.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the run; sets job.name.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of all runs; sets job.run_dir.")
    ] = None,
    sets: SetOption = None,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Go on with the run of this name if it has a checkpoint.")
    ] = False,
    max_restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Start a run from a profile."""
    from nftctl.cli.console import Console
    from nftctl.cli.job import launch as command

    flags = {"rl.max_steps": steps, "job.name": name, "job.run_dir": None if run_dir is None else str(run_dir)}
    console = Console(json=json, quiet=quiet)
    if max_restarts and not dry_run:
        from nftctl.cli.restarts import launch as supervised

        supervised(console, profile, sets or [], flags, auto_resume=auto_resume, restarts=max_restarts)
    command(console, profile, sets or [], flags, dry_run=dry_run, auto_resume=auto_resume)


@app.command(
    epilog="""\b
Examples:
  nftctl resume first
  nftctl resume runs/first/checkpoints/step_000100 --steps 800"""
)
def resume(
    checkpoint: CheckpointArgument,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="TOTAL", help="Rollouts in total since the run's birth."),
    ] = None,
    sets: SetOption = None,
    fork: Annotated[
        str | None,
        typer.Option("--fork", metavar="NAME", help="Begin a new run from this checkpoint; the profile may change."),
    ] = None,
    max_restarts: RestartsOption = 0,
    restart: Annotated[str, typer.Option("--restart", hidden=True)] = "",
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Go on with a run exactly where it stopped."""
    from nftctl.cli.console import Console
    from nftctl.cli.job import resume as command

    console = Console(json=json, quiet=quiet)
    if max_restarts and not dry_run:
        from nftctl.cli.restarts import resume as supervised

        supervised(console, checkpoint, steps, sets or [], fork=fork, restarts=max_restarts)
    command(console, checkpoint, steps, sets or [], dry_run=dry_run, fork=fork, restart=restart)


@app.command(
    name="inspect-checkpoint",
    epilog="""\b
Examples:
  nftctl inspect-checkpoint first
  nftctl inspect-checkpoint runs/first/checkpoints/step_000100 --verify --tensors
  nftctl inspect-checkpoint first --diff second --json | jq -e .diff.equal""",
)
def inspect_checkpoint(
    checkpoint: CheckpointArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file again.")] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor; with --diff, every one that differs.")
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="OTHER",
            callback=refuse_empty,
            autocompletion=completion.checkpoint_names,
            help="Say what differs from this checkpoint, named like CHECKPOINT; verifies both. "
            "The exit code is 0 whether they differ or not.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds and if it is whole."""
    if diff is not None:
        from nftctl.cli.diff import diff as command

        command(checkpoint, diff, tensors=tensors, json=json)
        return
    from nftctl.cli.inspect import inspect

    inspect(checkpoint, hashes=verify, tensors=tensors, json=json)


@app.command(
    name="reward-ping",
    epilog="""\b
Examples:
  nftctl reward-ping profile.toml
  nftctl reward-ping --url http://127.0.0.1:8080 --revision r1
  nftctl reward-ping --url http://scorer:8080 --protocol cosmos-rl --reward-fn hpsv3 --wait 60""",
)
def reward_ping(
    profile: ProfileArgument = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Ask this service instead of a profile's.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="The revision that --url must serve.")
    ] = None,
    protocol: Annotated[
        str | None, typer.Option("--protocol", metavar="NAME", help="What --url speaks: nftctl-reward/1 or cosmos-rl.")
    ] = None,
    reward_fn: Annotated[
        str | None, typer.Option("--reward-fn", metavar="NAME", help="With cosmos-rl: the reward function to run.")
    ] = None,
    score_key: Annotated[
        str | None, typer.Option("--score-key", metavar="KEY", help="With cosmos-rl: its score. Default: --reward-fn.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest wait for one answer.")
    ] = 10.0,
    count: Annotated[int, typer.Option("--count", min=1, max=1000, metavar="N", help="Requests to time.")] = 5,
    load: Annotated[
        bool, typer.Option("--load", help="Also score as many images as a step has, and time that.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0.0, metavar="SECONDS", help="Wait so long for a service that is not up yet.")
    ] = 0.0,
    json: JsonOption = False,
) -> None:
    """Ask reward services who they are and time them."""
    from nftctl.cli.ping import Address, ping
    from nftctl.cli.probe import Wishes

    address = Address(url, revision, protocol, reward_fn, score_key)
    ping(profile, address, Wishes(timeout, count, load, wait), json=json)


@app.command(
    name="reward-serve",
    epilog="""\b
Examples:
  nftctl reward-serve --scorer tiny_digits
  nftctl reward-serve --scorer colour_shape --scorer jpeg_compressibility=0.001 --workers 4
  nftctl reward-serve --scorer clip_score:/models/clip --host 0.0.0.0 --port 9000
  nftctl reward-serve --scorer mine.py:sharpness""",
)
def reward_serve(
    scorers: Annotated[
        list[str],
        typer.Option(
            "--scorer",
            metavar="NAME[:MODEL][=WEIGHT]",
            autocompletion=completion.scorer_names,
            help="A packaged scorer, or FILE.py:FUNCTION of your own; repeatable, scores are weighed and added.",
        ),
    ],
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="PORT", help="0: a free one.")] = 8080,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="REV", help="Serve under this revision, not the scorers' own hash."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=256, metavar="N", help="Requests scored at once; >1: in N processes.")
    ] = 1,
    parent_pid: Annotated[int | None, typer.Option("--parent-pid", hidden=True)] = None,
) -> None:
    """Serve scorers over HTTP until stopped."""
    from nftctl.cli.serve import serve

    serve(scorers, host=host, port=port, revision=revision or "", workers=workers, parent_pid=parent_pid)


@app.command(
    epilog="""\b
Examples:
  nftctl profiles
  nftctl profiles scenes_t2i_cpu
  nftctl profiles --schema > profile.schema.json"""
)
def profiles(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            autocompletion=completion.bundled_names,
            help="Print this one's TOML. Default: list all.",
        ),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a profile, for editors.")] = False,
    json: JsonOption = False,
) -> None:
    """List the bundled profiles, or print one."""
    from nftctl.cli import profiles as command

    if schema and name is not None:
        raise UsageRefused("--schema is about every profile and takes no NAME", hint="nftctl profiles --schema")
    if schema:
        command.print_schema(json=json)
    elif name is not None:
        command.print_profile(name, json=json)
    else:
        command.list_profiles(json=json)


@app.command(
    epilog="""\b
Examples:
  nftctl init
  nftctl init mine.toml --from cosmos3_nft_t2i_public_4gpu"""
)
def init(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A new .toml file; an old one is never overwritten.")
    ] = Path("profile.toml"),
    base: Annotated[
        str,
        typer.Option(
            "--from", metavar="NAME", autocompletion=completion.bundled_names, help="The bundled profile to extend."
        ),
    ] = "scenes_t2i_cpu",
    json: JsonOption = False,
) -> None:
    """Write a commented profile to start from."""
    from nftctl.cli.init import init as command

    command(path, base, json=json)


app.add_typer(model_commands.commands)
app.add_typer(bench_command.commands)
app.add_typer(report_command.commands)
app.add_typer(watch_command.commands)
app.add_typer(submit_command.commands)
