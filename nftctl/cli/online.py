"""`nftctl validate --online`: what a profile needs around it, asked now: reward services, a Ray cluster, GPUs.

Looks and starts nothing: services are asked who they are, a Ray cluster what it runs and has free, GPUs are counted
where the driver lists them. Says how each was judged. The web library is imported only when there is a service to ask.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nftctl.engine.cluster import Cluster, look_at, refuse_full_disk, refuse_unfit
from nftctl.errors import EnvironmentUnfit, Finding, RewardFailed
from nftctl.profile.load import Resolved
from nftctl.profile.preflight import place
from nftctl.profile.rules.rule import Problem
from nftctl.profile.schema import Grid, Profile, Provider, Reward

RULES = {
    "reward-unreachable": "Every reward service answers.",
    "reward-revision-differs": "Every reward service declares the pinned revision.",
    "ray-unreachable": "The Ray cluster that the profile names answers.",
    "ray-unfit": "The cluster runs this Ray and Python and has room for every rank; a private Ray has disk space.",
    "gpus-too-few": "There is a GPU for every rank.",
}
"""Code -> reason of each rule that needs more than the profile and the files it names."""
ENVIRONMENT = frozenset({"ray-unreachable", "ray-unfit", "gpus-too-few"})
"""Codes of what `launch` ends with exit code 8 for."""

Found = TypeVar("Found")

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
        rows = [(f"{entry['section']} {entry['name']}", entry["how"]) for entry in self.rewards]
        return [*rows, ("ray", self.ray["how"]), ("gpus", self.gpus["how"])]


def look_around(resolved: Resolved, env: Mapping[str, str]) -> tuple[Answers, list[Finding]]:
    """Ask everything once. The findings have their places in the profile, sorted by line."""
    profile, answers = resolved.profile, Answers()
    _ask_services(profile, env, answers)
    cluster = _try_ray(profile.grid, profile.ranks, env, answers)
    _count_gpus(profile.grid, profile.ranks, env, cluster, answers)
    return answers, place(resolved, ((code, "error", problem) for code, problem in answers.problems))


# -- reward services ------------------------------------------------------------------------------------------------


def _ask_services(profile: Profile, env: Mapping[str, str], answers: Answers) -> None:
    """All services at once, so that the slowest one decides how long this takes; those of evaluations too."""
    judges = profile.eval.providers if profile.eval.prompt_file else []
    wanted = [
        (section, f"{section}.providers.{index}", provider)
        for section, providers in (("reward", profile.reward.providers), ("eval", judges))
        for index, provider in enumerate(providers)
    ]
    http = [provider for _, _, provider in wanted if provider.kind == "http"]
    served = iter(asyncio.run(_all(http, profile.reward, env)) if http else ())
    for section, key, provider in wanted:
        if provider.kind == "http":
            entry = _judge(provider, next(served), key, answers)
        else:
            entry = _judge_packaged(provider, key, answers)
        answers.rewards.append({"name": provider.name, "section": section, "kind": provider.kind, **entry})


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


def _try_ray(grid: Grid, ranks: int, env: Mapping[str, str], answers: Answers) -> Cluster | None:
    """Ask the cluster, if the profile names one, as a launch would; join nothing."""
    if grid.address == "local":
        answers.ray = {"address": "local", "reachable": None, "how": "not asked: the run starts a private one"}
        _or_problem("ray-unfit", lambda: refuse_full_disk(env), answers)
        return None
    found = _or_problem("ray-unreachable", lambda: look_at(grid, env), answers)
    if found is None:
        answers.ray = {"address": grid.address, "reachable": False, "how": "not reachable"}
        return None
    answers.ray = {"address": found.address, "reachable": True, "how": found.describe()}
    _or_problem("ray-unfit", lambda: refuse_unfit(found, grid, ranks), answers)
    return found


def _or_problem(code: str, look: Callable[[], Found], answers: Answers) -> Found | None:
    """What `look` found; where a launch would be refused, a problem of `grid.address` instead."""
    try:
        return look()
    except EnvironmentUnfit as unfit:
        answers.problems.append((code, Problem("grid.address", unfit.message, unfit.hint)))
        return None


# -- GPUs -----------------------------------------------------------------------------------------------------------


def _count_gpus(grid: Grid, ranks: int, env: Mapping[str, str], cluster: Cluster | None, answers: Answers) -> None:
    wanted = {"device": grid.device, "needed": ranks}
    if grid.device == "cpu":
        answers.gpus = wanted | {"visible": None, "how": "not needed: grid.device is cpu"}
        return
    if grid.address != "local":  # too few of them make the cluster unfit
        how = f"{cluster.gpus} on the nodes of the cluster" if cluster else "not counted: they are the cluster's"
        answers.gpus = wanted | {"visible": cluster.gpus if cluster else None, "how": how}
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
