"""Client of a `cosmos-rl` reward service: puts images into its queue and asks for their scores until they are there.

The protocol has no revision: the pinned one is what the operator declares, and nothing on the wire can contradict it.
Refuses a result without the score keys that are asked for, and gives up at the deadline with the task's uuid, since
the service answers alike for a task that waits and for one that it has thrown away. Clips nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from nftctl.errors import RewardFailed
from nftctl.reward import cosmos_wire as wire
from nftctl.reward.exchange import ServiceClient
from nftctl.reward.protocol import Item, Score, ServiceInfo, load_object, refuse_error_field

WAITING = (
    f"the service still answers {wire.NOT_READY}, which it does for a task in its queue and for one that it dropped"
)
PER_IMAGE = {"gen_eval": {"geneval_tags": "tag", "geneval_includes": "include"}}
"""Fields that a reward function wants for each image, and the prompt's metadata that they are taken from."""


class CosmosClient(ServiceClient):
    """A service at `url` that runs `reward_fn` and answers it under `score_key`; `a+b` is the sum of two keys."""

    def __init__(
        self, url: str, revision: str, token: str = "", *, reward_fn: str, score_key: str = "", **limits: Any
    ) -> None:
        super().__init__(url, revision, token, **limits)
        self.reward_fn = reward_fn
        self.keys = score_keys(score_key or reward_fn)

    async def _ask_info(self, session: aiohttp.ClientSession, deadline: float, compare: bool) -> ServiceInfo:
        """Whether the service is there: it declares nothing, so what comes back is the profile's own word."""
        body = wire.encode_ping(self.reward_fn)
        call = self._call("POST", wire.PING_PATH, body, _headers(body, wire.FORM_TYPE), deadline)
        await self._request(session, call, _pinged)
        parts = tuple(self.keys) if len(self.keys) > 1 else ()
        return ServiceInfo(self.reward_fn, self.revision, ("image",), parts, self._max_items)

    async def _largest(self, session: aiohttp.ClientSession, deadline: float) -> int:
        return self._max_items

    async def _score_part(
        self, session: aiohttp.ClientSession, items: Sequence[Item], key: str, deadline: float
    ) -> list[Score]:
        body = await asyncio.to_thread(self._task, items)
        call = self._call("POST", wire.ENQUEUE_PATH, body, _headers(body, wire.ENQUEUE_TYPE), deadline)
        ticket = await self._request(session, call, wire.parse_ticket)
        found = await self._pull(session, ticket, len(items), deadline)
        return [self._score(item, {k: found[k][n] for k in self.keys}) for n, item in enumerate(items)]

    async def _pull(
        self, session: aiohttp.ClientSession, ticket: wire.Ticket, count: int, deadline: float
    ) -> dict[str, list[float]]:
        body = wire.encode_pull(ticket.uuid, self.reward_fn)
        headers = _headers(body, wire.FORM_TYPE)
        if ticket.replica_id:
            headers[wire.REPLICA_HEADER] = ticket.replica_id
        call = self._call("POST", wire.PULL_PATH, body, headers, deadline)
        call.subject, call.not_yet, call.waiting = f"task {ticket.uuid}", wire.NOT_READY, WAITING
        return await self._request(session, call, lambda reply: wire.parse_result(reply, self.keys, count))

    def _task(self, items: Sequence[Item]) -> bytes:
        images = wire.batch_of([item.image for item in items])
        extras = {
            name: [_metadata(item, source, name) for item in items]
            for name, source in PER_IMAGE.get(self.reward_fn, {}).items()
        }
        # Weight 1, whatever the profile's: the service leaves out what is not above 0, and weights nothing.
        return wire.encode_task(wire.Task([item.prompt for item in items], images, {self.reward_fn: 1.0}, extras))

    def _score(self, item: Item, values: Mapping[str, float]) -> Score:
        return Score(item.id, sum(values.values()), dict(values) if len(values) > 1 else {})


def score_keys(text: str) -> list[str]:
    """The keys of `a+b`; RewardFailed when one is empty or named twice."""
    keys = [key.strip() for key in text.split("+")]
    if not all(keys) or len(set(keys)) < len(keys):
        raise RewardFailed(f"score_key {text!r} is not a key, or different keys joined by +")
    return keys


def _headers(body: bytes, content: str) -> dict[str, str]:
    return {"Content-Type": content, "Content-Length": str(len(body))}


def _pinged(reply: bytes) -> None:
    refuse_error_field(load_object(reply, "the answer to ping"), "the answer to ping")


def _metadata(item: Item, source: str, field: str) -> object:
    if source not in item.metadata:
        raise RewardFailed(f"item {item.id!r} has no {source!r} in its metadata, which {field} is made of")
    return item.metadata[source]
