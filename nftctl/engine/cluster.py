"""A running Ray cluster, looked at from outside before anything is joined, created or written.

Owns the meaning of `grid.address`, and every reason not to start there: nobody listens, another version, a token that
is missing, no room. Each ends with exit code 8, since nothing was trained. Imports no Ray: a program of its own asks
(survey.py), and is ended when it takes too long. The token is Ray's own matter and is never read here.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nftctl.engine.seats import Node, amounts, bundle_of, seat, told
from nftctl.errors import EnvironmentUnfit
from nftctl.profile.diagnose import printable
from nftctl.profile.endpoint import CLIENT_MODE, CLIENT_MODE_HELP, endpoint
from nftctl.profile.schema import Grid, Profile

CONNECT_TIMEOUT_S = 3.0
"""Longest wait for an address to accept a connection; Ray alone waits two minutes."""
SURVEY_TIMEOUT_S = 20.0
"""Longest wait for the answers of a cluster that accepts connections, Ray's import included."""
RAY_FILES_BYTES = 256 << 20
"""Room for the logs and sockets of a private Ray. No image, weight or score goes through its object store."""
SHOWN_PROGRAM = 120
"""Most letters of a command line that holds room."""
LOCAL_HELP = "start the cluster, or leave grid.address out: the run then starts a Ray of its own on this machine"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a survey found. `how` says where the address is from; `token`: it answers with a token only.

    `seats`: the node of every rank, in rank order, once they are chosen.
    """

    address: str
    how: str
    ray: str
    python: str
    nodes: tuple[Node, ...]
    holders: tuple[str, ...]
    token: bool
    seats: tuple[Node, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(int(node.total.get("GPU", 0)) for node in self.nodes)

    @property
    def only_here(self) -> bool:
        """Whether every rank is on this machine, and so on its loopback and its disks."""
        return all(node.here for node in self.seats)

    @property
    def our_ip(self) -> str:
        """The address of the node that runs on this machine, by which the others reach it."""
        return next(node.ip for node in self.nodes if node.here)

    def describe(self) -> str:
        """One line for people."""
        nodes = "; ".join(
            f"{node.ip}{' (this machine)' if node.here else ''} with {amounts(node.total)}, free {amounts(node.free)}"
            for node in self.nodes
        )
        count = f"{len(self.nodes)} node{'s' if len(self.nodes) != 1 else ''}"
        return f"Ray cluster at {self.address} ({self.how}): Ray {self.ray}, Python {self.python}, {count}: {nodes}"


def find_cluster(profile: Profile, env: Mapping[str, str], say: Callable[[str], None]) -> Cluster | None:
    """The cluster that the run will join, fit for it and with a seat for every rank; None for a private Ray.

    Raises EnvironmentUnfit for everything that would keep the run from starting there.
    """
    grid = profile.grid
    if grid.address == "local":
        if env.get("RAY_ADDRESS"):
            say(f"RAY_ADDRESS={env['RAY_ADDRESS']} is set and not used: grid.address is local")
        refuse_full_disk(env)
        return None
    found = look_at(grid, env)
    say(found.describe())
    seated = refuse_unfit(found, grid, profile.ranks)
    say(told(seated.seats, grid.shard_group))
    return seated


def choose_device(grid: Grid, ranks: int, gpus: int) -> str:
    """`auto` takes GPUs when there is one for every rank, and the CPU only when there is none at all."""
    if runs_on_cpu(grid, gpus):
        return "cpu"
    if gpus < ranks:
        raise EnvironmentUnfit(
            f"{ranks} GPUs are needed, one per rank (rl.group_size = {ranks}); {gpus} are visible",
            hint='lower rl.group_size, or set grid.device = "cpu"',
        )
    return "cuda"


def runs_on_cpu(grid: Grid, gpus: int) -> bool:
    """Whether the profile asks for the CPU, or leaves it open where there is nothing else."""
    return grid.device == "cpu" or (grid.device == "auto" and gpus == 0)


# -- where it is ----------------------------------------------------------------------------------------------------


def ray_folder(env: Mapping[str, str]) -> Path:
    """Where a Ray started here keeps its files, by Ray's own order."""
    return Path(env.get("RAY_TMPDIR") or env.get("TMPDIR") or "/tmp") / "ray"


def resolve(address: str, env: Mapping[str, str]) -> tuple[str, int, str]:
    """Host, port, and where they are from. EnvironmentUnfit when `auto` finds nothing that can be joined."""
    if address != "auto":
        return *endpoint(address), "grid.address"
    note = ray_folder(env) / "ray_current_cluster"
    how, found = "RAY_ADDRESS", env.get("RAY_ADDRESS", "")
    if found in ("", "auto"):
        how = f"noted in {note}"
        try:
            found = note.read_text().strip()
        except (OSError, UnicodeDecodeError):
            raise EnvironmentUnfit(
                f'grid.address = "auto" finds no cluster: RAY_ADDRESS is not set, and there is no {note}',
                hint=LOCAL_HELP,
            ) from None
    try:
        return *endpoint(found), how
    except ValueError as error:
        reason = str(error).replace("is not local, auto or HOST:PORT", "is not HOST:PORT")
        hint = CLIENT_MODE_HELP if found.startswith(CLIENT_MODE) else "set it to the address that `ray start` printed"
        raise EnvironmentUnfit(f'"{found}" ({how}) {reason}', hint=hint) from None


# -- what it is -----------------------------------------------------------------------------------------------------


def look_at(grid: Grid, env: Mapping[str, str]) -> Cluster:
    """Ask the cluster that `grid.address` names. EnvironmentUnfit when it does not answer, or not to us."""
    host, port, how = resolve(grid.address, env)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise EnvironmentUnfit(f"no Ray at {address} ({how}): {error.strerror or error}", hint=LOCAL_HELP) from None
    except UnicodeError:  # an empty label, or one of more than 63 letters
        raise EnvironmentUnfit(f"no Ray at {address} ({how}): that is no host name", hint=LOCAL_HELP) from None
    if env.get("RAY_AUTH_MODE") == "token" and not token_at_hand(env):
        raise _no_token()  # Ray's client would say so in a trace of its own code
    answer, token = _ask(address, how, env), env.get("RAY_AUTH_MODE") == "token"
    if answer.get("error") == "AuthenticationError" and "RAY_AUTH_MODE" not in env and token_at_hand(env):
        # Ray sends a token to an address only when told to. This one asked for it, and the profile names it.
        answer, token = _ask(address, how, {**env, "RAY_AUTH_MODE": "token"}), True
    if answer.get("error") == "AuthenticationError":
        raise _not_admitted(address, token, env)
    if "error" in answer:
        reason = f"{answer['error']}: {answer['reason']}"
        raise EnvironmentUnfit(f"what listens at {address} ({how}) does not answer as Ray does: {reason}")
    nodes = tuple(
        Node(**{name: node[name] for name in ("id", "host", "ip", "here", "python", "total", "free")})
        for node in answer["nodes"]
    )
    holders = tuple(map(_holder, answer["holders"]))
    return Cluster(address, how, answer["ray"], answer["python"], nodes, holders, token)


def _ask(address: str, how: str, env: Mapping[str, str]) -> dict[str, Any]:
    # -P: the folder of the program, with its `plan` and `report`, must not stand in front of other packages.
    command = [sys.executable, "-P", str(Path(__file__).with_name("survey.py")), address]
    try:
        done = subprocess.run(
            command,
            env={**env, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=SURVEY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentUnfit(
            f"what listens at {address} ({how}) does not answer as Ray {version('ray')} does "
            f"within {SURVEY_TIMEOUT_S:.0f} s",
            hint="give the port of Ray's GCS (`ray start` prints it); a much older or newer Ray is silent, too",
        ) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        answer = {"error": f"Ray's client ended with {done.returncode}", "reason": last}
    return answer


def _holder(row: Mapping[str, Any]) -> str:
    # Somebody else's words, which may be a whole program: `python -c`, or a profile as a here-document.
    program = printable(" ".join(row["program"].split()))
    if len(program) > SHOWN_PROGRAM:
        program = f"{program[: SHOWN_PROGRAM - 3]}..."
    of = f" of `{program}`" if program else ""
    return f"{printable(row['what'])}{of}: {amounts(row['held'])}"


# -- why not --------------------------------------------------------------------------------------------------------


def token_at_hand(env: Mapping[str, str]) -> bool:
    """Whether Ray would find a token. Only whether: what it is stays between Ray and its file."""
    file = env.get("RAY_AUTH_TOKEN_PATH") or str(Path(env.get("HOME", "~")).expanduser() / ".ray" / "auth_token")
    return bool(env.get("RAY_AUTH_TOKEN")) or Path(file).is_file()


def _no_token() -> EnvironmentUnfit:
    return EnvironmentUnfit(
        "RAY_AUTH_MODE is token, and there is none in RAY_AUTH_TOKEN, at RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token",
        hint="`ray get-auth-token` on the cluster's head prints it; unset RAY_AUTH_MODE for a cluster that wants none",
    )


def _not_admitted(address: str, token: bool, env: Mapping[str, str]) -> EnvironmentUnfit:
    if token:
        message = f"the Ray cluster at {address} refuses the token that is set here"
        hint = "`ray get-auth-token` on its head prints the right one, for RAY_AUTH_TOKEN or ~/.ray/auth_token"
    elif "RAY_AUTH_MODE" in env:
        message = f"the Ray cluster at {address} wants a token, and RAY_AUTH_MODE={env['RAY_AUTH_MODE']} sends none"
        hint = "unset RAY_AUTH_MODE, or set it to token"
    else:
        message = (
            f"the Ray cluster at {address} wants a token, and there is none in RAY_AUTH_TOKEN, at RAY_AUTH_TOKEN_PATH, "
            "or in ~/.ray/auth_token"
        )
        hint = "`ray get-auth-token` on its head prints it"
    return EnvironmentUnfit(message, hint=hint)


def refuse_unfit(cluster: Cluster, grid: Grid, ranks: int) -> Cluster:
    """The cluster with its seats; EnvironmentUnfit for everything that would still keep the run from starting there."""
    refuse_mismatch(cluster)
    bundle = bundle_of("cpu" if runs_on_cpu(grid, cluster.gpus) else "cuda")
    seats = seat(cluster.nodes, bundle, ranks, grid.strategy, grid.shard_group)
    if not seats:
        raise _no_room(cluster, bundle, ranks)
    return replace(cluster, seats=seats)


def refuse_mismatch(cluster: Cluster) -> None:
    """Ray's own condition, told before Ray is asked to join: the same Ray, the same Python, to the last digit."""
    ours, theirs = (version("ray"), platform.python_version()), (cluster.ray, cluster.python)
    if ours != theirs:
        here = next((node.python for node in cluster.nodes if node.here and node.python), "")
        where = here or f"an interpreter on {', '.join(node.host for node in cluster.nodes) or 'another machine'}"
        raise EnvironmentUnfit(
            f"the Ray cluster at {cluster.address} runs Ray {cluster.ray} with Python {cluster.python} ({where}), "
            f"this is Ray {ours[0]} with Python {ours[1]} ({sys.executable})",
            hint="run nftctl with the cluster's environment, or start the cluster from this one; they must be equal",
        )
    if not any(node.here for node in cluster.nodes):
        raise EnvironmentUnfit(
            f"no node of the Ray cluster at {cluster.address} runs on this machine, and a driver joins through one "
            f"(nodes: {', '.join(node.ip for node in cluster.nodes)})",
            hint=f"run nftctl on a node, or make this machine one: ray start --address={cluster.address}",
        )


def _no_room(cluster: Cluster, bundle: Mapping[str, float], ranks: int) -> EnvironmentUnfit:
    """Ray would wait for ever for room that may never come; a run does not queue."""
    free = "; ".join(f"{node.ip} has {amounts(node.free)} free of {amounts(node.total)}" for node in cluster.nodes)
    held = f"; held by {'; '.join(cluster.holders)}" if cluster.holders else ""
    needed = amounts({name: ranks * amount for name, amount in bundle.items()})
    return EnvironmentUnfit(
        f"{ranks} ranks need {needed} (rl.group_size = {ranks}); {free}{held}",
        hint="wait until there is room, join another cluster, or begin a new run with a lower rl.group_size",
    )


def refuse_full_disk(env: Mapping[str, str]) -> None:
    """A private Ray on a full disk starts, and later loses an actor without a reason."""
    folder = ray_folder(env)
    place = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = shutil.disk_usage(place).free if place else 0
    if free < RAY_FILES_BYTES:
        raise EnvironmentUnfit(
            f"Ray's files go to {folder}, which has {free:,} bytes free; {RAY_FILES_BYTES:,} are needed",
            hint="make room there, or set RAY_TMPDIR to a folder on another disk",
        )
