"""What the nodes of a run have to share, tried before it starts: its folder, and the files that it reads.

Every node writes a file into the folder, renames it, and reads everybody's; every node hashes the base and the prompt
files where it reads them. Refuses, with the node's name, a folder that is not one and the same, and files that are not
the driver's. A clock that is off is only said: nothing that is computed depends on it.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nftctl.engine.seats import Node
from nftctl.errors import CheckpointUnusable, EnvironmentUnfit
from nftctl.run import hashing
from nftctl.run.disk import atomic_write

ANSWER_S = 60.0
"""Longest wait for a node's word on the folder; it starts a process there."""
HASH_S = 1800.0
"""Longest wait for a node's hashes: half a minute for each 10 GB that come at 300 MB a second."""
SEEN_S = 10.0
"""How late a node may see another's file: network file systems remember for some seconds what a folder held."""
SKEW_S = 2.0
"""Difference of clocks that is worth a word: files are then not dated in the order in which they were written."""
MARK = ".shared-"

Kind = Literal["base", "folder", "file"]


@dataclass(frozen=True, slots=True)
class Input:
    """Something that every rank reads: what it is to people, where it lies, and its hash on the driver's machine."""

    what: str
    kind: Kind
    path: Path
    hash: str


def hash_of(kind: Kind, path: Path) -> str:
    """The content hash of an input, by the rule of its kind."""
    rules: dict[Kind, Callable[[Path], str]] = {
        "base": hashing.fingerprint_base, "folder": hashing.fingerprint_folder, "file": hashing.hash_file,
    }  # fmt: skip
    return rules[kind](path)


# -- on a node ------------------------------------------------------------------------------------------------------


def leave(folder: Path, name: str) -> dict[str, Any]:
    """Write a mark into the folder as checkpoints are written: aside, to the disk, then to its name."""
    text = secrets.token_hex(16)
    try:
        atomic_write(folder / f"{MARK}{name}", text.encode())
    except OSError as error:
        return {"fault": f"cannot write there: {error.strerror or error}"}
    return {"text": text}


def look(folder: Path, marks: Mapping[str, str], wait_s: float = SEEN_S) -> dict[str, Any]:
    """Whether every mark is in the folder as it was left; waits `wait_s` for the last of them. And what time it is."""
    end = time.monotonic() + wait_s
    while missing := [name for name, text in marks.items() if _read(folder / f"{MARK}{name}") != text]:
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return {"missing": missing, "time": time.time()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def hashes(inputs: Sequence[Input]) -> list[str]:
    """The hash of each input as this node reads it, or why it cannot."""
    found = []
    for item in inputs:
        try:
            found.append(hash_of(item.kind, item.path))
        except (CheckpointUnusable, OSError) as error:
            found.append(f"not readable: {error}")
    return found


# -- from the driver ------------------------------------------------------------------------------------------------


def refuse_unshared(
    bundles: Any, nodes: Mapping[int, Node], folder: Path, inputs: Sequence[Input], say: Callable[[str], None]
) -> None:
    """Try the folder from every node, and the inputs on every node that is not this machine.

    `nodes` are keyed by a rank of each, whose bundle lends the room. Raises EnvironmentUnfit; leaves no file behind.
    """
    began = time.monotonic()
    names = {rank: str(rank) for rank in nodes}
    try:
        ours = leave(folder, "driver")
        left = _ask(bundles, {rank: (leave, folder, names[rank]) for rank in nodes}, ANSWER_S, nodes)
        here = f"this machine ({socket.gethostname()})"
        refuse_unwritable(
            folder, [(here, ours), *((f"node {nodes[rank].place}", answer) for rank, answer in left.items())]
        )
        marks = {"driver": ours["text"]} | {names[rank]: answer["text"] for rank, answer in left.items()}
        sent = time.time()
        seen = _ask(bundles, dict.fromkeys(nodes, (look, folder, marks)), ANSWER_S, nodes)
        received = time.time()
        places = {"driver": here} | {names[r]: f"node {nodes[r].place}" for r in nodes}
        refuse_unseen(folder, places, {"driver": look(folder, marks)} | {names[r]: seen[r] for r in nodes})
    finally:
        for path in folder.glob(f"{MARK}*"):
            path.unlink(missing_ok=True)
    for rank, answer in seen.items():
        if off := skew(sent, answer["time"], received):
            say(f"the clock of node {nodes[rank].place} is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}")
    elsewhere = {rank: node for rank, node in nodes.items() if not node.here}
    answers = _ask(bundles, dict.fromkeys(elsewhere, (hashes, inputs)), HASH_S, nodes)
    for rank, found in answers.items():
        refuse_other_files(elsewhere[rank].place, inputs, found)
    say(
        f"{len(nodes)} node{'s share' if len(nodes) > 1 else ' shares'} the run folder and read the same "
        f"{', '.join(dict.fromkeys(item.what for item in inputs))} ({time.monotonic() - began:.1f} s)"
    )


def _ask(
    bundles: Any, calls: Mapping[int, tuple[Any, ...]], limit_s: float, nodes: Mapping[int, Node]
) -> dict[int, Any]:
    """Run a function of this module at each rank's place at once; the answers by rank."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    asked = {}
    for rank, (function, *arguments) in calls.items():
        strategy = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
        asked[rank] = (
            ray.remote(num_cpus=1, max_retries=0)(function).options(scheduling_strategy=strategy).remote(*arguments)
        )
    answers, end = {}, time.monotonic() + limit_s
    for rank, reference in asked.items():
        try:
            answers[rank] = ray.get(reference, timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise EnvironmentUnfit(f"node {nodes[rank].place} gave no answer within {limit_s:.0f} s") from None
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())
            raise EnvironmentUnfit(f"node {nodes[rank].place} could not look at its files: {reason}") from None
    return answers


def refuse_unwritable(folder: Path, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse the first place that could not write."""
    for place, answer in answers:
        if fault := answer.get("fault"):
            raise EnvironmentUnfit(
                f"{place}: the run folder {folder} is not shared: {fault}",
                hint="begin the run in a folder that every node can write to: --run-dir on shared storage",
            )


def refuse_unseen(folder: Path, places: Mapping[str, str], seen: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse when a place does not read what another wrote."""
    for name, answer in seen.items():
        if answer["missing"]:
            others = ", ".join(places[other] for other in answer["missing"])
            raise EnvironmentUnfit(
                f"{places[name]} does not see what {others} wrote to {folder} within {SEEN_S:.0f} s: it is not the "
                "same folder everywhere",
                hint="begin the run in a folder that all nodes share: --run-dir on shared storage",
            )


def refuse_other_files(place: str, inputs: Sequence[Input], found: Sequence[str]) -> None:
    """Refuse a node that reads anything else than the driver."""
    for item, value in zip(inputs, found, strict=True):
        if value != item.hash:
            raise EnvironmentUnfit(
                f"node {place} reads another {item.what} at {item.path}: {value} there, {item.hash} here",
                hint="put the same files at the same path on every node, or on storage that they share",
            )


def skew(sent: float, told: float, received: float) -> float:
    """How far a clock is ahead, in seconds, as far as that is certain; 0 within SKEW_S."""
    if told < sent - SKEW_S:
        return told - sent
    return told - received if told > received + SKEW_S else 0.0
