"""What `reward-ping` asks of one service: who it is, how fast it says so, one image, and a whole step's worth of them.

Speaks the protocol exactly as a run does, but without retries, so that a fault shows as it is. The web library is
imported in here, after the profile was accepted.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nftctl.errors import RewardFailed

if TYPE_CHECKING:
    from nftctl.profile.schema import Provider, Reward
    from nftctl.reward.exchange import ServiceClient
    from nftctl.reward.protocol import Item, Score, ServiceInfo

UNDECLARED = "undeclared"
"""Stands for the revision of a service that has none to declare, when none is pinned either."""
SHAPES, LETTERS = "a red circle", 'a sign that says "seven"'
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Step:
    """The images of one step: prompt, size in pixels, and how many each rank sends."""

    prompt: str = "a red seven"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    height: int = 8
    width: int = 8
    rows: int = 4
    ranks: int = 4


def suited(service: str) -> Step:
    """Images that a service of this name scores: some of the packaged scorers know one size and one kind of prompt.

    `service` is what `GET /v1/info` has for a name, as "scenes" or "0.5 colour_shape + brightness".
    """
    names = {part.split()[-1] for part in service.split(" + ") if part.strip()}
    if "scenes" in names:
        return Step(SHAPES, height=32, width=32)
    if "colour_shape" in names:
        return Step(SHAPES, height=64, width=64)
    return Step(LETTERS, height=64, width=64) if "ocr" in names else Step()


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to ask: longest wait for one answer, answers to time, whether to send a step, seconds to wait for a start."""

    timeout: float
    count: int
    load: bool = False
    wait: float = 0.0


async def probe(
    provider: Provider, reward: Reward, url: str, revision: str, token: str, step: Step | None, wishes: Wishes
) -> dict[str, Any]:
    """Everything that is to be known of the service at `url`, as one JSON object. Raises RewardFailed.

    Without a `step`, its images are those that suit the service.
    """
    from nftctl.reward.connect import connect

    limits = {"connect_timeout_s": wishes.timeout, "read_timeout_s": wishes.timeout, "retries": 0}
    once = reward.model_copy(update=limits)
    declares = provider.protocol != "cosmos-rl"
    async with connect(provider, once, url=url, revision=revision, token=token) as client:
        info, seconds = await _timed_info(client, wishes)
    step = step or suited(info.name)
    if declares and revision and info.revision != revision:
        raise RewardFailed(
            f"reward provider {provider.name} at {url}: revision {revision!r} is pinned, {info.revision!r} is served",
            hint="start the pinned service, or pin the served revision",
        )
    async with connect(provider, once, url=url, revision=info.revision or UNDECLARED, token=token) as client:
        score = await _score_toy(client, step, wishes.timeout)
        load = await _load(client, step, max(reward.deadline_s, 2 * wishes.timeout)) if wishes.load else None
    return {
        "name": provider.name,
        "url": url,
        "ok": True,
        "embedded": provider.kind == "embedded",
        "protocol": provider.protocol,
        "service": info.name,
        "revision": {"pinned": revision or None, "served": info.revision if declares else None},
        "components": list(info.components),
        "max_items": info.max_items,
        "latency_ms": _latency(seconds),
        "toy": {"prompt": step.prompt, "score": score.score, "components": dict(score.components)},
        "load": load,
    }


async def _timed_info(client: ServiceClient, wishes: Wishes) -> tuple[ServiceInfo, list[float]]:
    info = await _first_info(client, wishes.wait)
    seconds = []
    for _ in range(wishes.count):
        before = time.monotonic()
        info = await client.info(compare=False)
        seconds.append(time.monotonic() - before)
    return info, seconds


async def _first_info(client: ServiceClient, wait: float) -> ServiceInfo:
    """The first answer of a service that may only be starting; connects, so that the timed ones need not."""
    import stamina

    from nftctl.reward.exchange import ServiceAway

    end = time.monotonic() + wait
    async for attempt in stamina.retry_context(
        on=lambda error: isinstance(error, ServiceAway) and time.monotonic() < end,
        attempts=None,
        timeout=None,
        wait_initial=FIRST_PAUSE_S,
        wait_max=LONGEST_PAUSE_S,
        wait_jitter=FIRST_PAUSE_S,
    ):
        with attempt:
            return await client.info(compare=False)
    raise AssertionError("unreachable: stamina returns or raises")


async def _score_toy(client: ServiceClient, step: Step, timeout: float) -> Score:
    # Room for a connection and an answer, so that each limit can be blamed by its own name.
    by = time.monotonic() + 2 * timeout
    (score,) = await client.score([_item(step, 0, noise=0.0)], key=_key(0), deadline=by)
    return score


async def _load(client: ServiceClient, step: Step, seconds: float) -> dict[str, Any]:
    """Score as many images as a step has, all ranks at once, and say how long it took."""
    sets = [[_item(step, rank * step.rows + row, noise=8.0) for row in range(step.rows)] for rank in range(step.ranks)]
    before = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for rank, items in enumerate(sets):
                group.create_task(client.score(items, key=_key(1 + rank), deadline=before + seconds))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    took, images = time.monotonic() - before, step.rows * step.ranks
    return {
        "images": images,
        "ranks": step.ranks,
        "width": step.width,
        "height": step.height,
        "seconds": round(took, 3),
        "images_per_second": round(images / took, 1),
    }


def _key(number: int) -> str:
    return f"ping/{time.time_ns()}/0/{number}/0"


def _item(step: Step, number: int, *, noise: float) -> Item:
    """A grey ramp, with noise to make it about as hard to pack as a photograph: a picture of nothing at all."""
    import numpy as np

    from nftctl.reward.protocol import Item

    ramp = np.linspace(0, 255, step.height * step.width * 3)
    if noise:
        ramp = ramp + np.random.default_rng(number).normal(0.0, noise, ramp.shape)
    pixels = ramp.clip(0, 255).astype(np.uint8).reshape(step.height, step.width, 3)
    return Item(f"ping/{number}", step.prompt, step.metadata, pixels)


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds; the 95th percentile is the smallest time that 95 of 100 answers did not exceed."""
    ordered = sorted(seconds)
    late = ordered[math.ceil(0.95 * len(ordered)) - 1]
    times = {"p50": statistics.median(ordered), "p95": late, "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(value * 1e3, 2) for name, value in times.items()}}
