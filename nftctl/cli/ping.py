"""`nftctl reward-ping`: who each reward service is, how fast it answers, and whether it can score one image.

Speaks the protocol exactly as a run does, but without retries, so that a fault shows as it is. An embedded scorer is
started here on a free port, as a run would start it. The web library is imported after the profile was accepted.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nftctl.cli.console import Console, table
from nftctl.errors import ProfileRefused, RewardFailed, UsageRefused

if TYPE_CHECKING:
    from nftctl.profile.load import Resolved
    from nftctl.reward.client import RewardClient
    from nftctl.reward.protocol import Item, Score, ServiceInfo

TOKEN_VARIABLE = "NFTCTL_REWARD_TOKEN"
TOY_PROMPT = "a red seven"
TOY_SIDE = 8


@dataclass(frozen=True, slots=True)
class Target:
    """One service to ask. `scorer` is set for an embedded one, which has no URL before it is started."""

    name: str
    url: str
    revision: str
    scorer: str = ""
    token_env: str = TOKEN_VARIABLE


@dataclass(frozen=True, slots=True)
class Toy:
    """The image that is scored: its prompt and its size in pixels."""

    prompt: str = TOY_PROMPT
    metadata: Mapping[str, Any] = field(default_factory=dict)
    height: int = TOY_SIDE
    width: int = TOY_SIDE


def ping(
    argument: str | None, *, url: str | None, revision: str | None, timeout: float, count: int, json: bool
) -> None:
    """Ask every service of a profile, or the one at `url`. Raises RewardFailed at the first that fails."""
    console = Console(json=json)
    if url is None and revision is not None:
        raise UsageRefused("--revision belongs to --url", hint="a profile pins the revisions of its providers itself")
    if url is not None and argument is not None:
        raise UsageRefused("give a profile or --url, not both")
    if url is None:
        targets, toy = _from_profile(console, argument)
    else:
        targets, toy = [Target("service", url, revision or "")], Toy()
    answers = []
    for target in targets:
        if target.scorer:
            console.say(f"{target.name}: embedded, a run starts {target.scorer} itself; starting one to ask it")
        answers.append(asyncio.run(_ask(target, toy, timeout, count)))
        for line in _lines(answers[-1]):
            console.data(line)
    console.result("reward-ping", services=answers)


def _from_profile(console: Console, argument: str | None) -> tuple[list[Target], Toy]:
    """The providers of a profile; only what concerns them has to be right in it."""
    from nftctl.profile.load import find_profile, load_profile
    from nftctl.profile.preflight import check

    path, which = find_profile(argument, os.environ, Path.cwd())
    console.say(which)
    resolved = load_profile(path)
    findings = [f for f in check(resolved) if f.severity == "error" and f.key.split(".")[0] == "reward"]
    if findings:
        raise ProfileRefused(findings)
    providers = resolved.profile.reward.providers
    if not providers:
        raise UsageRefused(f"{resolved.name} has no reward provider", hint="ask a service with --url")
    return [Target(p.name, p.url, p.revision, p.scorer, p.token_env) for p in providers], _toy(resolved)


def _toy(resolved: Resolved) -> Toy:
    """An image of the profile's size for the profile's first prompt, where there is one."""
    from nftctl.profile.prompts import read_prompts, resolve_prompt_file

    profile = resolved.profile
    try:
        first = read_prompts(resolve_prompt_file(profile.data.prompt_file, "train"))[0]
    except ProfileRefused:
        return Toy(height=profile.model.height, width=profile.model.width)
    return Toy(first.reward_text, first.metadata, profile.model.height, profile.model.width)


async def _ask(target: Target, toy: Toy, timeout: float, count: int) -> dict[str, Any]:
    token = os.environ.get(target.token_env, "")
    if not target.scorer:
        return await _ask_at(target, target.url, target.revision, token, toy, timeout, count)
    from nftctl.reward.scorers import scorer_revision

    async with _embedded(target.scorer, token) as url:
        revision = target.revision or scorer_revision(target.scorer)
        return await _ask_at(target, url, revision, token, toy, timeout, count)


@asynccontextmanager
async def _embedded(scorer: str, token: str) -> AsyncIterator[str]:
    """Serve a packaged scorer from this process for as long as the block lasts; yields its URL."""
    from aiohttp import web

    from nftctl.reward.scorers import load_scorer, scorer_revision
    from nftctl.reward.server import make_app

    runner = web.AppRunner(make_app(load_scorer(scorer), scorer_revision(scorer), token), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _ask_at(
    target: Target, url: str, revision: str, token: str, toy: Toy, timeout: float, count: int
) -> dict[str, Any]:
    from nftctl.reward.client import RewardClient

    def client_for(revision: str) -> RewardClient:
        return RewardClient(url, revision, token, connect_timeout=timeout, read_timeout=timeout, retries=0)

    async with client_for(revision) as client:
        info, seconds = await _timed_info(client, count)
    if revision and info.revision != revision:
        raise RewardFailed(
            f"reward provider {target.name} at {url}: revision {revision!r} is pinned, {info.revision!r} is served",
            hint="start the pinned service, or pin the served revision",
        )
    async with client_for(info.revision) as client:
        score = await _score_toy(client, toy, timeout)
    return {
        "name": target.name,
        "url": url,
        "embedded": bool(target.scorer),
        "service": info.name,
        "revision": {"pinned": revision or None, "served": info.revision},
        "components": list(info.components),
        "max_items": info.max_items,
        "latency_ms": {
            "count": count,
            "p50": round(statistics.median(seconds) * 1e3, 2),
            "max": round(max(seconds) * 1e3, 2),
        },
        "toy": {"prompt": toy.prompt, "score": score.score, "components": dict(score.components)},
    }


async def _timed_info(client: RewardClient, count: int) -> tuple[ServiceInfo, list[float]]:
    seconds = []
    for _ in range(count):
        before = time.monotonic()
        info = await client.info(compare=False)
        seconds.append(time.monotonic() - before)
    return info, seconds


async def _score_toy(client: RewardClient, toy: Toy, timeout: float) -> Score:
    # Room for a connection and an answer, so that each limit can be blamed by its own name.
    by = time.monotonic() + 2 * timeout
    key = f"ping/{time.time_ns()}/0/0/0"
    (score,) = await client.score([_toy_item(toy)], key=key, deadline=by)
    return score


def _toy_item(toy: Toy) -> Item:
    """A grey ramp: no picture of anything, so its score says only that the service scores."""
    import numpy as np

    from nftctl.reward.protocol import Item

    ramp = np.linspace(0, 255, toy.height * toy.width * 3).astype(np.uint8)
    return Item("ping/0", toy.prompt, toy.metadata, ramp.reshape(toy.height, toy.width, 3))


def _lines(answer: dict[str, Any]) -> Sequence[str]:
    latency, revision, toy = answer["latency_ms"], answer["revision"], answer["toy"]
    match = "as pinned" if revision["pinned"] else "not pinned"
    return table([
        (answer["name"], f"{answer['url']} ({answer['service']})"),
        ("  revision", f"{revision['served']} ({match})"),
        ("  latency", f"p50 {latency['p50']} ms, max {latency['max']} ms over {latency['count']}"),
        ("  toy image", f"score {toy['score']:.4g} for {toy['prompt']!r}"),
    ])  # fmt: skip
