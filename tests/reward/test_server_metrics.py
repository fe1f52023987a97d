"""`/metrics`: the text format, and that it counts what happened."""

import asyncio

import aiohttp
from reward_cases import MeanPixel, items, serving

from nftctl.reward.exposition import BUCKETS, Counter, Gauge, Histogram, exposition
from nftctl.reward.protocol import encode_request


def test_the_text_format():
    counter, histogram = Counter("c_total", "Things\nof \\ kinds."), Histogram("h_seconds", "Waits.")
    counter.add(route='a"b\\', status="200")
    counter.add(2**40, route='a"b\\', status="200")
    for seconds in (0.001, 0.005, 0.3, 1000.0):
        histogram.observe(seconds, route="r")
    lines = exposition(counter, Gauge("g", "Now.", lambda: 1.5), histogram).splitlines()
    assert lines[:2] == ["# HELP c_total Things\\nof \\\\ kinds.", "# TYPE c_total counter"]
    assert lines[2] == 'c_total{route="a\\"b\\\\",status="200"} 1099511627777'
    assert lines[3:6] == ["# HELP g Now.", "# TYPE g gauge", "g 1.5"]
    buckets = [line for line in lines if line.startswith("h_seconds_bucket")]
    assert len(buckets) == len(BUCKETS) + 1
    counts = [int(line.rsplit(" ", 1)[1]) for line in buckets]
    # 0.001 and the bound itself are within 0.005; 0.3 within 0.5; 1000 only within infinity.
    assert buckets[0] == 'h_seconds_bucket{route="r",le="0.005"} 2'
    assert counts[BUCKETS.index(0.25)] == 2
    assert counts[BUCKETS.index(0.5)] == 3
    assert (counts[-2], counts[-1]) == (3, 4)
    assert lines[-2:] == ['h_seconds_sum{route="r"} 1000.306', 'h_seconds_count{route="r"} 4']


def test_a_counter_without_labels_is_there_from_the_start():
    assert exposition(Counter("c_total", "C.")).splitlines()[-1] == "c_total 0"


async def _page(url):
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4"
        return (await response.text()).splitlines()


def test_a_server_counts_requests_images_repeats_and_time():
    async def run():
        async with serving(MeanPixel(), token="secret-token") as url, aiohttp.ClientSession() as session:
            body = encode_request("k", "mean/1", items())
            head = {"Authorization": "Bearer secret-token"}
            for headers, data in ((head, body), (head, body), ({}, body), (head, b"{")):
                await (await session.post(url + "/v1/score", data=data, headers=headers)).read()
            for n in range(3):
                await (await session.get(f"{url}/unknown/{n}")).read()
            lines = await _page(url)
        received = 2 * len(body) + 1
        for line in (
            'nftctl_reward_requests_total{route="/v1/score",status="200"} 2',
            'nftctl_reward_requests_total{route="/v1/score",status="401"} 1',
            'nftctl_reward_requests_total{route="/v1/score",status="400"} 1',
            'nftctl_reward_requests_total{route="other",status="404"} 3',
            "nftctl_reward_scored_requests_total 1",
            "nftctl_reward_repeats_total 1",
            "nftctl_reward_images_total 4",
            f"nftctl_reward_received_bytes_total {received}",
            'nftctl_reward_request_seconds_count{route="/v1/score"} 4',
            "nftctl_reward_scoring_seconds_count 1",
            'nftctl_reward_info{scorer="mean_pixel",revision="mean/1"} 1',
        ):
            assert line in lines
        assert "secret-token" not in "\n".join(lines)

    asyncio.run(run())
