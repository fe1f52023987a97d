"""The options of `nftctl submit`, as `app` has those of the other commands. Loads no engine and no HTTP client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nftctl.cli import completion
from nftctl.cli.options import DryRunOption, JsonOption, ProfileArgument, SetOption

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog="""\b
Examples:
  nftctl submit profile.toml --to ray --address http://head:8265 --run-dir /shared/runs --follow
  nftctl submit profile.toml --to slurm --sbatch "--partition=gpu" --output first.sbatch
  nftctl submit profile.toml --to kubernetes --image nftctl:1 --volume runs:/data --output a.yaml
  nftctl submit --status raysubmit_a1 --json | jq -r .job.status
  nftctl submit --logs raysubmit_a1 --follow
  nftctl submit --stop raysubmit_a1"""
)
def submit(
    profile: ProfileArgument = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="CLUSTER",
            show_default=False,
            autocompletion=completion.one_of("ray", "slurm", "kubernetes"),
            help="ray: hand the run to a job server. slurm: write an sbatch script. kubernetes: write a RayJob.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Rollouts in total; sets rl.max_steps.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            show_default=False,
            help="Name of the run; sets job.name. A run of this name that has a checkpoint is gone on with. "
            "Default: the profile's name, date and time.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            show_default=False,
            help="Folder of all runs, on storage that every node sees; sets job.run_dir. kubernetes: by default the "
            "folder runs on the volume.",
        ),
    ] = None,
    sets: SetOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", show_default=False, help="slurm, kubernetes: a new file, not stdout."),
    ] = None,
    gpus_per_node: Annotated[
        int,
        typer.Option(
            "--gpus-per-node",
            min=1,
            max=1024,
            metavar="N",
            help="slurm, kubernetes: most GPUs that a node has; where ranks compute on CPUs, most ranks.",
        ),
    ] = 8,
    cpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--cpus-per-node",
            min=1,
            max=65536,
            metavar="N",
            show_default=False,
            help="slurm, kubernetes: CPUs of a node to ask for. Default: 4 per GPU, without GPUs 1 per rank.",
        ),
    ] = None,
    memory_per_node: Annotated[
        str,
        typer.Option(
            "--memory-per-node",
            metavar="SIZE",
            show_default=False,
            help="slurm, kubernetes: memory of a node to ask for, as they write it: 512G, 512Gi.",
        ),
    ] = "",
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="LINE",
            help="ray, slurm: a line of shell to run first, as `. /shared/venv/bin/activate`; repeatable.",
        ),
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            "--grace",
            min=1,
            max=86400,
            metavar="SECONDS",
            help="Time between the word to stop and the end; a step and a checkpoint must fit in.",
        ),
    ] = 120,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            metavar="N",
            help="ray, kubernetes: go on by itself, so many times, after a rank or node was lost.",
        ),
    ] = 0,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            "--sbatch",
            metavar="OPTION",
            help='slurm: an option of sbatch, as "--partition=gpu", "--account=a", "--time=12:00:00"; repeatable.',
        ),
    ] = None,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", show_default=False, help="kubernetes: holds nftctl; required.")
    ] = "",
    volume: Annotated[
        str,
        typer.Option(
            "--volume",
            metavar="CLAIM:/PATH",
            show_default=False,
            help="kubernetes: a PersistentVolumeClaim for runs, base and prompts, and its place in pods; required.",
        ),
    ] = "",
    secret: Annotated[
        str,
        typer.Option(
            "--secret",
            metavar="NAME",
            show_default=False,
            help="kubernetes: the secret with the reward service's token under the key NFTCTL_REWARD_TOKEN.",
        ),
    ] = "",
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", show_default=False, help="kubernetes: where the job lives.")
    ] = "",
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="URL",
            show_default=False,
            help="ray: the job server, http://HOST:8265. Default: $RAY_API_SERVER_ADDRESS, then $RAY_ADDRESS.",
        ),
    ] = None,
    status: Annotated[
        str | None, typer.Option("--status", help="ray: say how this job stands.", metavar="ID", show_default=False)
    ] = None,
    logs: Annotated[
        str | None, typer.Option("--logs", help="ray: print what this job printed.", metavar="ID", show_default=False)
    ] = None,
    stop: Annotated[
        str | None,
        typer.Option(
            "--stop", help="ray: let this job save and end, within its --grace.", metavar="ID", show_default=False
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="ray, --logs: print until the job ends, and end with the run's own exit code."),
    ] = False,
    await_nodes: Annotated[int | None, typer.Option("--await-nodes", min=1, hidden=True)] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Hand a run to a Ray cluster, Slurm or Kubernetes."""
    from nftctl.cli import submit as command
    from nftctl.cli.console import Console

    console = Console(json=json)
    flags = {"rl.max_steps": steps, "job.name": name, "job.run_dir": None if run_dir is None else str(run_dir)}
    asked = command.Asked(status=status, logs=logs, stop=stop, await_nodes=await_nodes)
    options = command.Options(
        output, gpus_per_node, cpus_per_node, memory_per_node, tuple(setup or ()), grace, max_restarts,
        tuple(sbatch or ()), image, volume, secret, namespace, address, follow, dry_run,
    )  # fmt: skip
    command.submit(console, to, asked, command.Source(profile, tuple(sets or ()), flags), options)
