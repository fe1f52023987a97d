"""Scores come back by id, weighted; every failure is the client's own error, and never a number."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from nftctl.errors import RewardFailed
from nftctl.profile.schema import Provider, Reward
from nftctl.reward.protocol import Item, RevisionDiffers
from nftctl.roles.reward import Endpoint, RewardRole, weigh
from tests.reward.fault_server import FaultServer
from tests.reward.reward_cases import MeanPixel, serving
from tests.roles.samples import picture, running

Build = Callable[..., RewardRole]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def build(stack: ExitStack) -> Build:
    """`build((service, provider changes), ..., deadline_s=5.0)`: a begun role of rank 2 and its started services."""

    def make(*services: tuple[Any, dict[str, Any]], **reward: Any) -> RewardRole:
        endpoints = []
        for number, (service, changes) in enumerate(services):
            url = stack.enter_context(running(service))
            revision = "mean/1" if isinstance(url, str) else url.revision
            provider = Provider(**{"name": "ab"[number], "revision": revision, **changes})
            endpoints.append(Endpoint(provider, url if isinstance(url, str) else url.url, revision))
        settings = Reward(**{"deadline_s": 10.0, "read_timeout_s": 5.0, "retries": 0, **reward})
        role = RewardRole(settings, endpoints, key="run/1", rank=2)
        stack.callback(role.close)
        role.begin()
        return role

    return make


class Picky(MeanPixel):
    """Refuses to score what is called `bad`."""

    def score(self, images: Any, prompts: list[str], metadata: Any) -> Any:
        if "bad" in prompts:
            raise ValueError("cannot look at this")
        return super().score(images, prompts, metadata)


@pytest.mark.parametrize(
    ("changes", "score", "value"),
    [
        ({}, 0.25, 0.25),
        ({"weight": -2.0}, 0.25, -0.5),
        ({"weight": 0.0}, 9.0, 0.0),
        ({"scale": 4.0}, 0.25, 1.0),
        ({"scale": 4.0, "clip": [0.0, 0.5], "weight": 3.0}, 0.25, 1.5),
        ({"scale": 4.0, "clip": [-1.0, 0.5]}, -7.0, -1.0),
        ({"clip": [0.0, 0.5]}, 0.25, 0.25),
    ],
)
def test_weight_times_clipped_scaled_score(changes: dict[str, Any], score: float, value: float) -> None:
    assert weigh(Provider(name="a", **changes), score) == value


def test_the_reward_is_the_sum_over_providers_and_components_stay_raw(build: Build) -> None:
    role = build(
        (serving(MeanPixel()), {"weight": 2.0, "scale": 0.01, "clip": [0.0, 1.0]}),
        (serving(MeanPixel()), {"weight": -0.5}),
    )
    samples = [picture(102), picture((30, 60, 90), 1)]
    role.submit(0, samples)
    role.collect()
    # 2 x clip(1.02) - 0.5 x 102, and 2 x 0.6 - 0.5 x 60.
    assert [t.reward for t in samples] == pytest.approx([2.0 - 51.0, 1.2 - 30.0])
    assert samples[1].components == {
        "a": 60.0, "a/red": 30.0, "a/green": 60.0, "a/blue": 90.0,
        "b": 60.0, "b/red": 30.0, "b/green": 60.0, "b/blue": 90.0,
    }  # fmt: skip


def test_a_provider_of_weight_zero_is_logged_only(build: Build) -> None:
    role = build((serving(MeanPixel()), {}), (serving(MeanPixel()), {"weight": 0.0}))
    sample = picture(51)
    role.submit(0, [sample])
    role.collect()
    assert sample.reward == 51.0
    assert sample.components["b"] == 51.0


def test_images_that_are_to_be_shown_stay_where_they_are(build: Build) -> None:
    role = build((serving(MeanPixel()), {}))
    sample = picture(51)
    before = sample.image
    role.submit(0, [sample], keep=True)
    role.collect()
    assert sample.image is before
    assert sample.reward == 51.0


def test_scorers_read_the_plain_prompt_and_the_metadata(build: Build) -> None:
    scorer = MeanPixel()
    role = build((serving(scorer), {}))
    role.submit(0, [picture(0, prompt="a red bus", source="ours")])
    role.collect()
    assert scorer.calls == [["a red bus"]]
    assert scorer.metadata == [{"source": "ours"}]


def test_the_image_goes_with_the_request(build: Build) -> None:
    role = build((serving(MeanPixel()), {}))
    sample = picture(51)
    role.submit(0, [sample])
    assert sample.image is None
    assert sample.reward is None
    with pytest.raises(RewardFailed, match="row 0: no image to score"):
        role.submit(0, [sample])
    role.collect()
    assert sample.reward == 51.0


def test_each_micro_batch_is_a_request_with_a_key_of_its_own(build: Build) -> None:
    server = FaultServer(after=100)
    role = build((server, {}))
    samples = [picture(51 * n, n) for n in range(4)]
    role.submit(7, samples[:3])
    role.submit(7, samples[3:])
    role.collect()
    assert [t.reward for t in samples] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert sorted(server.keys) == ["run/1/7/2/1", "run/1/7/2/2"]
    assert server.scored == {"0/2": 1, "1/2": 1, "2/2": 1, "3/2": 1}


def test_keys_are_never_used_twice_in_a_run(build: Build) -> None:
    server = FaultServer()
    role = build((server, {}))
    for step in range(3):
        role.begin()
        role.submit(step, [picture(0)])
        role.collect()
        role.score_images([Item("e", "p", {}, np.zeros((4, 4, 3), np.uint8))], "eval")
    assert len(server.keys) == len(set(server.keys)) == 6


@pytest.mark.parametrize(
    ("fault", "says"),
    [("status-400", "HTTP 400"), ("nan", "not a finite number"), ("short", "has no score"), ("reset", "connection")],
)
def test_fail_raises_the_clients_own_error(build: Build, fault: str, says: str) -> None:
    server = FaultServer(fault)
    role = build((server, {}))
    samples = [picture(n, n) for n in range(2)]
    role.submit(0, samples)
    with pytest.raises(RewardFailed, match=says) as caught:
        role.collect()
    assert server.url in str(caught.value)
    assert [t.reward for t in samples] == [None, None]


def test_drop_group_records_the_failure_of_the_one_sample(build: Build) -> None:
    role = build((serving(Picky()), {}), on_failure="drop-group")
    samples = [picture(10, 0), picture(20, 1, "bad"), picture(30, 2)]
    role.submit(0, samples)
    role.collect()
    assert [t.reward for t in samples] == [10.0, None, 30.0]
    assert "cannot look at this" in samples[1].failures["a"]
    assert [list(t.failures) for t in samples] == [[], ["a"], []]
    assert [list(t.latency_s) for t in samples] == [["a"], [], ["a"]]


def test_one_provider_without_a_score_leaves_no_reward_at_all(build: Build) -> None:
    role = build((serving(MeanPixel()), {}), (serving(Picky()), {}), on_failure="drop-group")
    samples = [picture(10, 0, "bad"), picture(20, 1)]
    role.submit(0, samples)
    role.collect()
    assert [t.reward for t in samples] == [None, 40.0]
    assert samples[0].components["a"] == 10.0
    assert "b" not in samples[0].components


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_the_policy_does_not_ask_for_a_weight(build: Build, weight: float) -> None:
    services = ((serving(MeanPixel()), {}), (FaultServer("status-400"), {"weight": weight}))
    with pytest.raises(RewardFailed, match="HTTP 400"):
        _scored(build(*services), [picture(10)])
    other = ((serving(MeanPixel()), {}), (FaultServer("status-400"), {"weight": weight}))
    (sample,) = _scored(build(*other, on_failure="drop-group"), [picture(10)])
    assert sample.reward is None
    assert list(sample.failures) == ["b"]


def test_every_failed_provider_is_named(build: Build) -> None:
    role = build((FaultServer("status-400"), {}), (serving(Picky()), {}), on_failure="drop-group")
    (sample,) = _scored(role, [picture(10, 0, "bad")])
    assert list(sample.failures) == ["a", "b"]
    assert "HTTP 400" in sample.failures["a"]
    assert "cannot look at this" in sample.failures["b"]


def _scored(role: RewardRole, samples: list[Any]) -> list[Any]:
    role.submit(0, samples)
    role.collect()
    return samples


# ---- A24, A26: from any loop, and nothing else of a sample is touched


def test_a_role_may_be_used_from_one_event_loop_after_another(build: Build) -> None:
    role = build((serving(MeanPixel()), {}))
    white = np.full((4, 4, 3), 255, np.uint8)

    async def step(number: int) -> float | None:
        role.begin()
        (sample,) = _scored(role, [picture(51, number)])
        ((held_out, _),) = role.score_images([Item("e/0", "p", {}, white)], "eval")
        assert held_out == 255.0
        return sample.reward

    assert [asyncio.run(step(n)) for n in range(3)] == [51.0] * 3


def test_scoring_takes_the_image_and_leaves_the_rest(build: Build) -> None:
    role = build((serving(MeanPixel()), {}))
    samples = [picture(51 * n, 40 + n, f"prompt {n}") for n in range(3)]
    before = [(t.row, t.tick, t.x0, t.conditioning) for t in samples]
    _scored(role, samples)
    for t, (row, tick, x0, conditioning) in zip(samples, before, strict=True):
        assert t.row is row
        assert t.x0 is x0
        assert t.conditioning is conditioning
        assert (t.tick, t.image, t.failures) == (tick, None, {})
    assert [t.reward for t in samples] == [0.0, 51.0, 102.0]


# ---- overlap


class Held(MeanPixel):
    """Scores when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.go = threading.Event()

    def score(self, images: Any, prompts: list[str], metadata: Any) -> Any:
        self.asked.set()
        assert self.go.wait(20)
        return super().score(images, prompts, metadata)


def test_scores_come_while_the_caller_does_something_else(build: Build) -> None:
    scorer = Held()
    role = build((serving(scorer, workers=2), {}))
    first, second = picture(10, 0), picture(20, 1)
    role.submit(0, [first])
    # The request is out, nobody has waited, and the next micro-batch can be made and sent.
    assert scorer.asked.wait(20)
    role.submit(0, [second])
    assert scorer.calls == []
    assert (first.reward, second.reward) == (None, None)
    scorer.go.set()
    role.collect()
    assert (first.reward, second.reward) == (10.0, 20.0)
    assert len(scorer.calls) == 2


def test_latency_is_each_providers_own(build: Build) -> None:
    role = build((FaultServer("slow", seconds=0.3), {}), (FaultServer(), {}))
    (sample,) = _scored(role, [picture(51)])
    assert sample.latency_s["a"] >= 0.3
    assert 0 < sample.latency_s["b"] < sample.latency_s["a"]


def test_another_revision_is_never_a_dropped_group(build: Build) -> None:
    role = build((serving(Picky()), {}), (FaultServer("wrong-revision"), {}), on_failure="drop-group")
    role.submit(0, [picture(10, 0, "bad"), picture(20, 1)])
    with pytest.raises(RevisionDiffers, match="swapped/2"):
        role.collect()


def test_a_failed_step_leaves_nothing_behind_for_the_next(build: Build) -> None:
    server = FaultServer("status-400", times=1)
    role = build((server, {}))
    role.submit(0, [picture(51)])
    with pytest.raises(RewardFailed):
        role.collect()
    role.begin()
    again = picture(51)
    role.submit(0, [again])
    role.collect()
    assert again.reward == pytest.approx(0.2)


def test_counters_tell_requests_retries_and_images(build: Build) -> None:
    role = build((FaultServer("status-503", times=1), {}), (FaultServer(), {}), retries=2)
    role.submit(0, [picture(n, n) for n in range(3)])
    role.collect()
    # Two providers, each asked once for its revision and once for scores.
    assert role.counters() == {"requests": 4, "retries": 1, "images": 6}


def test_a_silent_service_is_bounded_by_the_deadline(build: Build) -> None:
    role = build((FaultServer("hang"), {}), deadline_s=0.3)
    role.submit(0, [picture(0)])
    with pytest.raises(RewardFailed, match="the deadline passed while waiting for the answer"):
        role.collect()


def test_the_deadline_runs_from_the_first_request_of_the_step(build: Build) -> None:
    server = FaultServer()
    role = build((server, {}), deadline_s=1.0)
    time.sleep(1.1)  # a rollout may take any time before it has something to score
    role.submit(0, [picture(0)])
    time.sleep(1.1)
    role.submit(0, [picture(51)])
    with pytest.raises(RewardFailed, match="the deadline had passed before anything was sent"):
        role.collect()
    assert server.requests == 1


def test_evaluation_scores_loose_images_and_always_raises(build: Build) -> None:
    role = build((serving(Picky()), {"weight": 0.5}), on_failure="drop-group")
    white = np.full((4, 4, 3), 255, np.uint8)
    assert role.score_images([Item("e/0", "good", {}, white)], "eval") == [
        (127.5, {"a": 255.0, "a/red": 255.0, "a/green": 255.0, "a/blue": 255.0})
    ]
    with pytest.raises(RewardFailed, match="cannot look at this"):
        role.score_images([Item("e/0", "bad", {}, white)], "eval")


def test_the_token_comes_from_the_environment_and_stays_out_of_messages(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame-4711")
    role = build((serving(MeanPixel(), token="sesame-4711"), {"token_env": "MY_TOKEN"}))
    sample = picture(51)
    role.submit(0, [sample])
    role.collect()
    assert sample.reward == 51.0
    monkeypatch.setenv("OTHER_TOKEN", "open-4712")
    other = build((serving(MeanPixel(), token="sesame-4711"), {"token_env": "OTHER_TOKEN"}))
    other.submit(0, [picture(51)])
    with pytest.raises(RewardFailed, match="token was not accepted") as caught:
        other.collect()
    assert "4712" not in str(caught.value)


def test_closing_ends_thread_and_connections() -> None:
    seen: list[web.Request] = []

    class Watched(FaultServer):
        async def _get_info(self, request: web.Request) -> web.StreamResponse:
            seen.append(request)
            return await super()._get_info(request)

    with running(Watched()) as server:
        provider = Provider(name="a", revision="fault/1")
        role = RewardRole(Reward(), [Endpoint(provider, server.url, "fault/1")], key="run/1", rank=0)
        role.begin()
        role.submit(0, [picture(0)])
        role.collect()
        transport = seen[0].transport
        assert transport is not None
        assert not transport.is_closing()
        role.close()
        end = time.monotonic() + 5
        while not transport.is_closing() and time.monotonic() < end:
            time.sleep(0.01)
        assert transport.is_closing()
        assert "reward" not in {thread.name for thread in threading.enumerate()}
