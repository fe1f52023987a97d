"""What the client makes of every fault of a service: the right scores, or one error that says what happened."""

import asyncio
import gc
import json
import math
import re
import socket
import ssl
import subprocess
import sys
import time
import warnings
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest
from fault_server import SCORE_FAULTS, FaultServer
from reward_cases import items

from nftctl.errors import RewardFailed
from nftctl.reward.client import RewardClient, deadline_in
from nftctl.reward.failures import retry_after
from nftctl.reward.protocol import Item, RevisionDiffers

MEANS = [0.0, 0.2, 0.4, 1.0]
SENTINEL = "SENTINEL-4711"
QUICK = {"backoff": 0.005, "connect_timeout": 2.0, "read_timeout": 2.0}


def _values(scores):
    return [round(s.score, 6) for s in scores]


def _ask(server, count=4, deadline=10.0, **options):
    """Score against a fault server; (scores or error, client, server)."""

    async def run():
        async with server, RewardClient(server.url, "fault/1", **QUICK | options) as client:
            try:
                outcome = await client.score(items(count), key="run/1/0/0/0", deadline=deadline_in(deadline))
            except RewardFailed as error:
                outcome = error
        return outcome, client

    return asyncio.run(run())


def _refused(server, says, phase, **options):
    outcome, client = _ask(server, **options)
    assert isinstance(outcome, RewardFailed), outcome
    assert re.search(says, outcome.message), outcome.message
    assert outcome.message.startswith("reward service http://127.0.0.1:")
    attempts = server.requests + server.infos
    assert re.search(rf"\(phase {phase}, \d+\.\d\d s, \d+ attempts?\)$", outcome.message), outcome.message
    assert client.counts.attempts == attempts
    assert client.counts.images == 0
    return outcome


def test_a_sound_service_gives_scores_in_order():
    server = FaultServer()
    scores, client = _ask(server)
    assert _values(scores) == MEANS
    assert [s.id for s in scores] == ["7/0", "7/1", "7/2", "7/3"]
    assert scores[1].components == {"mean": pytest.approx(0.2)}
    counts = client.counts
    assert (counts.requests, counts.attempts, counts.retries, counts.images) == (2, 2, 0, 4)
    assert server.keys == ["run/1/0/0/0"]


def test_raw_images_give_the_same_scores():
    assert _values(_ask(FaultServer(), encoding="raw")[0]) == MEANS


def test_reordered_scores_are_matched_by_id():
    assert _values(_ask(FaultServer("reordered"))[0]) == MEANS


def test_no_items_ask_nothing():
    server = FaultServer()
    assert _ask(server, count=0)[0] == []
    assert server.requests + server.infos == 0


# ---- A20, A21: a reply that is not one finite number per image is refused at once


REPLIES = {
    "short": r"3 scores for 4 images: item '7/3' has no score",
    "long": r"5 scores for 4 images: item 'stranger' was scored but never sent",
    "missing-id": r"id of score 1 is null",
    "missing-score": r"no score for item '7/1'",
    "repeated-id": r"item '7/0' was scored twice",
    "unknown-id": r"item 'stranger' was scored but never sent",
    "item-error": r"item '7/1' holds an error: 'out of memory'",
    "nan": r"item '7/1' is nan, not a finite number",
    "infinity": r"item '7/1' is -inf, not a finite number",
    "huge": r"item '7/1' is inf, not a finite number",
    "null": r"item '7/1' is null, not a number",
    "true": r"item '7/1' is true, not a number",
    "text": r"item '7/1' is '1.0', not a number",
    "component-nan": r"component 'ocr' of item '7/1' is nan",
    "component-text": r"component 'ocr' of item '7/1' is '0.5'",
    "html": r"not JSON .*begins with '<html>Bad gateway",
    "truncated-json": r"not JSON",
    "not-an-object": r"the reply is \[0.1, 0.2\], not an object",
    "error-field": r"the reply holds an error: .*no memory",
}


def test_every_score_fault_has_an_outcome():
    assert set(SCORE_FAULTS) - {"reordered"} <= set(REPLIES)


@pytest.mark.parametrize("fault", REPLIES)
def test_a_reply_that_cannot_be_trusted_is_refused_at_once(fault):
    server = FaultServer(fault)
    _refused(server, REPLIES[fault], "parse")
    assert server.requests == 1


# ---- statuses


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 413, 422])
def test_a_final_status_is_not_tried_again(status):
    server = FaultServer(f"status-{status}")
    _refused(server, rf"HTTP {status}\b", "status")
    assert server.requests == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_passing_status_is_tried_again_to_the_bound(status):
    server = FaultServer(f"status-{status}")
    _refused(server, rf"HTTP {status}: fault-{status}: refused", "status", retries=2)
    assert server.requests == 3
    assert set(server.keys) == {"run/1/0/0/0"}
    assert len(set(server.bodies)) == 1


def test_413_names_the_body_and_the_setting():
    error = _refused(FaultServer("status-413"), r"a body of \d\.\d KiB was too large", "status", max_items=7)
    assert error.hint == "lower reward.max_items_per_request (now 7)"


def test_401_points_at_the_variable():
    assert "token_env" in _refused(FaultServer("status-401"), "token was not accepted", "status").hint


def test_a_wait_beyond_the_deadline_is_not_begun():
    server = FaultServer("status-429", retry_after="3600")
    _refused(server, "asks to wait 3600 s, which is past the deadline", "status")
    assert server.requests == 1


def test_a_wait_inside_the_deadline_is_honoured():
    server = FaultServer("status-429", times=1, retry_after="1")
    started = time.monotonic()
    scores, _ = _ask(server, deadline=30)
    assert _values(scores) == MEANS
    assert time.monotonic() - started >= 1.0


def test_retry_after_is_seconds_or_a_date():
    assert [retry_after(v) for v in ("0", " 7 ", "", "soon", "-1", "²")] == [0.0, 7.0, None, None, None, None]
    assert retry_after(formatdate(time.time() - 60, usegmt=True)) == 0.0
    soon = retry_after(formatdate(time.time() + 60, usegmt=True))
    assert soon is not None
    assert 55 < soon <= 60


# ---- A16, A17, A18: silence and lost connections


def test_a_service_that_never_answers_ends_at_the_read_timeout():
    server = FaultServer("hang")
    _refused(server, r"no answer within the read time-out of 0\.4 s", "read", read_timeout=0.4, retries=1)
    assert server.requests == 2


def test_the_deadline_ends_everything():
    server = FaultServer("hang")
    _refused(server, "the deadline passed while waiting for the answer", "read", read_timeout=30, deadline=0.6)
    assert server.requests == 1


def test_the_deadline_also_ends_the_waiting_between_attempts():
    server = FaultServer("status-500")
    _refused(server, "HTTP 500.*; no time left to try again", "status", backoff=5.0, deadline=0.6)
    assert server.requests == 1


def test_a_deadline_in_the_past_asks_nothing():
    server = FaultServer()
    _refused(server, "the deadline had passed before anything was sent", "connect", deadline=-1)
    assert server.requests + server.infos == 0


def test_silence_before_info_is_noticed_too():
    server = FaultServer("hang", info=True)
    _refused(server, "/v1/info: connected, but silent: no answer", "read", read_timeout=0.05, retries=0)
    assert server.infos == 1


def test_a_slow_answer_is_an_answer():
    assert _values(_ask(FaultServer("slow", seconds=0.1))[0]) == MEANS


@pytest.mark.parametrize("fault", ["reset", "truncated-body"])
def test_lost_connections_are_tried_again_to_the_bound(fault):
    server = FaultServer(fault)
    _refused(server, "the connection was lost before the answer was complete", "read", retries=2)
    assert server.requests == 3


@pytest.mark.parametrize("fault", ["reset", "truncated-body", "status-500", "status-429", "hang"])
def test_one_lost_attempt_is_recovered_and_counted_once(fault):
    server = FaultServer(fault, times=1)
    scores, client = _ask(server, read_timeout=0.8 if fault == "hang" else 5.0)
    assert _values(scores) == MEANS
    assert server.requests == 2
    assert set(server.keys) == {"run/1/0/0/0"}
    assert server.scored == {"7/0": 1, "7/1": 1, "7/2": 1, "7/3": 1}
    assert (client.counts.requests, client.counts.attempts, client.counts.retries) == (2, 3, 1)


def test_stale_connections_do_not_end_a_run():
    server = FaultServer("close-after-reply")

    async def run():
        async with server, RewardClient(server.url, "fault/1", **QUICK) as client:
            for step in range(4):
                scores = await client.score(items(), key=f"run/1/{step}/0/0", deadline=deadline_in(10))
                assert _values(scores) == MEANS

    asyncio.run(run())
    assert sorted(set(server.keys)) == [f"run/1/{step}/0/0" for step in range(4)]


# ---- A23: nobody there


def _unreachable(url, **options):
    async def run():
        async with RewardClient(url, "r", **QUICK | {"retries": 1} | options) as client:
            with pytest.raises(RewardFailed) as caught:
                await client.info(deadline=deadline_in(10))
        assert client.counts.attempts == 1 + client.counts.retries
        return caught.value, client.counts.attempts

    return asyncio.run(run())


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_refused_is_said():
    error, attempts = _unreachable(f"http://127.0.0.1:{_free_port()}")
    assert "the connection was refused, nothing listens there (phase connect" in error.message
    assert attempts == 2


def test_an_unknown_host_is_said():
    error, attempts = _unreachable("http://nobody.invalid:80")
    assert "the host name 'nobody.invalid' cannot be resolved" in error.message
    assert "phase connect" in error.message
    assert attempts == 2


def test_a_tls_failure_is_said_and_final():
    async def run():
        async with FaultServer() as server:
            client = RewardClient(server.url.replace("http:", "https:"), "r", **QUICK)
            with pytest.raises(RewardFailed, match=r"the TLS handshake failed .*phase connect.* 1 attempt\)"):
                await client.info()

    asyncio.run(run())


def _raw_server(handle, client_options=None):
    """Ask for info from a plain socket server; the error."""

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with RewardClient(url, "r", **QUICK | {"retries": 0} | (client_options or {})) as client:
                with pytest.raises(RewardFailed) as caught:
                    await client.info()
        return caught.value.message

    return asyncio.run(run())


def test_something_that_is_not_http_is_said():
    async def handle(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        writer.close()

    assert "the answer is not HTTP" in _raw_server(handle)


def test_an_answer_without_end_is_cut():
    async def handle(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"100000\r\n" + bytes(2**20) + b"\r\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    assert "the answer is larger than 16 MiB" in _raw_server(handle)


def test_a_service_that_stops_reading_ends_at_the_read_timeout():
    info = json.dumps({"protocol": "nftctl-reward/1", "name": "n", "revision": "r", "modalities": ["image"],
                       "components": [], "max_items": 64}).encode()  # fmt: skip
    connections = []

    async def handle(reader, writer):
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(info) + info)
        writer.transport.pause_reading()

    async def run():
        large = Item("a", "p", {}, np.zeros((2000, 4000, 3), np.uint8))
        async with await asyncio.start_server(handle, "127.0.0.1", 0, limit=1024) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            options = QUICK | {"read_timeout": 0.4, "retries": 0, "encoding": "raw"}
            async with RewardClient(url, "r", **options) as client:
                with pytest.raises(RewardFailed, match=r"no answer within the read time-out .*phase read"):
                    await client.score([large], key="k", deadline=deadline_in(20))
            for writer in connections:
                writer.transport.abort()

    asyncio.run(run())


# ---- revisions


def test_another_revision_is_refused_before_anything_is_sent():
    server = FaultServer("wrong-revision", info=True)
    error = _refused(server, r"the service has revision 'swapped/2', the profile pins 'fault/1'", "parse")
    assert isinstance(error, RevisionDiffers)
    assert server.requests == 0


def test_a_provider_swapped_in_mid_run_is_refused_at_once():
    server = FaultServer("wrong-revision", after=3)

    async def run():
        async with server, RewardClient(server.url, "fault/1", **QUICK) as client:
            for step in range(2):
                await client.score(items(), key=f"run/1/{step}/0/0", deadline=deadline_in(10))
            with pytest.raises(RevisionDiffers, match=r"the reply has revision 'swapped/2'"):
                await client.score(items(), key="run/1/2/0/0", deadline=deadline_in(10))
            assert client.counts.images == 8

    asyncio.run(run())
    assert server.requests == 3


def test_an_unpinned_client_may_ask_but_not_score():
    async def run():
        async with FaultServer() as server, RewardClient(server.url, "", **QUICK) as client:
            assert (await client.info(compare=False)).revision == "fault/1"
            with pytest.raises(RewardFailed, match="no revision is pinned"):
                await client.score(items(), key="k", deadline=deadline_in(10))
            with pytest.raises(RevisionDiffers):
                await client.info()

    asyncio.run(run())


# ---- splitting


@pytest.mark.parametrize(
    ("own", "limit", "parts"),
    [(16, 64, [10]), (4, 64, [4, 4, 2]), (16, 3, [3, 3, 3, 1]), (10, 10, [10]), (1, 1, [1] * 10)],
)
def test_requests_are_split_by_the_smaller_limit(own, limit, parts):
    server = FaultServer(max_items=limit)
    scores, client = _ask(server, count=10, max_items=own)
    assert [s.id for s in scores] == [f"7/{n}" for n in range(10)]
    assert _values(scores) == [MEANS[n % 4] for n in range(10)]
    keys = ["run/1/0/0/0"] if len(parts) == 1 else [f"run/1/0/0/0/{n}" for n in range(len(parts))]
    assert sorted(server.keys) == keys
    assert (client.counts.requests, client.counts.images) == (1 + len(parts), 10)


def test_one_failed_part_fails_the_call():
    outcome, client = _ask(FaultServer("nan", after=2), max_items=2)
    assert isinstance(outcome, RewardFailed)
    assert re.search("item '7/[13]' is nan", outcome.message)
    assert client.counts.images == 2


# ---- A24, A27: loops and sessions


def test_one_client_serves_successive_event_loops():
    port = _free_port()
    client = RewardClient(f"http://127.0.0.1:{port}", "fault/1", **QUICK)

    async def bare(step):
        async with FaultServer(port=port):
            return await client.score(items(), key=f"k/{step}", deadline=deadline_in(10))

    async def entered(step):
        async with FaultServer(port=port), client:
            return await client.score(items(), key=f"k/{step}", deadline=deadline_in(10))

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for step, call in enumerate((bare, bare, entered, entered, bare)):
            assert _values(asyncio.run(call(step))) == MEANS
        gc.collect()
    assert (client.counts.images, client.counts.retries) == (20, 0)


def test_a_client_entered_on_one_loop_works_on_another():
    async def run():
        async with FaultServer() as server, RewardClient(server.url, "fault/1", **QUICK) as client:

            def elsewhere():
                return asyncio.run(client.score(items(), key="k", deadline=deadline_in(10)))

            assert _values(await asyncio.to_thread(elsewhere)) == MEANS
            with pytest.raises(RuntimeError, match="entered already"):
                await client.__aenter__()
            assert _values(await client.score(items(), key="k", deadline=deadline_in(10))) == MEANS

    asyncio.run(run())


CLEAN = """
import asyncio, sys
import numpy as np
from nftctl.errors import RewardFailed
from nftctl.reward.client import RewardClient, deadline_in
from nftctl.reward.protocol import Item
image = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
client = RewardClient(sys.argv[1], "fault/1", backoff=0.005, retries=1)
try:
    print(len(asyncio.run(client.score([Item("a", "p", {}, image)], key="k", deadline=deadline_in(20)))))
except RewardFailed as error:
    print(error.message)
"""


@pytest.mark.parametrize(
    ("fault", "says"), [("none", "1"), ("reset", "lost"), ("html", "not JSON"), ("status-401", "401")]
)
def test_no_warning_about_resources_on_any_path(fault, says):
    folder = Path(__file__).parent
    command = [sys.executable, str(folder / "fault_server.py"), "--fault", fault]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            strict = [sys.executable, "-W", "error", "-c", CLEAN, url]
            ran = subprocess.run(strict, capture_output=True, text=True, timeout=60)
        finally:
            server.terminate()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert says in ran.stdout


# ---- proxies and secrets


def test_loopback_never_goes_through_a_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{_free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert _values(_ask(FaultServer())[0]) == MEANS


def test_the_token_travels_in_the_header_only():
    server = FaultServer(token=SENTINEL)
    scores, client = _ask(server, token=SENTINEL)
    assert _values(scores) == MEANS
    assert SENTINEL not in repr(client)
    assert SENTINEL.encode() not in b"".join(server.bodies)


@pytest.mark.parametrize(
    "fault", ["hang", "reset", "html", "status-302", "status-400", "status-401", "status-500", "nan", "wrong-revision"]
)
def test_the_token_is_in_no_message(fault, caplog):
    with caplog.at_level("DEBUG"):
        outcome, client = _ask(FaultServer(fault), token=SENTINEL, read_timeout=0.05, retries=1)
    assert isinstance(outcome, RewardFailed)
    seen = [outcome.message, outcome.hint, repr(outcome), str(outcome), repr(client), caplog.text]
    assert outcome.__cause__ is None
    assert not [s for s in seen if SENTINEL in s]


def test_an_echoed_token_is_blotted_out():
    outcome, _ = _ask(FaultServer("status-401"), token=SENTINEL)
    assert "refused Bearer ***" in outcome.message
    long = "SENTINEL" * 60
    outcome, _ = _ask(FaultServer("status-401"), token=long)
    assert "SENTINEL" not in outcome.message


@pytest.mark.parametrize("token", [f"{SENTINEL}\r\nX: y", f"{SENTINEL} ", f"{SENTINEL}ä"])
def test_a_token_that_cannot_be_a_header_is_refused_unseen(token):
    with pytest.raises(RewardFailed, match="cannot travel in a header") as caught:
        RewardClient("http://127.0.0.1:1", "r", token)
    assert SENTINEL not in str(caught.value)


@pytest.mark.parametrize(
    "url", [f"http://me:{SENTINEL}@h", f"http://h/?t={SENTINEL}", f"http://h/#{SENTINEL}", f"me:{SENTINEL}@h"]
)
def test_a_url_with_a_secret_is_refused_unseen(url):
    with pytest.raises(RewardFailed, match="carries credentials, a query or a fragment") as caught:
        RewardClient(url, "r")
    assert SENTINEL not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://h", "http://", "http://h:99999", "/v1"])
def test_a_url_must_be_http(url):
    with pytest.raises(RewardFailed, match="not of the form http://HOST:PORT"):
        RewardClient(url, "r")


@pytest.mark.parametrize("path", ["", "/", "/reward", "/reward/"])
def test_a_base_path_is_kept(path):
    error, _ = _unreachable(f"http://127.0.0.1:{_free_port()}{path}", retries=0)
    assert re.search(rf"http://127\.0\.0\.1:\d+{path.rstrip('/')}/v1/info: ", error.message)


def test_a_certificate_nobody_signed_is_refused(tmp_path):
    certificate, key = _self_signed(tmp_path)

    async def run():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with RewardClient(url, "r", **QUICK) as client:
                with pytest.raises(RewardFailed, match=r"the TLS handshake failed .*(?i:certificate).* 1 attempt\)"):
                    await client.info()

    asyncio.run(run())


def _self_signed(folder):
    certificate, key = folder / "c.pem", folder / "k.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no openssl command to make a certificate with")
    return certificate, key


def test_seconds_are_seconds():
    assert math.isclose(deadline_in(5) - time.monotonic(), 5, abs_tol=0.5)
