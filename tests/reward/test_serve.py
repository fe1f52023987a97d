"""`serve` as a process: where it listens, how it stops, and that it never outlives its parent."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from reward_cases import items

from nftctl.errors import RewardFailed
from nftctl.reward.client import RewardClient, deadline_in
from nftctl.reward.scorers import scorer_revision
from nftctl.reward.server import serve

SERVE = "from nftctl.reward.server import serve; serve({args}, ready=lambda url: print(url, flush=True))"
SLOW = """
import time
from nftctl.reward import scorers, server
from nftctl.reward.scorers.brightness import Brightness
class Slow(Brightness):
    def score(self, images, prompts, metadata):
        print("begun", flush=True)
        time.sleep({seconds})
        return super().score(images, prompts, metadata)
scorers.SCORERS["slow"] = Slow
server.STOP_GRACE_S = {grace}
server.serve(["slow"], revision="slow/1", ready=lambda url: print(url, flush=True))
"""


@contextlib.contextmanager
def _process(code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python process that serves, and its URL."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def _gone(url: str) -> bool:
    """Nothing listens at `url` any more, within ten seconds."""
    parts = urlsplit(url)
    for _ in range(200):
        try:
            socket.create_connection((parts.hostname, parts.port), 1).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.05)
    return False


def _score(url: str, revision: str) -> list[float]:
    client = RewardClient(url, revision)
    return [s.score for s in asyncio.run(client.score(items(), key="k", deadline=deadline_in(30)))]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_on_loopback_until_it_is_told_to_stop(number):
    with _process(SERVE.format(args="['brightness']")) as (process, url):
        assert urlsplit(url).hostname == "127.0.0.1"
        assert _score(url, scorer_revision("brightness")) == pytest.approx([0, 0.2, 0.4, 1])
        process.send_signal(number)
        assert process.wait(20) == 0
    assert _gone(url)


def test_with_a_parent_it_outlives_a_sigterm_that_went_to_all_and_stops_when_the_parent_asks():
    with _process(SERVE.format(args=f"['brightness'], parent_pid={os.getpid()}")) as (process, url):
        process.send_signal(signal.SIGTERM)
        for _ in range(3):
            assert _score(url, scorer_revision("brightness")) == pytest.approx([0, 0.2, 0.4, 1])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert _gone(url)


def test_a_request_in_flight_is_answered_before_it_stops():
    with _process(SLOW.format(seconds=0.5, grace=20)) as (process, url):
        got: list[list[float]] = []
        asking = threading.Thread(target=lambda: got.append(_score(url, "slow/1")))
        asking.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        asking.join(30)
        assert got == [pytest.approx([0, 0.2, 0.4, 1])]
        assert process.wait(20) == 0


def test_a_scorer_that_hangs_cannot_keep_the_process():
    with _process(SLOW.format(seconds=3600, grace=0.1)) as (process, url):

        def ask():
            with pytest.raises(RewardFailed):
                asyncio.run(RewardClient(url, "slow/1", retries=0).score(items(), key="k", deadline=deadline_in(20)))

        asking = threading.Thread(target=ask)
        asking.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        asking.join(30)
        assert not asking.is_alive()


def test_it_ends_with_its_parent():
    child = SERVE.format(args="['brightness'], parent_pid=int(sys.argv[1])")
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import sys; ' + {child!r}, str(os.getpid())])\n"
        "time.sleep(3600)"
    )
    with _process(parent) as (process, url):
        assert _score(url, scorer_revision("brightness"))
        process.kill()
        process.wait(20)
        assert _gone(url)


def test_it_ends_at_once_when_the_parent_is_gone_already():
    with _process(SERVE.format(args=f"['brightness'], parent_pid={os.getpid() + 2**20}")) as (process, _):
        assert process.wait(20) == 0


def test_an_address_in_use_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RewardFailed, match=rf"cannot listen on 127\.0\.0\.1:{port}: "):
            serve(["brightness"], port=port)


def test_an_unknown_scorer_is_said():
    with pytest.raises(RewardFailed, match="no scorer 'nope'"):
        serve(["nope"])
