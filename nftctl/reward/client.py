"""Client of `nftctl-reward/1`: sends images, brings back one trusted score for each, or says exactly why not.

Owns the two requests of the protocol and the comparison of revisions, on every reply. Everything else a client does
(deadline, retries, splitting, words for every failure) is in `exchange`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from nftctl.reward.exchange import ServiceClient, deadline_in
from nftctl.reward.images import JPEG_QUALITY, Encoding
from nftctl.reward.protocol import Item, Score, ServiceInfo, check_revision, encode_request, parse_info, parse_reply

__all__ = ["RewardClient", "deadline_in"]


class RewardClient(ServiceClient):
    """A service at `url` that declares `revision` itself. `encoding` is how pixels travel; `quality` is JPEG's."""

    def __init__(
        self,
        url: str,
        revision: str,
        token: str = "",
        *,
        encoding: Encoding = "png",
        quality: int = JPEG_QUALITY,
        **limits: Any,
    ) -> None:
        super().__init__(url, revision, token, **limits)
        self._encoding: Encoding = encoding
        self._quality = quality
        self._info: ServiceInfo | None = None

    async def _ask_info(self, session: aiohttp.ClientSession, deadline: float, compare: bool) -> ServiceInfo:
        def parse(body: bytes) -> ServiceInfo:
            info = parse_info(body)
            if compare:
                check_revision(info.revision, self.revision, "the service")
            return info

        info = await self._request(session, self._call("GET", "/v1/info", b"", {}, deadline), parse)
        if compare:
            self._info = info
        return info

    async def _largest(self, session: aiohttp.ClientSession, deadline: float) -> int:
        info = self._info or await self._ask_info(session, deadline, compare=True)
        return min(self._max_items, info.max_items)

    async def _score_part(
        self, session: aiohttp.ClientSession, items: Sequence[Item], key: str, deadline: float
    ) -> list[Score]:
        # Encoded once: every attempt sends the same bytes under the same key.
        body = await asyncio.to_thread(encode_request, key, self.revision, items, self._encoding, self._quality)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Idempotency-Key": key,
        }
        call = self._call("POST", "/v1/score", body, headers, deadline)
        ids = [item.id for item in items]
        return await self._request(session, call, lambda reply: parse_reply(reply, ids, self.revision))
