"""All ranks as one thing: start them, call them together, blame one, end all.

Refuses to wait for ever: once one rank has finished a stage, the others have the collective time-out to follow.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nftctl.engine import head, services
from nftctl.engine.cluster import Cluster
from nftctl.engine.head import LOOK_S, HeadWatch, dead_nodes
from nftctl.engine.lost import RanksLost
from nftctl.engine.placement import place, refuse_other_code, refuse_other_folder, refuse_shadowed, start_ray
from nftctl.engine.seats import Node, first_ranks, span
from nftctl.engine.storage import Input, refuse_unshared
from nftctl.engine.worker import Worker
from nftctl.errors import NftctlError, TrainingFailed
from nftctl.profile.schema import Profile
from nftctl.roles import stage

GRACE_S = 3.0
"""Seconds to wait for further failures after the first, so that the cause is blamed and not a neighbour."""


ASKED_S = 0.5
"""Seconds for what was sent last to leave this process."""

TIMED_OUT = "timed out"
"""What gloo says of a peer that is there and does nothing."""


@dataclass(slots=True)
class _Failures:
    by_rank: dict[int, BaseException] = field(default_factory=dict)

    def worst(self) -> tuple[int, BaseException]:
        """The rank to blame: one that died, else one that raised something of its own, else a broken collective."""

        def order(item: tuple[int, BaseException]) -> tuple[int, int]:
            rank, error = item
            if _died(error):
                return 0, rank
            cause = getattr(error, "cause", error)
            return (3 if _is_echo(cause) else 1 if isinstance(cause, NftctlError) else 2), rank

        return min(self.by_rank.items(), key=order)

    def waited_in_vain(self) -> bool:
        """Whether nothing failed but collectives, at least one of them for want of an answer."""
        causes = [getattr(error, "cause", error) for error in self.by_rank.values()]
        if any(_died(error) for error in self.by_rank.values()) or not all(_is_echo(cause) for cause in causes):
            return False
        return any(TIMED_OUT in str(cause).lower() for cause in causes)


def _died(error: BaseException) -> bool:
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError)


def _lost(error: BaseException) -> bool:
    """Whether a rank that failed like this is of no further use: dead, or with broken connections to the others."""
    return _died(error) or _is_echo(getattr(error, "cause", error))


def _is_echo(error: BaseException) -> bool:
    """A collective that broke because a peer was gone says nothing about this rank."""
    if isinstance(error, NftctlError) and not isinstance(error, TrainingFailed):
        return False  # a reward service may reset a connection too, and that is a cause
    text = str(error).lower()
    return any(part in text for part in (TIMED_OUT, "connection closed", "connection reset", "socket", "nccl"))


class Group:
    """The actors of a run, one per rank.

    whole   every rank has answered the last call, by a result or by an error of its own, and can be called again
    """

    def __init__(self, actors: list[Any], device: str, logs: Path | None, timeout_s: float) -> None:
        self.actors = actors
        self.device = device
        self._logs = logs
        self._timeout_s = timeout_s
        self.members: list[dict[str, Any]] = []
        self.bundles: Any = None
        self.whole = True
        self._seats: tuple[Node, ...] = ()
        self._head: HeadWatch | None = None

    @classmethod
    def start(
        cls,
        profile: Profile,
        logs: Path | None,
        born: Callable[[Group], None],
        cluster: Cluster | None = None,
        say: Callable[[str], None] = lambda text: None,
        inputs: Sequence[Input] = (),
    ) -> Group:
        """Start a private Ray, or join `cluster`; start one actor per rank, and join them into one process group.

        `inputs` are the files that every node has to read alike. `born` receives the group as soon as there is
        something to shut down, also when the rest of the start fails.
        """
        if cluster is None:
            refuse_shadowed(Path.cwd())
        ranks, timeout = profile.ranks, profile.grid.collective_timeout_s
        group = cls([], "cpu", logs, timeout)
        born(group)
        device = group.device = start_ray(profile.grid, ranks, cluster, say)
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        seats = group._seats = () if cluster is None else cluster.seats
        bundles = group.bundles = place(ranks, device, seats)
        logs = logs.absolute() if logs else None
        if cluster is not None:
            group._head = HeadWatch(cluster.address)
            nodes = first_ranks(seats)
            refuse_other_code(bundles, nodes, [Path.cwd(), *([logs] if logs else [])])
            if logs and not cluster.only_here:
                refuse_unshared(bundles, nodes, logs, inputs, say)
        remote = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0, max_restarts=0)(Worker)
        group.actors = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
            ).remote(rank, logs / f"rank_{rank}.log" if logs else None, profile.job.deterministic)
            for rank in range(ranks)
        ]
        if cluster is not None:
            # A cluster's processes have its folder and its environment, and the profile speaks of ours.
            asked = (*profile.reward.providers, *profile.eval.providers)
            names = {services.OWN_TOKEN, *(provider.token_env for provider in asked)} & set(os.environ)
            group.call("settle", Path.cwd(), {name: os.environ[name] for name in names})
        group.members = group.call("about")
        if cluster is None:
            refuse_other_folder(group.members)
        if len(first_ranks(seats)) > 1 or profile.grid.interface:
            group.call("wire", profile.grid.interface)
        host, port = group.call_one(0, "host_store", ranks, timeout)
        group.call("join", ranks, host, port, device, timeout)
        return group

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every rank at once and return the answers in rank order."""
        return self._wait({getattr(a, method).remote(*args): rank for rank, a in enumerate(self.actors)}, method)

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        """Call `method` on one rank. There is nobody to be slower than, so the time-out runs from the beginning."""
        by = time.monotonic() + self._timeout_s
        return self._wait({getattr(self.actors[rank], method).remote(*args): rank}, method, by)[0]

    def _wait(self, pending: Mapping[Any, int], method: str, deadline: float | None = None) -> list[Any]:
        import ray

        left, answers, failures = dict(pending), {}, _Failures()
        self.whole = False
        while left:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._next(list(left), timeout)
            if not ready:
                break
            for reference in ready:
                rank = left.pop(reference)
                try:
                    answers[rank] = ray.get(reference)
                except Exception as error:
                    failures.by_rank[rank] = error
            patience = GRACE_S if failures.by_rank else self._timeout_s
            deadline = time.monotonic() + patience if deadline is None or failures.by_rank else deadline
        late = sorted(left.values())
        self.whole = not late and not any(map(_lost, failures.by_rank.values()))
        if late and (not failures.by_rank or failures.waited_in_vain()):
            raise RanksLost(
                f"rank {late[0]} did not finish {self._doing(late[0], method)}{self._where(late[0])} "
                f"within the {self._timeout_s:.0f} s that ranks wait for each other (late: {late}){self._gone()}",
                rank=late[0],
                log=self._log(late[0]),
            )
        if failures.by_rank:
            self._blame(failures, method)
        return [answers[rank] for rank in sorted(answers)]

    def _next(self, references: list[Any], timeout: float | None) -> list[Any]:
        """What is ready next and whatever is ready with it; nothing when that is not within `timeout`.

        Raises RanksLost when the cluster's head goes silent.
        """
        if self._head is None:
            return _ready(references, timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_S if end is None else min(LOOK_S, max(0.0, end - time.monotonic()))
            ready = _ready(references, left)
            self._head.look()
            if ready or (end is not None and time.monotonic() >= end):
                return ready

    def _blame(self, failures: _Failures, method: str) -> None:
        rank, error = failures.worst()
        cause = getattr(error, "cause", error)
        if isinstance(cause, TrainingFailed) and _is_echo(cause):
            raise RanksLost(f"{cause.message}{self._gone()}", rank=rank, log=self._log(rank)) from None
        if isinstance(cause, TrainingFailed):
            cause.rank = rank if cause.rank is None else cause.rank
            cause.log = cause.log or self._log(rank)
            raise cause from None
        if isinstance(cause, NftctlError):
            raise cause from None
        doing = f"{self._doing(rank, method)}{self._where(rank)}"
        if _died(error):
            gone = self._gone() or ": its process ended without an exception"
            raise RanksLost(f"rank {rank} died in {doing}{gone}", rank=rank, log=self._log(rank)) from None
        self._write_down(rank, error)
        text = f"rank {rank} failed in {doing}: {type(cause).__name__}: {cause}"
        if _is_echo(cause):  # somebody went away, and nobody says who
            raise RanksLost(f"{text}{self._gone()}", rank=rank, log=self._log(rank)) from None
        raise TrainingFailed(text, rank=rank, log=self._log(rank)) from None

    def _write_down(self, rank: int, error: BaseException) -> None:
        """Put the rank's traceback at the end of its log, once: Ray hands it to the driver and writes it nowhere."""
        trace = re.sub(r"\x1b\[\d+m", "", str(error))
        if self._logs:
            with contextlib.suppress(OSError), Path(self._log(rank)).open("a") as log:
                log.write(f"rank {rank}: {trace.rstrip()}\n")

    def _doing(self, rank: int, method: str) -> str:
        """What the rank itself said last that it had begun, or the call, when it had begun no stage of a step."""
        said = stage.last_begun(Path(self._log(rank))) if self._logs else ""
        return said or f"`{method}`"

    def _where(self, rank: int) -> str:
        member = next((m for m in self.members if m["rank"] == rank), None)
        place = f"node {self._seats[rank].place}" if self._seats else member["host"] if member else ""
        return f" (pid {member['pid']} on {place})" if member else f" (on {place})" if place else ""

    def _gone(self) -> str:
        """The nodes of this run that Ray counts as dead, with their ranks and Ray's reason, ready to end a sentence."""
        dead = dead_nodes({node.id for node in self._seats}) if self._seats else {}
        lines = []
        for node_id, reason in dead.items():
            ranks = [rank for rank, node in enumerate(self._seats) if node.id == node_id]
            word = "ranks" if len(ranks) > 1 else "rank"
            lines.append(f"node {self._seats[ranks[0]].place} is gone, with {word} {span(ranks)}: {reason}")
        return f": {'; '.join(lines)}" if lines else ""

    def _log(self, rank: int) -> str:
        return str(self._logs / f"rank_{rank}.log") if self._logs else ""

    def shutdown(self) -> None:
        """Kill every actor, give the bundles back and end this run's Ray; leave every other Ray alone."""
        ray: Any = sys.modules.get("ray")
        if not hasattr(ray, "is_initialized"):
            return  # an interrupt came while it was imported, which cannot be done again and has started nothing
        if self._head is not None and self._head.silence():
            # Killing goes through the head, and so does leaving. What goes past it is to ask each rank to end.
            head.abandoned = True
            for actor in self.actors:
                with contextlib.suppress(Exception):
                    actor.end.remote()
            time.sleep(ASKED_S)
        else:
            for actor in self.actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor, no_restart=True)
            with contextlib.suppress(Exception):
                if self.bundles is not None:
                    ray.util.remove_placement_group(self.bundles)
            with contextlib.suppress(Exception):
                ray.shutdown()  # of a cluster that was joined, it only takes leave
        for member in self.members:
            # A stopped process ignores Ray's polite kill; it is ours, on this host, and must not outlive the run. By
            # its name a host cannot be told: many are called localhost.
            here = not self._seats or self._seats[member["rank"]].here
            if here and _is_rank_process(member["pid"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member["pid"], signal.SIGKILL)


def _ready(references: list[Any], timeout: float | None) -> list[Any]:
    """Wait for one, and take all that are there by then: a wait looks at every reference that it is given."""
    import ray

    ready, rest = ray.wait(references, num_returns=1, timeout=timeout)
    more = ray.wait(rest, num_returns=len(rest), timeout=0)[0] if ready and rest else []
    return [*ready, *more]


def _is_rank_process(pid: int) -> bool:
    """Whether `pid` is still a Ray actor of ours and not a later process with the same number."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
