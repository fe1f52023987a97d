"""`reward-serve` with workers: requests that overlap, workers that die, and what stays behind (nothing)."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from reward_cases import items

from nftctl.errors import RewardFailed
from nftctl.reward.client import RewardClient, deadline_in
from nftctl.reward.mixture import load_mixture
from nftctl.reward.pool import ProcessPool, Served

SCORER = """
import os, time
from pathlib import Path
LOG = Path(__file__).with_name("log.txt")

def note(word):
    with LOG.open("a") as log:
        log.write(f"{word} {os.getpid()}\\n")

def meeting(images, prompts, metadata):
    "Sleeps until a second request is being scored; gives up after a while."
    note("begin")
    for _ in range(400):
        if LOG.read_text().count("begin") >= 2:
            break
        time.sleep(0.05)
    note("end")
    return [0.5] * len(images)

def level(images, prompts, metadata):
    return [float(i.mean()) for i in images]

def deadly(images, prompts, metadata):
    "Takes its process with it, the first time."
    note("begin")
    if LOG.read_text().count("begin") == 1:
        os._exit(3)
    return [0.25] * len(images)

def endless(images, prompts, metadata):
    note("begin")
    time.sleep(3600)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SCORER)
    return tmp_path / "mine.py"


def _log(mine):
    log = mine.with_name("log.txt")
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def _workers(pid):
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _end(pids):
    """Whether none of `pids` runs any more, within ten seconds."""
    for _ in range(200):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@contextmanager
def served(*arguments, **env):
    """`nftctl reward-serve` as a process; (process, url)."""
    command = [sys.executable, "-m", "nftctl", "reward-serve", "--port", "0", "--revision", "r1", *arguments]
    with _started(command, **env) as running:
        yield running


@contextmanager
def _started(command, **env):
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on "), line
            yield process, line.removeprefix("listening on ").strip()
        finally:
            process.kill()


async def _two(url, **options):
    """Two clients at once."""

    async def one(name):
        async with RewardClient(url, "r1", **options) as client:
            return [s.score for s in await client.score(items(2), key=name, deadline=deadline_in(60))]

    return await asyncio.gather(one("a"), one("b"))


def test_requests_of_two_clients_overlap_and_the_end_is_graceful(mine):
    with served("--scorer", f"{mine}:meeting", "--workers", "2") as (process, url):
        assert asyncio.run(_two(url)) == [[0.5, 0.5]] * 2
        # Neither had ended before the other began.
        assert _log(mine) == ["begin", "begin", "end", "end"]
        pids = {line.split()[1] for line in mine.with_name("log.txt").read_text().splitlines()}
        assert len(pids) == 2
        assert str(process.pid) not in pids
        workers = _workers(process.pid)
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        assert "\nnftctl_reward_images_total 4\n" in metrics
        assert "\nnftctl_reward_busy 0\n" in metrics
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
        assert _end(workers)


def test_a_worker_that_dies_costs_one_answer_and_no_worker_outlives_a_killed_server(mine):
    with served("--scorer", f"{mine}:deadly", "--workers", "2") as (process, url):

        async def run():
            async with RewardClient(url, "r1", retries=0) as client:
                with pytest.raises(RewardFailed, match="HTTP 500: worker-died"):
                    await client.score(items(2), key="a", deadline=deadline_in(60))
                return await client.score(items(2), key="a", deadline=deadline_in(60))

        assert [s.score for s in asyncio.run(run())] == [0.25, 0.25]
        workers = _workers(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.wait(20)
        assert _end(workers)


IMPATIENT = """
from nftctl.reward import server
server.STOP_GRACE_S = 0.1
server.serve([{spec!r}], revision="r1", workers=2, ready=lambda url: print("listening on", url, flush=True))
"""


def test_a_worker_that_hangs_cannot_keep_the_server(mine):
    with _started([sys.executable, "-c", IMPATIENT.format(spec=f"{mine}:endless")]) as (process, url):

        def ask():
            with pytest.raises(RewardFailed):
                asyncio.run(RewardClient(url, "r1", retries=0).score(items(), key="k", deadline=deadline_in(60)))

        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(400):
            if _log(mine):
                break
            time.sleep(0.05)
        workers = _workers(process.pid)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
        assert _end(workers)
        asking.join(30)
        assert not asking.is_alive()


def test_threads_and_processes_say_the_same(mine):
    spec = (f"{mine}:level", "brightness=0.5")
    pool = ProcessPool(Served(spec, "", 64, ""), 2)
    try:
        mixture = load_mixture(spec)
        assert pool.info.revision == mixture.revision()
        assert (pool.names, pool.info.components) == (mixture.names, mixture.components)
    finally:
        pool.close()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_scorers_that_cannot_be_loaded_are_said_before_anything_listens(mine, workers):
    command = [sys.executable, "-m", "nftctl", "reward-serve", "--port", "0", "--workers", workers]
    shown = subprocess.run([*command, "--scorer", f"{mine}:nope"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (4, "")
    assert "has no function 'nope'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_token_is_in_no_output_and_no_command_line(mine):
    token = "sentinel-71c0ffee"
    mine.write_text(mine.read_text() + f"\ndef leaky(i, p, m): raise ValueError('{token[:8]}' + '{token[8:]}')\n")
    with served("--scorer", f"{mine}:leaky", "--workers", "2", NFTCTL_REWARD_TOKEN=token) as (process, url):

        async def run():
            async with RewardClient(url, "r1", token=token, retries=0) as client:
                await client.score(items(2), key="a", deadline=deadline_in(60))

        with pytest.raises(RewardFailed, match=r"HTTP 500: scorer-failed: ValueError: \*\*\*"):
            asyncio.run(run())
        for pid in (process.pid, *_workers(process.pid)):
            assert token not in Path(f"/proc/{pid}/cmdline").read_text()
        for path in ("/healthz", "/metrics"):
            assert token not in urllib.request.urlopen(url + path, timeout=10).read().decode()
        health = json.loads(urllib.request.urlopen(url + "/healthz", timeout=10).read())
        assert (health["status"], health["requests"]) == ("ok", 0)
