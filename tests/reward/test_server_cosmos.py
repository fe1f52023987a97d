"""cosmos-rl tasks between enqueue and pull: bounds, failures, forgetting. The wire itself is in tests/interop."""

import asyncio

import aiohttp
import numpy as np
import pytest
from reward_cases import MeanPixel, serving

from nftctl.reward.cosmos_server import CosmosTasks
from nftctl.reward.cosmos_wire import (
    ENQUEUE_PATH,
    NOT_READY,
    PULL_PATH,
    Task,
    encode_pull,
    encode_task,
    parse_result,
    parse_ticket,
)
from nftctl.reward.protocol import RequestRefused

BODY = encode_task(Task(["p", "q"], np.full((2, 4, 4, 3), 51, np.uint8), {"mean_pixel": 1.0}))


def tasks(**options):
    return CosmosTasks(["mean_pixel"], 4, **{"pending_bytes": 10 * len(BODY)} | options)


async def _settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def at_once(body):
    return {"mean_pixel": b"scores"}


def test_a_task_is_not_there_then_there_and_again():
    async def run():
        board, gate = tasks(), asyncio.Event()

        async def score(body):
            await gate.wait()
            return {"mean_pixel": b"scores"}

        ticket = await board.enqueue(BODY, score)
        assert board.pull(ticket.uuid, "mean_pixel") is None
        gate.set()
        await _settled()
        assert [board.pull(ticket.uuid, name) for name in ("mean_pixel", "mean_pixel", "other")] == [b"scores"] * 2 + [
            None
        ]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "fits"), [({"pending": 3}, 3), ({"pending_bytes": 2 * len(BODY)}, 2), ({"pending_bytes": 1}, 1)]
)
def test_too_much_that_waits_is_429_and_nothing_accepted_is_dropped(options, fits):
    async def run():
        board, gate = tasks(**options), asyncio.Event()

        async def score(body):
            await gate.wait()
            return {"mean_pixel": b"scores"}

        tickets = [await board.enqueue(BODY, score) for _ in range(fits)]
        with pytest.raises(RequestRefused) as caught:
            await board.enqueue(BODY, score)
        assert caught.value.status == 429
        gate.set()
        await _settled()
        assert [board.pull(ticket.uuid, "mean_pixel") for ticket in tickets] == [b"scores"] * fits
        await board.enqueue(BODY, score)

    asyncio.run(run())


def test_results_are_bounded_by_count_and_age():
    async def run():
        now = 0.0
        board = tasks(kept=2, age_s=10, clock=lambda: now)
        first, second, third = [await board.enqueue(BODY, at_once) for _ in range(3)]
        await _settled()
        assert board.pull(first.uuid, "mean_pixel") is None
        assert board.pull(second.uuid, "mean_pixel") == b"scores"
        now = 10.5
        assert board.pull(third.uuid, "mean_pixel") is None
        assert len(board) == 0

    asyncio.run(run())


def test_a_failure_is_told_to_every_pull():
    async def run():
        board = tasks()

        async def score(body):
            raise RequestRefused(500, "scorer-failed", "out of order")

        ticket = await board.enqueue(BODY, score)
        await _settled()
        for _ in range(2):
            with pytest.raises(RequestRefused, match="out of order"):
                board.pull(ticket.uuid, "mean_pixel")

    asyncio.run(run())


def test_what_cannot_be_scored_takes_no_place():
    async def run():
        board = tasks()
        for body, status in ((b"{}", 400), (BODY.replace(b"mean_pixel", b"mean_pixul"), 400)):
            with pytest.raises(RequestRefused) as caught:
                await board.enqueue(body, at_once)
            assert caught.value.status == status
        assert len(board) == 0

    asyncio.run(run())


def test_both_protocols_share_scorer_counts_and_port():
    async def run():
        scorer = MeanPixel()
        async with serving(scorer) as url, aiohttp.ClientSession() as session:
            async with session.post(url + ENQUEUE_PATH, data=BODY) as response:
                ticket = parse_ticket(await response.read())
            status = NOT_READY
            while status == NOT_READY:
                async with session.post(
                    url + PULL_PATH, data=encode_pull(ticket.uuid, "mean_pixel"),
                    headers={"Content-Type": "application/x-www-form-urlencoded"},
                ) as response:  # fmt: skip
                    status, reply = response.status, await response.read()
            assert parse_result(reply, ["mean_pixel", "red"], 2) == {"mean_pixel": [51, 51], "red": [51, 51]}
            async with session.get(url + "/healthz") as response:
                health = await response.json()
            assert (health["requests"], health["images"], scorer.calls) == (1, 2, [["p", "q"]])

    asyncio.run(run())
