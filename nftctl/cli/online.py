"""`nftctl validate --online`: what a profile needs around it, asked now: reward services, a Ray cluster, GPUs.

Looks and starts nothing: services are asked who they are, a Ray address is connected to, GPUs are counted where the
driver lists them. Says how each was judged. The web library is imported only when there is a service to ask.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nftctl.errors import Finding, RewardFailed
from nftctl.profile.load import Resolved
from nftctl.profile.preflight import place
from nftctl.profile.rules.rule import Problem
from nftctl.profile.schema import Grid, Provider, Reward

RULES = {
    "reward-unreachable": "Every reward service answers.",
    "reward-revision-differs": "Every reward service declares the pinned revision.",
    "ray-unreachable": "The Ray cluster that the profile names accepts connections.",
    "gpus-too-few": "There is a GPU for every rank.",
}
"""Code -> reason of each rule that needs more than the profile and the files it names."""

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a Ray address."""
CLIENT_PORT = 10001
"""Port of `ray://HOST` where none is given."""
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where Ray notes the address of the cluster on this machine."""

DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(slots=True)
class Answers:
    """What was found: facts for people and JSON, and problems by code."""

    rewards: list[dict[str, Any]] = field(default_factory=list)
    ray: dict[str, Any] = field(default_factory=dict)
    gpus: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, Problem]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """As the JSON object has it."""
        return {"rewards": self.rewards, "ray": self.ray, "gpus": self.gpus}

    def rows(self) -> list[tuple[str, str]]:
        """As people read it, one line per question."""
        rows = [(f"reward {entry['name']}", entry["how"]) for entry in self.rewards]
        return [*rows, ("ray", self.ray["how"]), ("gpus", self.gpus["how"])]


def look_around(resolved: Resolved, env: Mapping[str, str]) -> tuple[Answers, list[Finding]]:
    """Ask everything once. The findings have their places in the profile, sorted by line."""
    profile, answers = resolved.profile, Answers()
    _ask_services(profile.reward, env, answers)
    _try_ray(profile.grid, env, answers)
    _count_gpus(profile.grid, profile.ranks, env, answers)
    return answers, place(resolved, ((code, "error", problem) for code, problem in answers.problems))


# -- reward services ------------------------------------------------------------------------------------------------


def _ask_services(reward: Reward, env: Mapping[str, str], answers: Answers) -> None:
    """All services at once, so that the slowest one decides how long this takes."""
    http = [provider for provider in reward.providers if provider.kind == "http"]
    served = iter(asyncio.run(_all(http, reward, env)) if http else ())
    for index, provider in enumerate(reward.providers):
        key = f"reward.providers.{index}"
        if provider.kind == "http":
            entry = _judge(provider, next(served), key, answers)
        else:
            entry = _judge_packaged(provider, key, answers)
        answers.rewards.append({"name": provider.name, "kind": provider.kind, **entry})


async def _all(providers: list[Provider], reward: Reward, env: Mapping[str, str]) -> list[str | RewardFailed]:
    return await asyncio.gather(*(_revision(p, reward, env.get(p.token_env, "")) for p in providers))


async def _revision(provider: Provider, reward: Reward, token: str) -> str | RewardFailed:
    """The revision that a service declares, or why there is none. No retries: the question is if it is up now."""
    from nftctl.reward.connect import connect

    once = reward.model_copy(update={"retries": 0})
    try:
        async with connect(provider, once, url=provider.url, revision=provider.revision, token=token) as client:
            return (await client.info(compare=False)).revision
    except RewardFailed as failure:
        return failure


def _judge(provider: Provider, answer: str | RewardFailed, key: str, answers: Answers) -> dict[str, Any]:
    revision = {"pinned": provider.revision, "served": None}
    if isinstance(answer, RewardFailed):
        answers.problems.append(("reward-unreachable", Problem(f"{key}.url", answer.message, answer.hint)))
        return {"url": provider.url, "up": False, "revision": revision, "how": f"no answer from {provider.url}"}
    if provider.protocol == "cosmos-rl":  # the protocol has no place for a revision
        how = f"up at {provider.url}; it declares no revision, {provider.revision} is the profile's word"
        return {"url": provider.url, "up": True, "revision": revision, "how": how}
    entry: dict[str, Any] = {"url": provider.url, "up": True, "revision": revision | {"served": answer}}
    if answer != provider.revision:
        message = f"{provider.url} serves revision {answer!r}, and {provider.revision!r} is pinned"
        help = "start the pinned service, or pin the served revision"
        answers.problems.append(("reward-revision-differs", Problem(f"{key}.revision", message, help)))
        return entry | {"how": f"up at {provider.url}, with another revision: {answer}"}
    return entry | {"how": f"up at {provider.url}, revision {answer} as pinned"}


def _judge_packaged(provider: Provider, key: str, answers: Answers) -> dict[str, Any]:
    how = "not asked: a run starts the packaged scorer itself"
    if not provider.revision:
        return {"up": None, "revision": {"pinned": None, "served": None}, "how": how}
    from nftctl.reward.scorers import scorer_revision

    packaged = scorer_revision(provider.scorer)
    if packaged != provider.revision:
        message = f"the packaged scorer {provider.scorer} is revision {packaged}, and another is pinned"
        help = "remove the pin, or install the nftctl release that ships that scorer"
        answers.problems.append(("reward-revision-differs", Problem(f"{key}.revision", message, help)))
    return {"up": None, "revision": {"pinned": provider.revision, "served": packaged}, "how": how}


# -- Ray ------------------------------------------------------------------------------------------------------------


def _try_ray(grid: Grid, env: Mapping[str, str], answers: Answers) -> None:
    if grid.address == "local":
        answers.ray = {"address": "local", "reachable": None, "how": "not asked: the run starts a private one"}
        return
    fault = ""
    try:
        host, port = ray_endpoint(grid.address, env)
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
            how = f"{host}:{port} accepts connections"
    except ValueError as error:
        fault = f'grid.address = "{grid.address}" {error}'
    except OSError as error:
        fault = f"no Ray at {host}:{port} (grid.address): {error.strerror or error}"
    if fault:
        how = "not reachable"
        help = "start the cluster, or leave grid.address out: the run then starts a private Ray"
        answers.problems.append(("ray-unreachable", Problem("grid.address", fault, help)))
    answers.ray = {"address": grid.address, "reachable": not fault, "how": how}


def ray_endpoint(address: str, env: Mapping[str, str], current: Path = CURRENT_CLUSTER) -> tuple[str, int]:
    """Host and port behind `HOST:PORT`, `ray://HOST[:PORT]` or `auto`. ValueError says what the address is not."""
    if address == "auto":
        try:
            address = env.get("RAY_ADDRESS") or current.read_text().strip()
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"finds no cluster: RAY_ADDRESS is not set, and there is no {current}") from None
    client = address.startswith("ray://")
    try:
        parts = urlsplit(address if client else f"//{address}")
        host, port = parts.hostname, parts.port or (CLIENT_PORT if client else None)
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path:
        raise ValueError("is not HOST:PORT, ray://HOST:PORT, auto or local")
    return host, port


# -- GPUs -----------------------------------------------------------------------------------------------------------


def _count_gpus(grid: Grid, ranks: int, env: Mapping[str, str], answers: Answers) -> None:
    wanted = {"device": grid.device, "needed": ranks}
    if grid.device == "cpu" or grid.address != "local":
        how = "not needed: grid.device is cpu" if grid.device == "cpu" else "not counted: they are the cluster's"
        answers.gpus = wanted | {"visible": None, "how": how}
        return
    count, how = visible_gpus(env)
    if grid.device == "auto" and count == 0:
        answers.gpus = wanted | {"visible": 0, "how": f"{how}; grid.device is auto, so ranks compute on the CPU"}
        return
    if count < ranks:
        message = f"{ranks} GPUs are needed, one per rank (rl.group_size = {ranks}); {how}"
        help = 'lower rl.group_size, or set grid.device = "cpu"'
        answers.problems.append(("gpus-too-few", Problem("grid.device", message, help)))
    answers.gpus = wanted | {"visible": count, "how": f"{how}; {ranks} are needed"}


def visible_gpus(env: Mapping[str, str], driver: Path = DRIVER, devices: Path = DEVICES) -> tuple[int, str]:
    """How many NVIDIA GPUs a process started here would see, and how that was found out, without loading CUDA."""
    try:
        present, source = len(list(driver.iterdir())), str(driver)
    except OSError:
        # A container may see the devices and not the driver's own listing.
        present, source = len(_device_files(devices)), f"{devices}/nvidia*"
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present, f"{present} by {source}"
    count = _chosen(chosen, present)
    return count, f"{count} by CUDA_VISIBLE_DEVICES of {present} by {source}"


def _device_files(devices: Path) -> list[Path]:
    try:
        return [path for path in devices.iterdir() if _DEVICE.fullmatch(path.name)]
    except OSError:
        return []


def _chosen(text: str, present: int) -> int:
    """CUDA reads the list up to the first entry that names no GPU; a name that is no index is taken as one GPU."""
    count = 0
    for entry in (item.strip() for item in text.split(",")):
        index = int(entry) if re.fullmatch(r"-?\d+", entry) else None
        if not entry or (index is not None and not 0 <= index < present):
            break
        count += 1
    return min(count, present)
