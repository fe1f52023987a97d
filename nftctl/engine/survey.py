"""What a running Ray cluster says of itself, as one JSON object on stdout: a program of its own, run by cluster.py.

A process that can be ended is the only limit that holds: inside the driver, Ray's own client waits 40 s for an address
without Ray, ends the process when it misses a token, and remembers the authentication mode it saw first. Joins nothing
and reads one table each of nodes, jobs and actors. Refuses nothing; what it could not do is `error` in the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 5.0
"""Longest wait for one table."""
SHOWN = ("CPU", "GPU")
RESERVED = "_group_"
"""In the name of a resource that a placement group holds: CPU_group_<its id>."""
JOB_DIGITS = 8
"""So many digits at the end of a placement group's id are the id of the job that made it."""


def survey(address: str) -> dict[str, Any]:
    """Versions, nodes with what is free on them, and who holds the rest."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client: Any = GcsClient(address=address)
    metadata = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=TIMEOUT_S))
    usage = client.get_all_resource_usage(timeout=TIMEOUT_S).resource_usage_data.batch
    free = {row.node_id: dict(row.resources_available) for row in usage}
    total = {row.node_id: dict(row.resources_total) for row in usage}
    here = raylets_here()
    nodes = [
        {
            "id": node.node_id.hex(),
            "host": node.node_manager_hostname or node.node_manager_address,
            "ip": node.node_manager_address,
            "here": node.node_id.hex() in here,
            "python": here.get(node.node_id.hex(), ""),
            "total": _plain(node.resources_total),
            "free": _plain(free.get(node.node_id, {})),
        }
        for node in client.get_all_node_info(timeout=TIMEOUT_S).values()
        if node.state == 0
    ]
    actors = asyncio.run(_actors(client))
    jobs = client.get_all_job_info(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=TIMEOUT_S
    )
    programs = {job_id.hex(): job.entrypoint for job_id, job in jobs.items()}
    return {
        "ray": metadata["ray_version"],
        "python": metadata["python_version"],
        "nodes": nodes,
        "holders": [*_actor_holders(actors, programs), *_group_holders(total, programs)],
    }


async def _actors(client: Any) -> list[Any]:
    found = await client.async_get_all_actor_info(actor_state_name="ALIVE", timeout=TIMEOUT_S)
    return list(found.values())


def _plain(resources: Any) -> dict[str, float]:
    return {name: float(resources.get(name, 0.0)) for name in SHOWN}


def _actor_holders(actors: list[Any], programs: dict[str, str]) -> list[dict[str, Any]]:
    """Actors outside of placement groups; those inside take nothing from what is free."""
    return [
        {
            "what": f"actor {actor.name or actor.class_name} (pid {actor.pid})",
            "program": programs.get(actor.job_id.hex(), ""),
            "held": _plain(dict(actor.required_resources)),
        }
        for actor in actors
        if any(actor.required_resources.get(name) for name in SHOWN)
        and not any(RESERVED in part.name for part in actor.resource_mapping)
    ]


def _group_holders(total: dict[bytes, dict[str, float]], programs: dict[str, str]) -> list[dict[str, Any]]:
    """Placement groups, as a run of nftctl is one, with the program of the job that made each."""
    held: dict[str, dict[str, float]] = {}
    for resources in total.values():
        for name, amount in resources.items():
            kind, _, group = name.partition(RESERVED)
            # CPU_group_<id> is the sum of CPU_group_<bundle>_<id>.
            if kind in SHOWN and group and "_" not in group:
                row = held.setdefault(group, dict.fromkeys(SHOWN, 0.0))
                row[kind] += amount
    return [
        {"what": f"placement group {group[:12]}", "program": programs.get(group[-JOB_DIGITS:], ""), "held": row}
        for group, row in held.items()
    ]


def raylets_here() -> dict[str, str]:
    """Node id -> interpreter of its workers, for every node of any cluster that runs on this machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if not words[0].endswith("/raylet"):
                continue
            options = dict(
                word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word
            )
            found[options.get("node_id", "")] = options.get("python_worker_command", "").split(" ")[0]
    return found


def main() -> None:
    """Survey the address in argv and print the answer."""
    try:
        answer = survey(sys.argv[1])
    except Exception as error:
        answer = {"error": type(error).__name__, "reason": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
