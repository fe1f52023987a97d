"""Ray, for one run: a private instance or a cluster that the profile names; one bundle per rank; nothing else touched.

Refuses a machine that has fewer GPUs than ranks, and a node that does not have this very nftctl. Never joins a cluster
that the profile does not name, and never shells out to `ray stop`, which would end every Ray on the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nftctl import __version__, itself
from nftctl.engine.cluster import Cluster, choose_device, ray_folder
from nftctl.engine.seats import Node, bundle_of
from nftctl.errors import EnvironmentUnfit
from nftctl.profile.schema import Grid

PLACE_TIMEOUT_S = 60.0
"""Longest wait for bundles. That there is room was seen before; a cluster may have given it away since."""
LOOK_TIMEOUT_S = 60.0
"""Longest wait for a node's word on its code; it starts a process there."""


def start_ray(grid: Grid, ranks: int, cluster: Cluster | None, say: Callable[[str], None]) -> str:
    """Join `cluster`, or start a private Ray on this machine; returns the device, `cpu` or `cuda`.

    Raises EnvironmentUnfit when Ray does not start, with its own reason, and when there are too few GPUs.
    """
    os.environ.pop("RAY_ADDRESS", None)
    # Ray's usage report and its log de-duplication have no place in a tool that promises quiet and complete logs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if cluster is not None and cluster.token:
        os.environ["RAY_AUTH_MODE"] = "token"
    # Only now: Ray reads these variables once, when it is imported.
    import ray

    own: dict[str, Any] = {
        "num_cpus": ranks,
        "num_gpus": 0 if grid.device == "cpu" else None,
        "include_dashboard": False,
    }
    with warnings.catch_warnings(), _own_signals(), _groups_of_their_own():
        warnings.simplefilter("ignore")
        try:
            ray.init(
                address="local" if cluster is None else cluster.address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **(own if cluster is None else {}),
            )
        except Exception as error:
            raise _not_started(error, cluster) from error
    if cluster is not None:
        return choose_device(grid, ranks, cluster.gpus)
    say(f"Ray of its own at {ray.get_runtime_context().gcs_address}, logs in {own_logs(os.environ)}")
    return choose_device(grid, ranks, int(ray.cluster_resources().get("GPU", 0)))


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put our signal handlers back at once: Ray's would end the process at the first SIGTERM, unsaved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Start Ray's processes in process groups of their own.

    A terminal, `timeout` or a supervisor signals a whole group. Ray's own processes would end at SIGTERM on the spot,
    and with them the step that is to be finished and saved. They still end with this process, whose death they watch.
    """
    plain: Any = subprocess.Popen.__init__

    def apart(process: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("process_group", 0)
        plain(process, *args, **kwargs)

    # Ray offers no way to say it, and looks the class up when it starts a process.
    subprocess.Popen.__init__ = apart  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = plain  # type: ignore[method-assign]


def own_logs(env: Mapping[str, str]) -> Path:
    """Log folder of the Ray that this process started or tried to start; Ray puts the process id into its name."""
    folder = ray_folder(env)
    sessions = sorted(folder.glob(f"session_*_{os.getpid()}"))
    return (sessions[-1] if sessions else folder) / "logs"


def _not_started(error: BaseException, cluster: Cluster | None) -> EnvironmentUnfit:
    reasons = []
    cause: BaseException | None = error
    while cause is not None:
        reasons.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
        cause = cause.__cause__ or cause.__context__
    reason = "; because of ".join(reasons)
    if cluster is not None:
        return EnvironmentUnfit(f"Ray could not join the cluster at {cluster.address}: {reason}")
    logs = own_logs(os.environ)
    return EnvironmentUnfit(f"Ray did not start: {reason}{_last_words(logs)}", hint=f"Ray's own logs are in {logs}")


def _last_words(logs: Path) -> str:
    """Why the raylet ended, which Ray leaves in that file: a slow import, say, that trips one of its fixed limits."""
    try:
        first = (logs / "raylet.err").read_text(errors="replace").splitlines()[:1]
    except OSError:
        return ""
    return f"; its raylet ended with: {first[0].rpartition('Check failed: ')[2]}" if first else ""


def place(ranks: int, device: str, seats: Sequence[Node] = (), timeout_s: float = PLACE_TIMEOUT_S) -> Any:
    """A placement group with one bundle per rank, ready: each on the node of its seat, all on one node without seats.

    Raises EnvironmentUnfit when it is not within `timeout_s`.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = bundle_of(device)
    group = placement_group(
        [dict(bundle) for _ in range(ranks)],
        strategy="PACK" if seats else "STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": node.id} for node in seats] or None,
    )
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        raise EnvironmentUnfit(
            f"no room for {ranks} ranks of {bundle} within {timeout_s:.0f} s: Ray has {free} free",
            hint="what was free a moment ago was taken, or a node went away: try again",
        ) from None
    return group


def refuse_shadowed(working: Path) -> None:
    """Refuse a working folder with another nftctl: Ray lets the ranks of a private instance look there first."""
    other = working / "nftctl"
    if (other / "__init__.py").is_file() and other.resolve() != itself.folder():
        raise EnvironmentUnfit(
            f"ranks would run the nftctl that lies in the working folder, {other}, and this process runs "
            f"{itself.folder()}",
            hint="start from another folder, or with that nftctl's own command",
        )


def refuse_other_folder(members: Iterable[Mapping[str, Any]]) -> None:
    """Refuse ranks of a private Ray that took their nftctl from elsewhere, wherever they found it."""
    ours = str(itself.folder())
    for member in members:
        theirs = member.get("code", "an older nftctl's folder")
        if theirs != ours:
            raise EnvironmentUnfit(
                f"rank {member['rank']} would run nftctl from {theirs}, and this process runs it from {ours}",
                hint="look at PYTHONPATH and at sitecustomize: ranks are to find the nftctl that the command found",
            )


def own_code() -> dict[str, str]:
    """What has to be the same wherever ranks run: the versions of the arithmetic, and a hash of nftctl's source."""
    digest, root = hashlib.sha256(), itself.folder()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    # Of itself nftctl needs no metadata: a source tree on the path of Python has none.
    others = {name: version(name) for name in ("torch", "diffusers", "peft")}
    return {"nftctl": __version__} | others | {"source": digest.hexdigest()}


def refuse_other_code(bundles: Any, ranks: Iterable[int], folders: list[Path]) -> None:
    """Have the nodes of these ranks say what they would run, and if they see `folders`.

    Raises EnvironmentUnfit when one is not as here.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # A function inside a function travels by value: it has something to say even where there is no nftctl.
    def look() -> dict[str, Any]:
        facts: dict[str, Any] = {"host": socket.gethostname(), "python": sys.executable}
        try:
            from nftctl.engine.placement import own_code

            code = own_code()
        except Exception as error:
            return facts | {"fault": f"{type(error).__name__}: {error}"}
        return facts | {"code": code, "unseen": [str(path) for path in folders if not path.is_dir()]}

    task, ours = ray.remote(num_cpus=1, max_retries=0)(look), own_code()
    places = [PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank) for rank in ranks]
    try:
        answers = ray.get([task.options(scheduling_strategy=p).remote() for p in places], timeout=LOOK_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise EnvironmentUnfit(f"a node could not say what it would run: {type(error).__name__}: {error}") from None
    for facts in answers:
        judge_node(facts, ours)


def judge_node(facts: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    """Refuse what a node said of itself, unless it is as here."""
    place = f"{facts['python']} on node {facts['host']}"
    if "fault" in facts:
        raise EnvironmentUnfit(
            f"{place} cannot import nftctl: {facts['fault']}",
            hint=f"install nftctl {ours['nftctl']} for that interpreter: ranks run it there",
        )
    differ = [
        f"{name} {facts['code'].get(name)} there, {value} here"
        for name, value in ours.items()
        if facts["code"].get(name) != value
    ]
    if differ:
        raise EnvironmentUnfit(
            f"{place} has other code than this process: {'; '.join(differ)}",
            hint="install the same versions there; all ranks and the driver run one program",
        )
    if facts["unseen"]:
        raise EnvironmentUnfit(
            f"node {facts['host']} does not see {', '.join(facts['unseen'])}",
            hint="the ranks write there: begin the run in a folder that the node shares with this machine",
        )
