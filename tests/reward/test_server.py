"""The bundled server on loopback, asked by the real client and by hand."""

import asyncio
import hashlib
import json
import math
import threading

import aiohttp
import numpy as np
import pytest
from reward_cases import MeanPixel, flat, items, serving

from nftctl.errors import RewardFailed
from nftctl.reward.client import RewardClient, deadline_in
from nftctl.reward.idempotency import AnswerMemory
from nftctl.reward.images import encode_image
from nftctl.reward.protocol import Item, RequestRefused, encode_request
from nftctl.reward.server import BYTES_PER_ITEM

SENTINEL = "SENTINEL-4711"


def _client(url, **options):
    return RewardClient(url, "mean/1", **{"backoff": 0.005, "read_timeout": 20.0} | options)


def _score(scorer, sent, *, server=None, **options):
    """Scores through client and server, and the server's counts."""

    async def run():
        async with serving(scorer, **server or {}) as url:
            async with _client(url, **options) as client:
                scores = await client.score(sent, key="run/1/0/0/0", deadline=deadline_in(30))
            return scores, await _get(url, "/healthz")

    return asyncio.run(run())


async def _get(url, path, **headers):
    async with aiohttp.ClientSession() as session, session.get(url + path, headers=headers) as response:
        return await response.json()


async def _post(url, body, *, path="/v1/score", **headers):
    async with aiohttp.ClientSession() as session, session.post(url + path, data=body, headers=headers) as response:
        return response.status, await response.json()


# ---- A22: value range and layout


@pytest.mark.parametrize("encoding", ["png", "raw"])
@pytest.mark.parametrize("colour", [(255, 255, 255), (0, 0, 0), (255, 0, 0), (1, 2, 3)])
def test_the_scorer_sees_the_pixels_that_were_made(encoding, colour):
    ((score,), _) = _score(MeanPixel(), [Item("0/0", "p", {}, flat(colour))], encoding=encoding)
    assert tuple(score.components[c] for c in ("red", "green", "blue")) == colour
    assert score.score == pytest.approx(sum(colour) / 3)


def test_prompts_and_metadata_arrive():
    scorer = MeanPixel()
    sent = [Item("0/0", "ein grünes Haus, 日本", {"tags": [1, {"a": None}]}, flat((0, 0, 0)))]
    _score(scorer, sent)
    assert (scorer.calls, scorer.metadata) == ([["ein grünes Haus, 日本"]], [{"tags": [1, {"a": None}]}])


def test_info_and_health_say_what_is_served():
    async def run():
        async with serving(MeanPixel(), max_items=5) as url:
            info = await _client(url).info()
            assert (info.name, info.revision, info.max_items) == ("mean_pixel", "mean/1", 5)
            assert info.components == ("red", "green", "blue")
            assert await _get(url, "/healthz") == {
                "status": "ok", "revision": "mean/1", "requests": 0, "images": 0, "repeats": 0,
            }  # fmt: skip

    asyncio.run(run())


# ---- A19: sizes


def test_a_group_of_large_images_fits():
    noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    scores, health = _score(MeanPixel(), [Item(f"0/{n}", "p", {}, noise) for n in range(4)])
    assert len(scores) == 4
    assert (health["requests"], health["images"]) == (1, 4)
    for encoding in ("png", "raw"):
        assert len(encode_image(noise, encoding)) < BYTES_PER_ITEM - 2**19


def test_a_body_over_the_limit_is_413_with_the_limit_and_is_not_sent_again():
    large = [Item("0/0", "p", {}, np.zeros((1500, 1500, 3), np.uint8))]
    with pytest.raises(
        RewardFailed, match=r"HTTP 413, a body of 8\.6 MiB .*takes \(1000 bytes\).* 1 attempt\)"
    ) as caught:
        _score(MeanPixel(), large, server={"max_body": 1000}, encoding="raw")
    assert "reward.max_items_per_request" in caught.value.hint


def test_a_body_over_the_limit_that_hides_its_length_is_413_too():
    async def run():
        async def endless():
            for _ in range(64):
                yield bytes(2**16)

        async with serving(MeanPixel(), max_body=2**17) as url:
            status, reply = await _post(url, endless())
            assert (status, reply["error"]["code"]) == (413, "body-too-large")

    asyncio.run(run())


# ---- access


def test_the_token_is_needed_and_compared_whole():
    async def run():
        async with serving(MeanPixel(), token=SENTINEL) as url:
            body = encode_request("k", "mean/1", items())
            for given in ("", "Bearer", f"Bearer {SENTINEL}x", f"Bearer {SENTINEL[:-1]}", SENTINEL, "Bearer ä"):
                status, reply = await _post(url, body, Authorization=given)
                assert (status, reply["error"]["code"]) == (401, "unauthorised")
                assert SENTINEL not in json.dumps(reply)
                assert "error" in await _get(url, "/v1/info", Authorization=given)
            assert (await _get(url, "/healthz"))["images"] == 0
            with pytest.raises(RewardFailed, match="token was not accepted"):
                await _client(url, token="other").info()
            assert len(await _client(url, token=SENTINEL).score(items(), key="k", deadline=deadline_in(20))) == 4

    asyncio.run(run())


# ---- refusals


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"revision": "other"}, 409, "revision-differs"),
        ({"request_id": "other"}, 400, "bad-request"),
        ({"items": []}, 400, "bad-request"),
        ({"surprise": 1}, 400, "bad-request"),
        (None, 400, "bad-request"),
    ],
)
def test_bad_requests_are_json_errors_and_cost_nothing(change, status, code):
    async def run():
        scorer = MeanPixel()
        async with serving(scorer) as url:
            document = json.loads(encode_request("k", "mean/1", items()))
            body = b"not json" if change is None else json.dumps(document | change).encode()
            got, reply = await _post(url, body, **{"Idempotency-Key": "k"})
            assert (got, reply["error"]["code"]) == (status, code)
            assert reply["error"]["message"]
            assert scorer.calls == []

    asyncio.run(run())


def test_too_many_items_are_413():
    async def run():
        async with serving(MeanPixel(), max_items=3) as url:
            status, reply = await _post(url, encode_request("k", "mean/1", items(4)))
            assert (status, reply["error"]["code"]) == (413, "too-many-items")
            assert "at most 3" in reply["error"]["message"]

    asyncio.run(run())


def test_unknown_paths_and_methods_are_json_errors():
    async def run():
        async with serving(MeanPixel()) as url:
            assert (await _get(url, "/nope"))["error"]["code"] == "not-found"
            status, reply = await _post(url, b"", path="/v1/info")
            assert (status, reply["error"]["code"]) == (405, "method-not-allowed")

    asyncio.run(run())


def test_the_key_may_come_from_the_body_alone():
    async def run():
        async with serving(MeanPixel()) as url:
            body = encode_request("k", "mean/1", items())
            assert (await _post(url, body))[0] == 200
            assert (await _post(url, body, **{"Idempotency-Key": "k"}))[0] == 200
            assert (await _get(url, "/healthz"))["requests"] == 1

    asyncio.run(run())


# ---- idempotency


def test_a_repeat_is_answered_from_memory_and_another_body_is_422():
    async def run():
        scorer = MeanPixel()
        async with serving(scorer) as url:
            body = encode_request("k", "mean/1", items())
            first, again = await _post(url, body), await _post(url, body)
            assert first == again
            status, reply = await _post(url, encode_request("k", "mean/1", items(3)))
            assert (status, reply["error"]["code"]) == (422, "key-reused")
            assert len(scorer.calls) == 1
            health = await _get(url, "/healthz")
            assert (health["requests"], health["images"], health["repeats"]) == (1, 4, 1)

    asyncio.run(run())


class Gated(MeanPixel):
    """Scores only once it is let."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.begun = threading.Event()

    def score(self, images, prompts, metadata):
        self.begun.set()
        assert self.gate.wait(30)
        return super().score(images, prompts, metadata)


def test_repeats_that_arrive_meanwhile_wait_for_the_first_and_the_loop_stays_free():
    async def run():
        scorer = Gated()
        async with serving(scorer) as url:
            body = encode_request("k", "mean/1", items())
            asks = [asyncio.create_task(_post(url, body)) for _ in range(3)]
            await asyncio.to_thread(scorer.begun.wait, 30)
            assert (await _get(url, "/healthz"))["requests"] == 0
            scorer.gate.set()
            answers = await asyncio.gather(*asks)
            assert answers[0][0] == 200
            assert answers == [answers[0]] * 3
            assert len(scorer.calls) == 1
            assert (await _get(url, "/healthz"))["repeats"] == 2

    asyncio.run(run())


def test_a_client_that_gave_up_finds_its_answer_when_it_asks_again():
    async def run():
        scorer = Gated()
        async with serving(scorer) as url, _client(url, read_timeout=0.2, retries=0) as client:
            with pytest.raises(RewardFailed, match="no answer within the read time-out"):
                await client.score(items(), key="k", deadline=deadline_in(20))
            scorer.gate.set()
            async with _client(url) as patient:
                assert len(await patient.score(items(), key="k", deadline=deadline_in(20))) == 4
            assert len(scorer.calls) == 1

    asyncio.run(run())


def _memory_run(steps, **bounds):
    """Feed (time, key, digest) to a memory; for each, made anew?"""
    now = 0.0
    memory = AnswerMemory(clock=lambda: now, **bounds)
    made = []

    async def make():
        made[-1] = True
        return b"answer"

    async def run():
        nonlocal now
        for moment, key, digest in steps:
            now = moment
            made.append(False)
            try:
                await memory.once(key, digest, make)
            except RequestRefused as refused:
                made[-1] = refused.status
        return len(memory)

    return made, asyncio.run(run())


def test_memory_is_bounded_by_age():
    steps = [(0, "a", b"1"), (10, "a", b"1"), (10.5, "b", b"1"), (11, "a", b"2"), (11, "b", b"2")]
    assert _memory_run(steps, age_s=10) == ([True, False, True, True, 422], 2)


def test_memory_is_bounded_by_count():
    steps = [(n, f"k{n % 5}", b"1") for n in range(10)]
    assert _memory_run(steps, count=5) == ([True] * 5 + [False] * 5, 5)
    assert _memory_run(steps, count=3) == ([True] * 10, 3)


def test_a_failure_is_not_remembered():
    async def run():
        memory = AnswerMemory()
        calls = []

        async def make():
            calls.append(1)
            if len(calls) == 1:
                raise RequestRefused(500, "scorer-failed", "once")
            return b"fine"

        digest = hashlib.sha256(b"").digest()
        with pytest.raises(RequestRefused, match="once"):
            await memory.once("k", digest, make)
        assert await memory.once("k", digest, make) == (b"fine", False)
        assert await memory.once("k", digest, make) == (b"fine", True)

    asyncio.run(run())


def test_a_waiter_that_is_cancelled_does_not_take_the_answer_from_the_others():
    async def run():
        memory, gate = AnswerMemory(), asyncio.Event()

        async def make():
            await gate.wait()
            return b"fine"

        first = asyncio.create_task(memory.once("k", b"1", make))
        second = asyncio.create_task(memory.once("k", b"1", make))
        await asyncio.sleep(0)
        first.cancel()
        gate.set()
        assert await second == (b"fine", True)
        assert first.cancelled()

    asyncio.run(run())


# ---- a scorer that fails


class Failing(MeanPixel):
    """Raises, for the first `times` calls, what it was given."""

    def __init__(self, error, times=10**9):
        super().__init__()
        self.error, self.times = error, times

    def score(self, images, prompts, metadata):
        if len(self.calls) < self.times:
            self.calls.append([])
            raise self.error
        return super().score(images, prompts, metadata)


def test_a_scorer_that_fails_once_is_asked_again_and_counted_once():
    scores, health = _score(Failing(MemoryError(), times=1), items())
    assert len(scores) == 4
    assert (health["requests"], health["images"]) == (1, 4)


def test_a_scorer_that_raises_is_500_without_secrets(monkeypatch, caplog):
    monkeypatch.setenv("OCR_API_KEY", "key-in-the-environment")
    scorer = Failing(ValueError(f"no {SENTINEL} for\nkey-in-the-environment today"))
    with pytest.raises(
        RewardFailed, match=r"HTTP 500: scorer-failed: ValueError: no \*\*\* for \*\*\* today.*2 attempts"
    ):
        _score(scorer, items(), server={"token": SENTINEL}, token=SENTINEL, retries=1)
    assert len(scorer.calls) == 2
    assert "the scorer raised" in caplog.text
    assert SENTINEL not in caplog.text
    assert "key-in-the-environment" not in caplog.text


class Answering(MeanPixel):
    """Answers whatever it was given."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def score(self, images, prompts, metadata):
        return self.answer


PARTS = {"red": 0.0, "green": 0.0, "blue": 0.0}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([(math.nan, PARTS)], r"image 0 by mean_pixel is nan"),
        ([(math.inf, PARTS)], r"image 0 by mean_pixel is inf"),
        ([(None, PARTS)], r"image 0 by mean_pixel is null"),
        ([(True, PARTS)], r"image 0 by mean_pixel is true"),
        ([(0.0, PARTS | {"red": math.nan})], r"component 'red' of image 0 is nan"),
        ([(0.0, {"red": 0.0})], r"components \['red'\], declared \['blue', 'green', 'red'\]"),
        ([], "0 results for 1 images"),
        ([(0.0, PARTS)] * 2, "2 results for 1 images"),
        ([0.5], "cannot be sent"),
        (None, "cannot be sent"),
    ],
)
def test_a_wrong_answer_of_the_scorer_is_500_and_never_sent(answer, says):
    with pytest.raises(RewardFailed, match=f"HTTP 500: scorer-wrong: .*{says}"):
        _score(Answering(answer), items(1), retries=0)


def test_many_clients_at_once():
    async def run():
        scorer = MeanPixel()
        async with serving(scorer, workers=2) as url:

            async def rank(r):
                async with _client(url, max_items=3) as client:
                    return await client.score(items(8), key=f"run/1/0/{r}/0", deadline=deadline_in(30))

            for scores in await asyncio.gather(*map(rank, range(4))):
                assert [s.id for s in scores] == [f"7/{n}" for n in range(8)]
            health = await _get(url, "/healthz")
            assert (health["requests"], health["images"], health["repeats"]) == (12, 32, 0)

    asyncio.run(run())
