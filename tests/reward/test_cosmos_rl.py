"""The cosmos-rl client against a service written from the format's description: scores, or one error that says why."""

import asyncio
import gc
import re
import socket
import warnings

import numpy as np
import pytest
from reward_cases import flat, items

from nftctl.errors import RewardFailed
from nftctl.profile.schema import Provider, Reward
from nftctl.reward.client import RewardClient, deadline_in
from nftctl.reward.connect import connect
from nftctl.reward.cosmos_rl import CosmosClient, score_keys
from nftctl.reward.protocol import Item
from tests.interop.cosmos_server import CosmosServer

MEANS = [0.0, 0.2, 0.4, 1.0]
SENTINEL = "SENTINEL-4712"
QUICK = {"backoff": 0.005, "connect_timeout": 2.0, "read_timeout": 2.0, "reward_fn": "brightness"}


def _values(scores):
    return [round(s.score, 6) for s in scores]


def _ask(server, what=None, deadline=10.0, **options):
    """Score against the service; (scores or error, client)."""

    async def run():
        async with server, CosmosClient(server.url, "said/1", **QUICK | options) as client:
            try:
                outcome = await client.score(what or items(4), key="run/1/0/0/0", deadline=deadline_in(deadline))
            except RewardFailed as error:
                outcome = error
        return outcome, client

    return asyncio.run(run())


def _refused(server, says, phase, **options):
    outcome, client = _ask(server, **options)
    assert isinstance(outcome, RewardFailed), outcome
    assert re.search(says, outcome.message), outcome.message
    assert outcome.message.startswith(f"reward service {server.url}/api/reward/")
    assert re.search(rf"\(phase {phase}, \d+\.\d\d s, \d+ attempts?\)$", outcome.message), outcome.message
    assert client.counts.images == 0
    return outcome


def test_scores_are_enqueued_and_polled_for():
    server = CosmosServer(polls=3)
    scores, client = _ask(server)
    assert _values(scores) == MEANS
    assert [(s.id, s.components) for s in scores] == [(f"7/{n}", {}) for n in range(4)]
    assert server.tasks == [
        {"prompts": [f"grey {n}" for n in range(4)], "reward_fn": {"brightness": 1.0}, "media_type": "image"}
    ]
    assert server.shapes == [[4, 4, 4, 3]]
    assert len(server.pulls) == 4
    assert {kind for _, kind, _ in server.pulls} == {"brightness"}
    counts = client.counts
    # Being asked to come back is no failure, so nothing was retried.
    assert (counts.requests, counts.attempts, counts.retries, counts.images) == (2, 5, 0, 4)


def test_a_sum_of_keys_is_the_score_and_keeps_its_parts():
    server = CosmosServer()
    what = [Item("a", "p", {}, flat((255, 51, 0))), Item("b", "p", {}, flat((0, 102, 255)))]
    scores, _ = _ask(server, what, reward_fn="channels", score_key="red + green")
    assert _values(scores) == [1.2, 0.4]
    assert [s.components for s in scores] == [{"red": 1.0, "green": 0.2}, {"red": 0.0, "green": 0.4}]
    (one, _), _ = _ask(CosmosServer(), what, reward_fn="channels", score_key="blue")
    assert (one.score, one.components) == (0.0, {})


def test_more_images_than_a_request_may_hold_are_several_tasks():
    server = CosmosServer()
    scores, client = _ask(server, items(10), max_items=4)
    assert _values(scores) == [MEANS[n % 4] for n in range(10)]
    assert sorted(shape[0] for shape in server.shapes) == [2, 4, 4]
    assert client.counts.images == 10


def test_images_of_two_sizes_cannot_be_one_array():
    what = [Item("a", "p", {}, flat((1, 1, 1))), Item("b", "p", {}, flat((1, 1, 1), 8))]
    outcome, _ = _ask(CosmosServer(), what)
    assert "2 different sizes" in outcome.message
    assert _values(_ask(CosmosServer(), what, max_items=1)[0]) == [round(1 / 255, 6)] * 2


def test_gen_eval_takes_its_tags_from_the_metadata():
    server = CosmosServer(fault="dropped")
    include = [{"class": "bench", "count": 1}]
    what = [Item("a", "a bench", {"tag": "single_object", "include": include}, flat((1, 2, 3)))]
    _ask(server, what, reward_fn="gen_eval", deadline=0.3)
    (task,) = server.tasks
    assert (task["geneval_tags"], task["geneval_includes"]) == (["single_object"], [include])
    outcome, _ = _ask(CosmosServer(), reward_fn="gen_eval")
    assert re.search(r"item '7/0' has no 'tag' in its metadata, which geneval_tags is made of", outcome.message)


def test_the_replica_of_the_ticket_is_asked():
    server = CosmosServer(replica="replica-3")
    assert _values(_ask(server)[0]) == MEANS
    assert {target for _, _, target in server.pulls} == {"replica-3"}
    plain = CosmosServer()
    _ask(plain)
    assert {target for _, _, target in plain.pulls} == {""}


# ---- what goes wrong


def test_a_task_that_never_becomes_ready_is_named_at_the_deadline():
    server = CosmosServer("dropped")
    error = _refused(server, "the deadline passed: the service still answers 400", "read", deadline=0.6)
    assert server.pulls[0][0] in error.message
    assert f"/api/reward/pull: task {server.pulls[0][0]}: " in error.message
    assert server.enqueued == 1
    assert len(server.pulls) > 3


def test_a_pull_that_hangs_ends_at_the_deadline_with_the_task_named():
    error = _refused(
        CosmosServer("hang", polls=0), "task .*the deadline passed while waiting", "read", deadline=0.6, read_timeout=30
    )
    assert "deadline_s" in error.hint


def test_a_missing_score_key_lists_those_that_exist():
    error = _refused(CosmosServer(), r"no score 'hps'; there are: brightness, word", "parse", score_key="hps")
    assert error.hint == "correct score_key"
    _refused(CosmosServer("missing-key"), r"no score 'brightness'; there are: other, word", "parse")


@pytest.mark.parametrize(
    ("fault", "says", "phase"),
    [
        ("no-uuid", "uuid of the answer to enqueue is null", "parse"),
        ("html", "not JSON .*Bad gateway", "parse"),
        ("short", "3 scores under 'brightness' for 4 images", "parse"),
        ("long", "5 scores under 'brightness' for 4 images", "parse"),
        ("nan", "score 'brightness' of image 3 is nan", "parse"),
        ("null", "image 3 is null", "parse"),
        ("text", "image 3 is '1.0'", "parse"),
        ("true", "image 3 is true", "parse"),
        ("enqueue-500", "/enqueue: HTTP 500", "status"),
        ("pull-500", "/pull: task .*HTTP 500", "status"),
    ],
)
def test_a_fault_without_end_has_its_own_words(fault, says, phase):
    _refused(CosmosServer(fault), says, phase, retries=2)


@pytest.mark.parametrize("fault", ["enqueue-500", "pull-500"])
def test_a_passing_fault_is_tried_again_to_the_bound(fault):
    server = CosmosServer(fault)
    outcome, client = _ask(server, retries=2)
    assert isinstance(outcome, RewardFailed)
    assert client.counts.retries == 2
    assert server.enqueued == (3 if fault == "enqueue-500" else 1)


def test_a_service_that_recovers_is_used():
    scores, client = _ask(CosmosServer("enqueue-500", times=1))
    assert _values(scores) == MEANS
    assert client.counts.retries == 1


def test_not_ready_is_a_failure_everywhere_but_in_a_pull():
    async def run():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            client = CosmosClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "said/1", **QUICK)
            with pytest.raises(RewardFailed, match=r"/ping: HTTP 400"):
                await client.info()
            with pytest.raises(RewardFailed, match=r"/enqueue: HTTP 400"):
                await client.score(items(1), key="k", deadline=deadline_in(5))

    asyncio.run(run())


# ---- who it is


def test_info_is_a_ping_and_the_operators_word():
    async def run():
        async with CosmosServer() as server:
            info = await CosmosClient(server.url, "said/1", **QUICK).info()
            summed = await CosmosClient(server.url, "said/1", **QUICK | {"score_key": "red+green"}).info()
        assert server.pings == 2
        assert (info.name, info.revision, info.modalities, info.components) == (
            "brightness", "said/1", ("image",), ()
        )  # fmt: skip
        assert summed.components == ("red", "green")

    asyncio.run(run())


def test_nobody_there_is_said():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    client = CosmosClient(f"http://127.0.0.1:{port}", "said/1", **QUICK | {"retries": 0})
    with pytest.raises(RewardFailed, match=r"/api/reward/ping: the connection was refused"):
        asyncio.run(client.info())
    with pytest.raises(RewardFailed, match=r"/api/reward/enqueue: the connection was refused"):
        asyncio.run(client.score(items(), key="k", deadline=deadline_in(5)))


def test_no_revision_no_score():
    with pytest.raises(RewardFailed, match="no revision is pinned"):
        asyncio.run(CosmosClient("http://h:1", "", **QUICK).score(items(), key="k", deadline=deadline_in(5)))


def test_the_token_travels_in_the_header_and_in_no_message():
    assert _values(_ask(CosmosServer(token=SENTINEL), token=SENTINEL)[0]) == MEANS
    outcome, client = _ask(CosmosServer(token="another"), token=SENTINEL)
    assert "token was not accepted" in outcome.message
    outcome, client = _ask(CosmosServer("nan", replica=SENTINEL), token=SENTINEL)
    assert SENTINEL not in outcome.message + outcome.hint + repr(client)


def test_one_client_serves_successive_event_loops_and_leaves_nothing_open():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        client = None

        async def once():
            nonlocal client
            async with CosmosServer(port=client.url.port if client else 0) as server:
                client = client or CosmosClient(server.url, "said/1", **QUICK)
                return await client.score(items(), key="k", deadline=deadline_in(10))

        for _ in range(3):
            assert _values(asyncio.run(once())) == MEANS
        gc.collect()
    assert client.counts.images == 12


@pytest.mark.parametrize("text", ["", "+", "a+", "a++b", "a+a", " "])
def test_score_keys_are_different_and_not_empty(text):
    with pytest.raises(RewardFailed, match="score_key"):
        score_keys(text)


def test_a_provider_gets_the_client_of_its_protocol():
    def made(**changes):
        provider = Provider(**{"name": "hpsv2", "protocol": "cosmos-rl", **changes})
        return connect(provider, Reward(max_items_per_request=3), url="http://h:1", revision="r", token="")

    assert (made().reward_fn, made().keys) == ("hpsv2", ["hpsv2"])
    both = made(reward_fn="ocr", score_key="ocr_reward+bonus")
    assert (both.reward_fn, both.keys) == ("ocr", ["ocr_reward", "bonus"])
    assert made(reward_fn="ocr").keys == ["hpsv2"]
    assert isinstance(made(protocol="nftctl-reward/1"), RewardClient)


def test_nothing_is_clipped():
    images = [Item("a", "p", {}, np.full((2, 2, 3), 255, np.uint8))]

    class Wide(CosmosServer):
        async def _spoilt(self, result):
            from aiohttp import web

            return web.json_response(result | {"scores": {"brightness": [-1234.5]}})

    assert _values(_ask(Wide("nan"), images)[0]) == [-1234.5]
