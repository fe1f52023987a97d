"""Items, scorers and a real loopback server for the reward tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web

from nftctl.reward.images import Image
from nftctl.reward.protocol import Item
from nftctl.reward.server import make_app

LEVELS = (0, 51, 102, 255)


def flat(colour: tuple[int, int, int], size: int = 4) -> Image:
    return np.broadcast_to(np.array(colour, dtype=np.uint8), (size, size, 3)).copy()


def items(count: int = 4) -> list[Item]:
    """Grey squares with ids 7/0, 7/1, ...; their mean pixels are 0, 0.2, 0.4, 1 and so on."""
    return [Item(f"7/{n}", f"grey {n}", {"n": n}, flat((LEVELS[n % 4],) * 3)) for n in range(count)]


class MeanPixel:
    """score = mean of 0..255, components the three channels; remembers what it was called with."""

    name = "mean_pixel"
    components = ("red", "green", "blue")

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.metadata: list[dict[str, Any]] = []

    def revision(self) -> str:
        return "mean/1"

    def score(
        self, images: list[Image], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        self.calls.append(prompts)
        self.metadata += metadata
        means = [image.reshape(-1, 3).mean(axis=0) for image in images]
        return [(float(m.mean()), dict(zip(self.components, map(float, m), strict=True))) for m in means]


@asynccontextmanager
async def serving(scorer: Any, revision: str = "mean/1", **options: Any) -> AsyncIterator[str]:
    """The real application on a free loopback port; yields its URL."""
    runner = web.AppRunner(make_app(scorer, revision, **options), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
