"""`reward-serve` and `reward-ping`, against each other over a real loopback socket, and against what can go wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
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

from nftctl.cli.ping import _lines
from nftctl.cli.probe import _item, suited
from nftctl.profile.schema import Reward
from nftctl.reward.mixture import load_mixture
from nftctl.reward.scorers import scorer_revision
from tests.interop.cosmos_server import CosmosServer
from tests.reward.fault_server import FaultServer
from tests.roles.samples import running

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
    latency = service["latency_ms"]
    assert set(latency) == {"count", "p50", "p95", "max"}
    assert latency["count"] == 3
    assert 0 < latency["p50"] <= latency["p95"] <= latency["max"]
    assert service["load"] is None
    assert 0.0 <= service["toy"]["score"] <= 1.0
    assert set(service["toy"]["components"]) == set(service["components"]) == {"digit", "colour", "strict", "judge"}
    health = json.loads(urllib.request.urlopen(f"{url}/healthz", timeout=10).read())
    assert health["images"] == 1


def test_an_unpinned_service_says_what_it_serves(tmp_path: Path, url: str) -> None:
    answer = nftctl("reward-ping", "--url", url, cwd=tmp_path, env={"NFTCTL_REWARD_TOKEN": TOKEN})
    assert answer.returncode == 0
    assert "r1 (not pinned)" in answer.stdout


@pytest.mark.parametrize(("score", "shown"), [(4.89e-57, "0.0000"), (0.98765, "0.9877"), (-12.5, "-12.5000")])
def test_a_score_is_shown_to_four_decimals(score: float, shown: str) -> None:
    answer = {
        "ok": True, "name": "a", "url": "u", "service": "s", "protocol": "p", "load": None,
        "revision": {"pinned": "r", "served": "r"}, "toy": {"prompt": "x", "score": score},
        "latency_ms": {"p50": 1, "p95": 1, "max": 1, "count": 1},
    }  # fmt: skip
    assert _lines(answer, Reward())[-1].split() == ["toy", "image", "score", shown, "for", "'x'"]


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


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
        return port


def test_failures_are_told_apart(tmp_path: Path, silent: int, broken: int) -> None:
    cases = {
        f"http://127.0.0.1:{closed_port()}": "the connection was refused.*phase connect",
        "http://no-such-host.invalid": "cannot be resolved.*phase connect",
        f"https://127.0.0.1:{broken}": "the TLS handshake failed.*phase connect",
        f"http://127.0.0.1:{silent}": r"no answer within the read time-out of 0\.5 s.*phase read",
        f"http://127.0.0.1:{broken}": "HTTP 503.*phase status",
    }
    said = {}
    for address, words in cases.items():
        answer = nftctl("reward-ping", "--url", address, "--timeout", "0.5", cwd=tmp_path)
        assert answer.returncode == 4
        assert re.search(rf"error: .*{re.escape(address)}/v1/info: .*{words}, \d+\.\d\d s", answer.stderr), (
            answer.stderr
        )
        said[address] = answer.stderr
    assert len(set(said.values())) == len(cases)


def profile_of(folder: Path, *urls: str, extra: str = "") -> Path:
    path = folder / "asked.toml"
    providers = [
        f'[[reward.providers]]\nname = "p{n}"\nurl = "{url}"\nrevision = "fault/1"\n' for n, url in enumerate(urls)
    ]
    path.write_text(f'extends = "tiny_t2i_cpu"\n{extra}\n' + "".join(providers))
    return path


def test_every_provider_is_asked_also_when_one_has_failed(tmp_path: Path) -> None:
    with running(FaultServer()) as sound, running(FaultServer("wrong-revision", info=True)) as other:
        gone = f"http://127.0.0.1:{closed_port()}"
        profile = profile_of(tmp_path, gone, sound.url, other.url)
        answer = nftctl("reward-ping", profile, cwd=tmp_path)
        document = the_object(nftctl("reward-ping", profile, "--json", cwd=tmp_path))
    assert answer.returncode == document["exit_code"] == 4
    assert "p0: failed\n" in answer.stdout
    assert "fault/1 (as pinned)" in answer.stdout
    assert "p2: failed\n" in answer.stdout
    assert [line.split(":")[0] for line in answer.stderr.splitlines() if "reward" in line].count("error") == 2
    assert [service["ok"] for service in document["services"]] == [False, True, False]
    assert "refused" in document["services"][0]["error"]["message"]
    assert "'fault/1' is pinned, 'swapped/2' is served" in document["services"][2]["error"]["message"]
    assert document["error"] == document["services"][0]["error"]


@pytest.mark.parametrize("fault", ["unknown-id", "short", "html", "nan", "status-413", "wrong-revision"])
def test_a_service_that_cannot_score_is_found_out_before_a_run(tmp_path: Path, fault: str) -> None:
    with running(FaultServer(fault)) as server:
        arguments = ("reward-ping", "--url", server.url, "--revision", "fault/1", "--load")
        answer = nftctl(*arguments, cwd=tmp_path)
    assert answer.returncode == 4
    assert f"{server.url}/v1/score: " in answer.stderr
    assert "Traceback" not in answer.stderr


def test_load_is_a_steps_images_from_all_ranks(tmp_path: Path) -> None:
    changes = "[data]\nrows_per_step = 3\n[reward]\nmax_items_per_request = 2\ndeadline_s = 7.0"
    with running(FaultServer()) as server:
        profile = profile_of(tmp_path, server.url, extra=changes)
        (service,) = the_object(nftctl("reward-ping", profile, "--load", "--json", cwd=tmp_path))["services"]
        # One toy image; then four ranks with three images each, two in a request.
        assert server.requests == 1 + 4 * 2
        assert sum(len(json.loads(body)["items"]) for body in server.bodies) == 13
        answer = nftctl("reward-ping", profile, "--load", cwd=tmp_path)
    load = service["load"]
    assert (load["images"], load["ranks"], load["width"], load["height"]) == (12, 4, 8, 8)
    assert load["images_per_second"] > 0
    assert re.search(r"12 images of 8x8 from 4 ranks in .* images/s; the deadline is 7 s", answer.stdout)


def test_waiting_is_for_a_service_that_is_not_up_yet(tmp_path: Path) -> None:
    port = closed_port()
    command = [sys.executable, "-m", "nftctl", "reward-ping", "--url", f"http://127.0.0.1:{port}", "--wait", "60"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    with running(FaultServer(port=port)):
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    answer = nftctl("reward-ping", "--url", f"http://127.0.0.1:{port}", "--wait", "0.5", cwd=tmp_path)
    assert answer.returncode == 4
    assert "refused" in answer.stderr


def test_waiting_does_not_help_a_wrong_token(tmp_path: Path, url: str) -> None:
    # It would take ten minutes; the answer comes at once, because no time can change it.
    answer = nftctl("reward-ping", "--url", url, "--wait", "600", cwd=tmp_path)
    assert answer.returncode == 4
    assert "HTTP 401" in answer.stderr


def test_a_cosmos_service_is_asked_in_its_own_words(tmp_path: Path) -> None:
    with running(CosmosServer(token=TOKEN)) as server:
        arguments = ("reward-ping", "--url", server.url, "--protocol", "cosmos-rl")
        env = {"NFTCTL_REWARD_TOKEN": TOKEN}
        channels = (*arguments, "--reward-fn", "channels", "--score-key", "red+blue", "--count", "2", "--load")
        answer = nftctl(*channels, cwd=tmp_path, env=env)
        assert answer.returncode == 0, answer.stderr
        assert "not pinned (declared by the profile; the protocol has none)" in answer.stdout
        assert len(server.shapes) == 5
        (service,) = the_object(nftctl(*channels, "--json", cwd=tmp_path, env=env))["services"]
        assert service["revision"] == {"pinned": None, "served": None}
        assert service["toy"]["score"] == pytest.approx(sum(service["toy"]["components"].values()))
        wrong = nftctl(*arguments, "--reward-fn", "brightness", "--score-key", "hps", cwd=tmp_path, env=env)
        assert wrong.returncode == 4
        assert "there are: brightness, word" in wrong.stderr
        assert TOKEN not in answer.stdout + answer.stderr + wrong.stderr
        assert nftctl(*arguments, cwd=tmp_path).returncode == 2
        assert nftctl("reward-ping", "--url", server.url, "--reward-fn", "a", cwd=tmp_path).returncode == 2
        assert nftctl("reward-ping", "--url", server.url, "--protocol", "grpc", cwd=tmp_path).returncode == 2
        assert nftctl("reward-ping", "--protocol", "cosmos-rl", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("path", ["sound", "silent"])
def test_no_warning_about_resources(tmp_path: Path, silent: int, path: str) -> None:
    with running(FaultServer()) as server:
        address = server.url if path == "sound" else f"http://127.0.0.1:{silent}"
        command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-m", "nftctl", "reward-ping"]
        ran = subprocess.run(
            [*command, "--url", address, "--timeout", "0.5", "--load"], cwd=tmp_path, env=environment(),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ran.returncode == (0 if path == "sound" else 4)
    assert "ResourceWarning" not in ran.stderr
    assert "Unclosed" not in ran.stderr


def test_who_judges_evaluations_is_asked_too_and_nobody_twice(tmp_path: Path) -> None:
    """A judge that is the training's own service under another name and weight, another one, and one that is away."""
    away = f"http://127.0.0.1:{closed_port()}"
    with running(FaultServer()) as shared, running(FaultServer()) as judge:
        profile = profile_of(tmp_path, shared.url, shared.url)
        for name, url in (("same", shared.url), ("judge", judge.url), ("away", away)):
            with profile.open("a") as file:
                file.write(f'[[eval.providers]]\nname = "{name}"\nurl = "{url}"\nrevision = "fault/1"\nweight = 0.5\n')
        answer = nftctl("reward-ping", profile, cwd=tmp_path)
        assert (shared.requests, judge.requests) == (2, 1)
        document = the_object(nftctl("reward-ping", profile, "--json", cwd=tmp_path))
        assert json.loads(judge.bodies[-1])["items"][0]["prompt"] == "a red zero"  # the first held-out one
    assert document["exit_code"] == answer.returncode == 4
    assert [(service["name"], service["sections"]) for service in document["services"]] == [
        ("p0", ["reward", "eval"]), ("p1", ["reward"]), ("judge", ["eval"]), ("away", ["eval"]),
    ]  # fmt: skip
    said = [line.split(maxsplit=2)[2] for line in answer.stdout.splitlines() if line.startswith("  asked by")]
    assert said == ["training and evaluations", "training", "evaluations"]
    assert "away (evaluations): failed\n" in answer.stdout
    unasked = nftctl("reward-ping", profile, cwd=tmp_path, env={"NFTCTL_EVAL__PROMPT_FILE": ""})
    assert "evaluations" not in unasked.stdout


def test_an_embedded_scorer_is_started_to_be_asked(tmp_path: Path) -> None:
    answer = nftctl("reward-ping", "tiny_t2i_cpu", "--count", "2", cwd=tmp_path)
    assert answer.returncode == 0
    assert "embedded, a run starts tiny_digits itself" in answer.stderr
    (service,) = the_object(nftctl("reward-ping", "tiny_t2i_cpu", "--json", cwd=tmp_path))["services"]
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


def test_the_command_that_a_service_prints_can_be_pasted(tmp_path: Path) -> None:
    # It scores pictures of 32 x 32 alone, and prompts about shapes alone.
    command = [sys.executable, "-m", "nftctl", "reward-serve", "--scorer", "scenes", "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        printed = shlex.split(process.stderr.readline().partition(": ")[2])
        assert printed[:2] == ["nftctl", "reward-ping"]
        answer = nftctl(*printed[1:], "--count", "1", "--load", cwd=tmp_path)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert answer.returncode == 0, answer.stderr
    assert "for 'a red circle'" in answer.stdout
    assert "images of 32x32 from 4 ranks" in answer.stdout


@pytest.mark.parametrize(
    "scorers",
    [
        ("tiny_digits",), ("brightness",), ("jpeg_compressibility",), ("colour_shape",), ("scenes",),
        ("colour_shape", "jpeg_compressibility=0.001"), ("brightness", "scenes=0.5"), ("colour_shape", "scenes"),
    ],
)  # fmt: skip
def test_every_packaged_scorer_is_sent_what_it_scores(scorers: tuple[str, ...]) -> None:
    mixture = load_mixture(scorers)
    item = _item(suited(mixture.name), 0, noise=0.0)
    ((score, _),) = mixture.score([item.image], [item.prompt], [{}])
    assert isinstance(score, float)


def test_an_unknown_service_is_sent_a_digits_picture() -> None:
    assert (suited("my own").prompt, suited("").height) == ("a red seven", 8)
    assert '"' in suited("0.5 ocr").prompt  # ocr reads what stands in quotation marks


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
