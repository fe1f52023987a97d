"""Scoring: images leave as soon as they are decoded, scores come back by id, and a failure is never a number.

One event loop in a thread of its own per rank, one client per provider. The reward of a sample is the sum over
providers of weight x clip(scale x score). Refuses what the client refuses, plus a sample whose score has not arrived.
The failure policy holds for every provider alike: a score that is only logged is still a score that was asked for.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from nftctl.errors import RewardFailed
from nftctl.profile.schema import Provider, Reward
from nftctl.reward.connect import connect
from nftctl.reward.exchange import ServiceClient, deadline_in
from nftctl.reward.protocol import Item, RevisionDiffers, Score
from nftctl.roles.trajectory import Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a provider is reached in this run, and the revision every reply must carry."""

    provider: Provider
    url: str
    revision: str

    def client(self, reward: Reward) -> ServiceClient:
        """A client for this endpoint; the token comes from the environment of this process."""
        token = os.environ.get(self.provider.token_env, "")
        return connect(self.provider, reward, url=self.url, revision=self.revision, token=token)


def weigh(provider: Provider, score: float) -> float:
    """weight x clip(scale x score): this provider's part of the reward."""
    value = provider.scale * score
    if provider.clip is not None:
        value = min(max(value, provider.clip[0]), provider.clip[1])
    return provider.weight * value


async def _timed(scores: Coroutine[Any, Any, list[Score]]) -> tuple[list[Score], float]:
    before = time.monotonic()
    return await scores, time.monotonic() - before


def _parts(provider: Provider, score: Score) -> dict[str, float]:
    """A raw score and its components, under the names of the reward table."""
    return {provider.name: score.score} | {f"{provider.name}/{k}": v for k, v in score.components.items()}


@dataclass(slots=True)
class _Pending:
    """Scores that are on their way, and how many seconds they took."""

    trajectories: list[Trajectory]
    provider: Provider
    answer: Future[tuple[list[Score], float]]


class RewardRole:
    """This rank's link to every provider."""

    def __init__(self, reward: Reward, endpoints: Sequence[Endpoint], *, key: str, rank: int) -> None:
        """`key` is the run id and attempt that every idempotency key starts with."""
        self._reward = reward
        self._endpoints = list(endpoints)
        self._key = key
        self._rank = rank
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward", daemon=True)
        self._thread.start()
        self._clients = [endpoint.client(reward) for endpoint in self._endpoints]
        for client in self._clients:
            # Entered on the loop that will use it: connections then live as long as the role.
            asyncio.run_coroutine_threadsafe(client.__aenter__(), self._loop).result(timeout=10)
        self._pending: list[_Pending] = []
        self._sent = 0
        self._deadline = 0.0

    def begin(self) -> None:
        """Forget what an earlier step left; the deadline starts with the first request."""
        self._pending = []

    def submit(self, step: int, trajectories: Sequence[Trajectory], *, keep: bool = False) -> None:
        """Send decoded samples to every provider; returns at once. They are let go of, unless `keep`.

        With `drop-group` each sample travels alone, so that one bad reply costs one group and not the micro-batch.
        """
        if not self._pending:
            self._deadline = deadline_in(self._reward.deadline_s)
        size = 1 if self._reward.on_failure == "drop-group" else len(trajectories)
        for start in range(0, len(trajectories), size):
            part = list(trajectories[start : start + size])
            items = [self._item(t) for t in part]
            if not keep:
                for t in part:
                    t.image = None
            for endpoint, client in zip(self._endpoints, self._clients, strict=True):
                scores = client.score(items, key=self._next_key(step), deadline=self._deadline)
                self._pending.append(_Pending(part, endpoint.provider, self._run(_timed(scores))))

    def _item(self, trajectory: Trajectory) -> Item:
        row = trajectory.row
        image = trajectory.image
        if image is None:
            raise RewardFailed(f"row {row.number}: no image to score")
        return Item(
            id=f"{row.number}/{self._rank}",
            prompt=row.prompt.reward_text,
            metadata=row.prompt.metadata,
            image=np.ascontiguousarray(image[0].numpy()),
        )

    def _next_key(self, step: int) -> str:
        self._sent += 1
        return f"{self._key}/{step}/{self._rank}/{self._sent}"

    def collect(self) -> None:
        """Wait for every score of the step and write rewards into the trajectories.

        `fail` raises the first RewardFailed; `drop-group` records it in `Trajectory.failures` for the group's decision.
        """
        totals: dict[int, float] = {}
        for pending in self._pending:
            try:
                scores, seconds = pending.answer.result(timeout=max(0.0, self._deadline - time.monotonic()) + 5.0)
            except (RewardFailed, TimeoutError) as error:
                self._fail(pending, error)
                continue
            for trajectory, score in zip(pending.trajectories, scores, strict=True):
                totals[id(trajectory)] = totals.get(id(trajectory), 0.0) + weigh(pending.provider, score.score)
                trajectory.components |= _parts(pending.provider, score)
                trajectory.latency_s[pending.provider.name] = seconds
        for pending in self._pending:
            for t in pending.trajectories:
                t.reward = None if t.failures else totals[id(t)]
        self._pending = []

    def _fail(self, pending: _Pending, error: Exception) -> None:
        failure = (
            error if isinstance(error, RewardFailed) else RewardFailed(f"{pending.provider.name}: no reply in time")
        )
        # Another revision is another reward: that is never a lost group.
        if self._reward.on_failure == "fail" or isinstance(failure, RevisionDiffers):
            for other in self._pending:
                other.answer.cancel()
            raise failure
        for t in pending.trajectories:
            t.failures[pending.provider.name] = str(failure)

    def score_images(self, items: Sequence[Item], label: str) -> list[tuple[float, dict[str, float]]]:
        """Reward and components of loose images (evaluation). A failure here always raises."""
        deadline = deadline_in(self._reward.deadline_s)
        futures = [
            self._run(client.score(list(items), key=self._next_label(label), deadline=deadline))
            for client in self._clients
        ]
        totals = [0.0] * len(items)
        components: list[dict[str, float]] = [{} for _ in items]
        for endpoint, future in zip(self._endpoints, futures, strict=True):
            for i, score in enumerate(future.result()):
                totals[i] += weigh(endpoint.provider, score.score)
                components[i] |= _parts(endpoint.provider, score)
        return list(zip(totals, components, strict=True))

    def _next_label(self, label: str) -> str:
        self._sent += 1
        return f"{self._key}/{label}/{self._rank}/{self._sent}"

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def counters(self) -> dict[str, int]:
        """Requests, retries and images sent since the role was built, over all providers."""
        counts = [client.counts for client in self._clients]
        return {
            "requests": sum(c.requests for c in counts),
            "retries": sum(c.retries for c in counts),
            "images": sum(c.images for c in counts),
        }

    def close(self) -> None:
        """Close every connection and end the loop."""

        async def shut() -> None:
            for client in self._clients:
                await client.__aexit__(None, None, None)

        asyncio.run_coroutine_threadsafe(shut(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
