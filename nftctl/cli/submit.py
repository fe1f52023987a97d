"""`nftctl submit`: a checked profile becomes a job of a Ray cluster, an sbatch script or a RayJob.

Nothing is handed over or written before the profile has been accepted, and no file is written over. Stdout carries the
text, the file's name or the job's id alone. Options of one cluster are refused for another rather than ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nftctl.cli.console import Console
from nftctl.cli.validate import estimated_memory, every_rule
from nftctl.errors import ExitCode, Finding, ProfileRefused, UsageRefused

if TYPE_CHECKING:
    from nftctl.profile.load import Resolved
    from nftctl.submit.ray_jobs import Job
    from nftctl.submit.size import Size

CLUSTERS = ("ray", "slurm", "kubernetes")
ON_THE_VOLUME = ("init-from-missing", "vae-missing", "tokenizer-missing", "prompt-file-missing")
"""Findings that say that a file is not on this machine; one on a volume of the cluster never is."""
LEFT_TO_THE_POD = ("init-from-hub", "disk-space")
"""Findings about the disks of this machine, which no pod sees."""
OF_THIS_MACHINE = ("grid-interface-missing",)
"""Findings about the machine that a run is started on, which is not the one that hands it over."""
AWAIT_S = 300.0
"""Longest wait for the nodes of a job to join its Ray cluster."""

_MEMORY = re.compile(r"[1-9][0-9]*([KMGT]i?)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the profile comes from: the argument, `--set` texts, and dotted key -> value of a flag or None."""

    argument: str | None
    sets: tuple[str, ...]
    flags: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a cluster that has a job already."""

    status: str | None = None
    logs: str | None = None
    stop: str | None = None
    await_nodes: int | None = None

    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{name.replace('_', '-')}" for name in self.__slots__ if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True)
class Options:
    """The options beside the profile's."""

    output: Path | None = None
    gpus_per_node: int = 8
    cpus_per_node: int | None = None
    memory_per_node: str = ""
    setup: tuple[str, ...] = ()
    grace: int = 120
    max_restarts: int = 0
    sbatch: tuple[str, ...] = ()
    image: str = ""
    volume: str = ""
    secret: str = ""
    namespace: str = ""
    address: str | None = None
    follow: bool = False
    dry_run: bool = False


WRITTEN = ("slurm", "kubernetes")
OF_CLUSTER = {
    "output": WRITTEN, "gpus_per_node": WRITTEN, "cpus_per_node": WRITTEN, "memory_per_node": WRITTEN,
    "setup": ("ray", "slurm"), "max_restarts": ("ray", "kubernetes"), "grace": CLUSTERS, "dry_run": CLUSTERS,
    "sbatch": ("slurm",), "image": ("kubernetes",), "volume": ("kubernetes",), "secret": ("kubernetes",),
    "namespace": ("kubernetes",), "address": ("ray",), "follow": ("ray",),
}  # fmt: skip
"""Option -> the clusters for which it means something."""
OF_QUESTION = {
    "--status": ("address",), "--logs": ("address", "follow"), "--stop": ("address",), "--await-nodes": ("address",),
}  # fmt: skip


def submit(console: Console, to: str | None, asked: Asked, source: Source, options: Options) -> None:
    """One of: hand over, write, or ask about a job."""
    ways = [*(["--to"] if to is not None else []), *asked.given()]
    if len(ways) != 1:
        found = " and ".join(ways) + " go not together" if ways else "nothing says where to"
        raise UsageRefused(found, hint=f"--to {' or '.join(CLUSTERS)}; or --status, --logs or --stop with a job's id")
    if to is None:
        _refuse_idle(options, ways[0], OF_QUESTION[ways[0]])
        if source.argument is not None or source.sets or any(value is not None for value in source.flags.values()):
            raise UsageRefused(f"{ways[0]} is about a job and takes no profile", hint=f"nftctl submit {ways[0]} ID")
        _ask(console, asked, options)
        return
    if to not in CLUSTERS:
        raise UsageRefused(f'there is no --to "{to}"', hint=f"one of {', '.join(CLUSTERS)}")
    if (name := source.flags.get("job.name")) is not None and not str(name).strip():
        raise UsageRefused("--name is empty", hint="give the run a name, or leave --name out: profile, date and time")
    _refuse_idle(options, f"--to {to}", [name for name, clusters in OF_CLUSTER.items() if to in clusters])
    _refuse_no_size(to, options.memory_per_node)
    {"ray": _to_ray, "slurm": _to_slurm, "kubernetes": _to_kubernetes}[to](console, source, options)


def _refuse_no_size(to: str, memory: str) -> None:
    """sbatch knows no Gi, and its G is what Kubernetes calls that."""
    if memory and (not _MEMORY.fullmatch(memory) or (to == "slurm" and memory.endswith("i"))):
        example = "512G" if to == "slurm" else "512Gi"
        raise UsageRefused(f'--memory-per-node "{memory}" is no size of {to}', hint=f"for example {example}")


def _refuse_idle(options: Options, way: str, allowed: Sequence[str]) -> None:
    """An option that would do nothing is a mistake."""
    defaults = Options()
    idle = [
        f"--{name.replace('_', '-')}"
        for name in Options.__slots__
        if name not in allowed and getattr(options, name) != getattr(defaults, name)
    ]
    if idle:
        raise UsageRefused(f"{', '.join(idle)} means nothing with {way}")


# -- the profile ----------------------------------------------------------------------------------------------------


def _load(
    console: Console, source: Source, address: str | None = None, mount: str = ""
) -> tuple[Resolved, list[Finding]]:
    """The checked profile with a run name in it, and warnings. Raises ProfileRefused with everything that is wrong.

    `address` takes the place of grid.address. With `mount`, what is on a volume of the cluster is not looked for here.
    """
    from nftctl.profile.load import find_profile, load_profile

    path, which = find_profile(source.argument, os.environ, Path.cwd())
    console.say(which)
    flags = {key: value for key, value in source.flags.items() if value is not None}
    loaded = load_profile(path, sets=source.sets, flags=flags)
    asked = loaded.profile.grid.address
    if address is not None and loaded.origins["grid.address"].source != "default" and asked != address:
        console.say(f"grid.address = {asked} is not used: the job joins the cluster that it runs in")
    resolved = _settled(loaded, address, mount)
    return resolved, _check(console, resolved, mount)


def _settled(resolved: Resolved, address: str | None, mount: str) -> Resolved:
    """With what a job has to say and the profile may leave open."""
    from datetime import datetime

    more: dict[str, object] = {} if address is None else {"grid.address": address}
    if mount and resolved.origins["job.run_dir"].source == "default":
        more["job.run_dir"] = f"{mount}/runs"
    if not resolved.profile.job.name:
        more["job.name"] = f"{resolved.name}-{datetime.now():%Y%m%d-%H%M%S}"
    return _with(resolved, more)


def _check(console: Console, resolved: Resolved, mount: str) -> list[Finding]:
    """Every rule of preflight; the warnings, if there is nothing worse."""
    from nftctl.profile.preflight import check

    findings = [finding for finding in check(resolved, every_rule()) if finding.code not in OF_THIS_MACHINE]
    left = [finding for finding in findings if mount and _is_left_to_the_pod(finding, resolved, mount)]
    for finding in left:
        console.say(f"left to the pod, which sees the volume: {finding.code} of {finding.key}")
    findings = [finding for finding in findings if finding not in left]
    if any(finding.severity == "error" for finding in findings):
        raise ProfileRefused(findings)
    console.findings(findings)
    return findings


def _with(resolved: Resolved, flags: Mapping[str, object]) -> Resolved:
    """The same profile with more flags. It is not read again: a pipe holds it once."""
    from nftctl.profile.origins import Origin

    profile, origins = resolved.profile, dict(resolved.origins)
    for key, value in flags.items():
        section, _, name = key.partition(".")
        profile = profile.model_copy(update={section: getattr(profile, section).model_copy(update={name: value})})
        origins[key] = Origin("flag", "command line")
    return replace(resolved, profile=profile, origins=origins)


def _is_left_to_the_pod(finding: Finding, resolved: Resolved, mount: str) -> bool:
    from nftctl.submit.kubernetes import is_on
    from nftctl.submit.portable import paths_of

    if finding.code in LEFT_TO_THE_POD:
        return True
    return finding.code in ON_THE_VOLUME and is_on(paths_of(resolved).get(finding.key, ""), mount)


def _refuse_relative(resolved: Resolved, findings: Sequence[Finding], *, mount: str = "") -> None:
    """The job runs in a folder of its own, so every path has to be whole, and on Kubernetes on the volume.

    Raises ProfileRefused with all of them at once.
    """
    from nftctl.profile.preflight import place
    from nftctl.profile.rules.rule import Problem, Severity
    from nftctl.submit.kubernetes import is_on
    from nftctl.submit.portable import paths_of

    wrong: list[tuple[str, Severity, Problem]] = []
    for key, path in paths_of(resolved).items():
        if mount and not is_on(path, mount):
            problem = Problem(key, f'{key} = "{path}" is not on the volume', f"pods see the volume at {mount}")
        elif not path.startswith("/"):
            problem = Problem(key, f'{key} = "{path}" is relative', "give a whole path that leads there on the cluster")
        else:
            continue
        wrong.append(("path-elsewhere", "error", problem))
    if wrong:
        raise ProfileRefused([*findings, *place(resolved, wrong)])


# -- slurm and kubernetes -------------------------------------------------------------------------------------------


def _to_slurm(console: Console, source: Source, options: Options) -> None:
    from nftctl.submit import slurm
    from nftctl.submit.portable import profile_text, token_variables

    resolved, warnings = _load(console, source)
    size = _size(console, resolved, options)
    job = resolved.profile.job
    wishes = slurm.Wishes(
        str(Path.cwd()), job.run_dir, options.grace, options.memory_per_node, options.sbatch, options.setup
    )
    name = job.name
    text = slurm.script(profile_text(resolved), name, size, token_variables(resolved), wishes)
    console.say(f"run {name}: {size.describe()}")
    extra = {"test_only": _say_tested(console, slurm.test_only(text))}
    _hand_out(console, "slurm", text, resolved, size, warnings, options, "sbatch {}", extra)


_UNASKED = re.compile(
    r"contact slurm controller|configuration source|connection failure|connection refused|timed out|zero bytes were"
    r"|slurmctld|^sbatch --test-only:",
    re.IGNORECASE,
)
"""What an sbatch says that could not ask, of its controller or of the way there; the last is our own word."""


def _say_tested(console: Console, tested: tuple[bool, str] | None) -> dict[str, Any] | None:
    """Say what Slurm thinks of the script; as JSON, where `ok` is null when nobody answered."""
    if tested is None:
        return None
    accepted, words = tested
    if accepted:
        console.say(f"sbatch --test-only accepts it: {words}")
        return {"ok": True, "message": words}
    if _UNASKED.search(words):
        console.warn(f"no Slurm controller answered, so the script is not tested; sbatch says: {words}")
        return {"ok": None, "message": words}
    console.warn(f"sbatch --test-only refuses it: {words}")
    return {"ok": False, "message": words}


def _to_kubernetes(console: Console, source: Source, options: Options) -> None:
    from nftctl.submit import kubernetes
    from nftctl.submit.portable import profile_text, token_variables

    lacking = [option for option, value in (("--image", options.image), ("--volume", options.volume)) if not value]
    if lacking:
        raise UsageRefused(
            f"--to kubernetes needs {' and '.join(lacking)}", hint="for example --image nftctl:0.1 --volume runs:/data"
        )
    claim, mount = kubernetes.parse_volume(options.volume)
    wishes = kubernetes.Wishes(
        options.image, claim, mount, options.secret, options.namespace, options.memory_per_node, options.grace
    )
    kubernetes.refuse_unnameable(wishes)
    resolved, warnings = _load(console, source, "auto", mount)
    _refuse_relative(resolved, warnings, mount=mount)
    size, tokens, name = _size(console, resolved, options), token_variables(resolved), resolved.profile.job.name
    if options.secret and not tokens:
        raise UsageRefused(
            f"--secret {options.secret} means nothing: no reward provider of the profile is a running service, and an "
            "embedded scorer needs no token",
            hint="leave --secret out",
        )
    if not size.gpus and (memory := estimated_memory(resolved)) is not None:
        wishes = replace(wishes, tensors=memory["peak_bytes"])
    text = kubernetes.manifest(profile_text(resolved), name, size, tokens, _launch_options(options), wishes)
    console.say(f"run {name} as RayJob {kubernetes.object_name(name)}: {size.describe()}")
    if tokens and not options.secret:
        console.say(f"without --secret no pod gets {', '.join(tokens)}")
    extra = {"object": kubernetes.object_name(name)}
    _hand_out(console, "kubernetes", text, resolved, size, warnings, options, "kubectl apply -f {}", extra)


def _launch_options(options: Options) -> list[str]:
    """A second attempt of a job goes on where the first stopped, whoever makes it."""
    restarts = ["--max-restarts", str(options.max_restarts)] if options.max_restarts else []
    return ["--auto-resume", *restarts]


def _size(console: Console, resolved: Resolved, options: Options) -> Size:
    from nftctl.submit.size import size_of

    size = size_of(resolved.profile, options.gpus_per_node, options.cpus_per_node)
    if size.why:
        console.say(size.why)
    return size


def _hand_out(
    console: Console,
    to: str,
    text: str,
    resolved: Resolved,
    size: Size,
    warnings: Sequence[Finding],
    options: Options,
    next_command: str,
    extra: Mapping[str, Any],
) -> None:
    """The text to a new file or to stdout, and what to type next."""
    import shlex

    written = options.output if not options.dry_run else None
    if written is not None:
        try:
            _write_new(written, text)
        except FileExistsError:
            raise UsageRefused(f"{written} is there already", hint="give --output another name") from None
        except OSError as error:
            raise UsageRefused(f"{written} cannot be written: {error.strerror or error}") from None
        console.data(str(written))
        console.say(f"next: {next_command.format(shlex.quote(str(written)))}")
    elif not console.json:
        typer.echo(text, nl=False)
    job = resolved.profile.job
    described = {"to": to, "run": job.name, "run_dir": job.run_dir, "nodes": size.nodes, "ranks": size.ranks}
    described |= {"gpus_per_node": size.gpus, "cpus_per_node": size.cpus, **extra}
    console.result(
        "submit",
        warnings,
        dry_run=options.dry_run,
        submission=described | {"output": None if written is None else str(written), "text": text},
    )


def _write_new(path: Path, text: str) -> None:
    """A file that was not there, whole or not at all: half a script looks like one. Raises OSError."""
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


# -- ray ------------------------------------------------------------------------------------------------------------


def _to_ray(console: Console, source: Source, options: Options) -> None:
    import asyncio

    from nftctl.submit import ray_jobs
    from nftctl.submit.portable import profile_text, token_variables

    address = ray_jobs.find_address(options.address, os.environ)
    resolved, warnings = _load(console, source, "auto")
    _refuse_relative(resolved, warnings)
    run = resolved.profile.job.name
    command = ray_jobs.entrypoint(
        profile_text(resolved),
        options.setup,
        _launch_options(options),
        token_variables(resolved),
        as_file=bool(options.max_restarts),
    )
    body = ray_jobs.request(command, run, options.grace)
    if options.dry_run:
        console.data(command.rstrip("\n"))
        console.say(f"dry run: nothing was sent to {address}")
        console.result("submit", warnings, dry_run=True, submission={"to": "ray", "address": address, "request": body})
        return
    for variable in (name for name in token_variables(resolved) if os.environ.get(name)):
        console.warn(f"{variable} is not sent to the cluster; it must be set where its Ray was started")

    async def hand_over() -> Job:
        async with ray_jobs.JobServer(address, os.environ) as server:
            console.say(f"job server {address}: Ray {server.ray}")
            job = await server.submit(body)
            console.data(job)
            for line in (f"run {run}", f"nftctl submit --logs {job} --follow", f"nftctl submit --stop {job}"):
                console.say(line)
            return await (_follow(console, server, job) if options.follow else server.status(job))

    _closing(console, asyncio.run(hand_over()), address, warnings, follow=options.follow)


def _ask(console: Console, asked: Asked, options: Options) -> None:
    import asyncio

    if asked.await_nodes is not None:
        _await_nodes(console, asked.await_nodes, options.address or "")
        return
    from nftctl.submit import ray_jobs

    address = ray_jobs.find_address(options.address, os.environ)
    id = asked.status or asked.logs or asked.stop or ""
    if not id.strip():
        raise UsageRefused("the id of the job is empty", hint="give what `nftctl submit --to ray` printed")

    async def question() -> tuple[Job, dict[str, Any]]:
        async with ray_jobs.JobServer(address, os.environ) as server:
            if asked.stop is not None:
                stopped = await server.stop(id)
                console.say("it saves and ends" if stopped else "it had ended already")
                return await server.status(id), {"stopped": stopped}
            if asked.status is not None:
                return await server.status(id), {}
            if options.follow:
                return await _follow(console, server, id), {}
            text = await server.logs(id)
            if not console.json:
                typer.echo(text, nl=False)
            return await server.status(id), {"logs": text}

    job, extra = asyncio.run(question())
    if asked.logs is None:
        code = "" if job.exit_code is None else f", exit code {job.exit_code}"
        console.data(f"{job.id}: {job.status}{code}")
    _closing(console, job, address, (), follow=options.follow, **extra)


async def _follow(console: Console, server: Any, id: str) -> Job:
    """Everything the job prints, to stdout, until it has ended; its last status."""
    import asyncio

    async for text in server.follow(id):
        if not console.json:
            typer.echo(text, nl=False)
    job: Job = await server.status(id)
    while not job.has_ended:  # the log ends a moment before the status says so
        await asyncio.sleep(0.5)
        job = await server.status(id)
    console.say(f"{id}: {job.status}")
    return job


def _closing(
    console: Console, job: Job, address: str, warnings: Sequence[Finding], *, follow: bool, **extra: Any
) -> None:
    """The JSON object, and for who followed the job the exit code that the run would have had here."""
    code = _exit_code(job) if follow else 0
    described = {"id": job.id, "address": address, "run": job.run, "status": job.status, "message": job.message}
    console.result("submit", warnings, exit_code=code, job=described | {"exit_code": job.exit_code}, **extra)
    if code:
        raise typer.Exit(code)


def _exit_code(job: Job) -> int:
    if job.status == "SUCCEEDED":
        return ExitCode.OK
    if job.status == "STOPPED":
        return ExitCode.SIGTERM
    # Without a code of its own it never came to run: Ray could not start it, or lost its node.
    if job.exit_code is None:
        return ExitCode.ENVIRONMENT
    if job.exit_code < 0:  # a signal ended it: as a shell has it
        return 128 - job.exit_code
    return job.exit_code or ExitCode.TRAINING


def _await_nodes(console: Console, count: int, address: str) -> None:
    """Wait until a Ray cluster has so many nodes; for the sbatch script. Raises EnvironmentUnfit after `AWAIT_S`."""
    import time

    from nftctl.engine.cluster import look_at
    from nftctl.errors import EnvironmentUnfit
    from nftctl.profile.endpoint import endpoint
    from nftctl.profile.schema import Grid

    try:
        endpoint(address)
    except ValueError as error:
        reason = str(error).replace("is not local, auto or HOST:PORT", "is not HOST:PORT")
        raise UsageRefused(
            f'--await-nodes: --address "{address}" {reason}', hint="give the address that `ray start` printed"
        ) from None

    end = time.monotonic() + AWAIT_S
    while True:
        found = len(look_at(Grid(address=address), os.environ).nodes)
        if found >= count:
            console.say(f"{found} of {count} nodes have joined Ray at {address}")
            return
        if time.monotonic() > end:
            raise EnvironmentUnfit(
                f"{found} of {count} nodes joined Ray at {address} within {AWAIT_S:.0f} s",
                hint="the output above says why; nodes must reach each other on any port",
            )
        console.say(f"{found} of {count} nodes have joined")
        time.sleep(2)
