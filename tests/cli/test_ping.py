"""`reward-serve` and `reward-ping`, against each other over a real loopback socket, and against what can go wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nftctl.reward.scorers import scorer_revision

from .program import environment, nftctl, python, the_object

TOKEN = "sentinel-0f9e8d7c"


@contextmanager
def served(folder: Path, *arguments: str, **env: str) -> Iterator[str]:
    """A running `reward-serve`; yields its URL and expects a clean end."""
    command = [sys.executable, "-m", "nftctl", "reward-serve", "--scorer", "tiny_digits", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=folder, env=environment(env), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        yield line.removeprefix("listening on ").strip()
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("served"), "--revision", "r1", NFTCTL_REWARD_TOKEN=TOKEN) as address:
        yield address


def test_a_service_is_timed_compared_and_lets_an_image_be_scored(tmp_path: Path, url: str) -> None:
    arguments = ("reward-ping", "--url", url, "--revision", "r1", "--count", "3")
    answer = nftctl(*arguments, "--json", cwd=tmp_path, env={"NFTCTL_REWARD_TOKEN": TOKEN})
    (service,) = the_object(answer)["services"]
    assert service["revision"] == {"pinned": "r1", "served": "r1"}
    assert service["service"] == "tiny_digits"
    assert set(service["latency_ms"]) == {"count", "p50", "max"}
    assert service["latency_ms"]["count"] == 3
    assert 0.0 <= service["toy"]["score"] <= 1.0
    assert set(service["toy"]["components"]) == set(service["components"]) == {"digit", "colour", "strict", "judge"}
    health = json.loads(urllib.request.urlopen(f"{url}/healthz", timeout=10).read())
    assert health["images"] == 1


def test_an_unpinned_service_says_what_it_serves(tmp_path: Path, url: str) -> None:
    answer = nftctl("reward-ping", "--url", url, cwd=tmp_path, env={"NFTCTL_REWARD_TOKEN": TOKEN})
    assert answer.returncode == 0
    assert "r1 (not pinned)" in answer.stdout


def test_another_revision_is_the_exact_mismatch(tmp_path: Path, url: str) -> None:
    arguments = ("reward-ping", "--url", url, "--revision", "r2")
    answer = nftctl(*arguments, cwd=tmp_path, env={"NFTCTL_REWARD_TOKEN": TOKEN})
    assert answer.returncode == 4
    assert f"at {url}: revision 'r2' is pinned, 'r1' is served" in answer.stderr


@pytest.mark.parametrize("token", ["", "wrong-token"])
def test_a_missing_or_wrong_token_is_a_status_and_never_shown(tmp_path: Path, url: str, token: str) -> None:
    answer = nftctl("reward-ping", "--url", url, cwd=tmp_path, env={"NFTCTL_REWARD_TOKEN": token})
    assert answer.returncode == 4
    assert "HTTP 401" in answer.stderr
    assert TOKEN not in answer.stderr + answer.stdout
    assert "wrong-token" not in answer.stderr + answer.stdout


def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield server.getsockname()[1]


silent = pytest.fixture(silent_port)


@pytest.fixture
def broken() -> Iterator[int]:
    """A web server that answers everything with 503."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503, "resting")

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_failures_are_told_apart(tmp_path: Path, silent: int, broken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    cases = {
        f"http://127.0.0.1:{closed}": "refused",
        "http://no-such-host.invalid": "cannot be resolved",
        f"http://127.0.0.1:{silent}": "time",
        f"http://127.0.0.1:{broken}": "HTTP 503",
    }
    said = {}
    for address in cases:
        answer = nftctl("reward-ping", "--url", address, "--timeout", "0.5", cwd=tmp_path)
        assert answer.returncode == 4
        assert address in answer.stderr
        said[address] = answer.stderr
    assert [words in said[address] for address, words in cases.items()] == [True] * len(cases), said
    assert len(set(said.values())) == len(cases)


def test_an_embedded_scorer_is_started_to_be_asked(tmp_path: Path) -> None:
    answer = nftctl("reward-ping", "--count", "2", cwd=tmp_path)
    assert answer.returncode == 0
    assert "embedded, a run starts tiny_digits itself" in answer.stderr
    (service,) = the_object(nftctl("reward-ping", "--json", cwd=tmp_path))["services"]
    assert service["embedded"] is True
    assert service["revision"]["served"] == scorer_revision("tiny_digits")


def test_only_the_reward_section_has_to_be_right(tmp_path: Path, url: str) -> None:
    env = {
        "NFTCTL_REWARD_TOKEN": TOKEN,
        "NFTCTL_REWARD__PROVIDERS__0__URL": url,
        "NFTCTL_REWARD__PROVIDERS__0__REVISION": "r2",
    }
    answer = nftctl("reward-ping", "cosmos3_nft_t2i_public", cwd=tmp_path, env=env)
    assert answer.returncode == 4
    assert "'r2' is pinned, 'r1' is served" in answer.stderr
    del env["NFTCTL_REWARD__PROVIDERS__0__REVISION"]
    answer = nftctl("reward-ping", "cosmos3_nft_t2i_public", cwd=tmp_path, env=env)
    assert answer.returncode == 3
    assert "reward-revision-missing" in answer.stderr
    assert "init-from-missing" not in answer.stderr


def test_serving_fails_with_words(tmp_path: Path) -> None:
    answer = nftctl("reward-serve", "--scorer", "nobody", cwd=tmp_path)
    assert answer.returncode == 4
    assert "tiny_digits" in answer.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = nftctl("reward-serve", "--scorer", "tiny_digits", "--port", port, cwd=tmp_path)
    assert answer.returncode == 4
    assert port in answer.stderr


PARENT = """
import os, subprocess, sys
command = [sys.executable, "-m", "nftctl", "reward-serve", "--scorer", "tiny_digits", "--port", "0"]
child = subprocess.Popen([*command, "--parent-pid", str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().split()[-1], child.pid, flush=True)
os._exit(0)
"""


def test_a_service_does_not_outlive_its_run(tmp_path: Path) -> None:
    answer = python(PARENT, cwd=tmp_path)
    pid = int(answer.stdout.split()[1])
    # The watch polls; waiting for the process itself needs no guess about how often.
    deadline = threading.Event()
    for _ in range(600):
        if not alive(pid):
            break
        deadline.wait(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    os.kill(pid, 0)
    return state != "Z"
