"""The client of Ray's job server, against one that answers as Ray's does; and the command that a job runs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nftctl.errors import EnvironmentUnfit, NftctlError, UsageRefused
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.submit.portable import profile_text
from nftctl.submit.ray_jobs import JobServer, entrypoint, find_address, find_token, request

from .job_server import FakeJobs, serving
from .stubs import Stubs, shellcheck


@pytest.fixture
def fake() -> Iterator[FakeJobs]:
    with serving(FakeJobs()) as running:
        yield running


def ask(fake: FakeJobs, question: Callable[[JobServer], Awaitable[Any]], **env: str) -> Any:
    async def go() -> Any:
        async with JobServer(fake.address, {"HOME": "/nowhere", **env}) as server:
            return await question(server)

    return asyncio.run(go())


def test_a_job_is_handed_over_looked_at_and_stopped(fake: FakeJobs) -> None:
    body = request("exec nftctl", "first", 120)
    id = ask(fake, lambda server: server.submit(body))
    assert fake.bodies == [
        {
            "entrypoint": "exec nftctl",
            "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}},
            "metadata": {"job_name": "first"},
        }
    ]
    job = ask(fake, lambda server: server.status(id))
    assert (job.id, job.status, job.run, job.exit_code, job.has_ended) == (id, "PENDING", "first", None, False)
    assert ask(fake, lambda server: server.stop(id)) is True
    assert ask(fake, lambda server: server.stop(id)) is False
    assert ask(fake, lambda server: server.status(id)).has_ended
    assert ask(fake, lambda server: server.logs(id)) == "one\ntwo\n"


def test_following_ends_with_the_log(fake: FakeJobs) -> None:
    fake.add("j")

    async def follow(server: JobServer) -> list[str]:
        return [text async for text in server.follow("j")]

    assert ask(fake, follow) == ["one\n", "two\n"]


def test_a_token_goes_only_where_one_is_asked_for(fake: FakeJobs) -> None:
    fake.add("j")
    ask(fake, lambda server: server.status("j"), RAY_AUTH_TOKEN="secret")
    assert {said for _, _, said in fake.asked} == {None}
    fake.token, fake.asked = "secret", []
    ask(fake, lambda server: server.status("j"), RAY_AUTH_TOKEN="secret")
    assert fake.asked == [
        ("GET", "/api/authentication_mode", None),
        ("GET", "/api/version", "Bearer secret"),
        ("GET", "/api/jobs/j", "Bearer secret"),
    ]


def test_a_ray_from_before_tokens_is_asked_without_one(fake: FakeJobs) -> None:
    fake.add("j")
    fake.knows_modes = False
    assert ask(fake, lambda server: server.status("j"), RAY_AUTH_TOKEN="secret").status == "RUNNING"
    assert {said for _, _, said in fake.asked} == {None}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "wants a token, and there is none"),
        ({"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"}, "wants a token, and there is none"),
        ({"RAY_AUTH_TOKEN": "another"}, "refuses the token that is set here"),
    ],
)
def test_without_the_right_token_nothing_is_done(fake: FakeJobs, env: dict[str, str], message: str) -> None:
    fake.token = "secret"
    with pytest.raises(EnvironmentUnfit, match=message) as caught:
        ask(fake, lambda server: server.submit(request("x", "first", 1)), **env)
    assert fake.bodies == []
    assert "ray get-auth-token" in caught.value.hint
    assert not {"secret", "another"} & {*caught.value.message.split(), *caught.value.hint.split()}


def test_a_token_is_found_in_the_order_of_ray(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    (tmp_path / "file").write_text("file\n")
    env = {"HOME": str(tmp_path)}
    assert find_token(env) == "home"
    env["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "file")
    assert find_token(env) == "file"
    assert find_token({**env, "RAY_AUTH_TOKEN": "variable"}) == "variable"
    assert find_token({"HOME": "/nowhere"}) == ""


@pytest.mark.parametrize("method", ["status", "logs", "stop", "follow"])
def test_a_job_that_is_not_there_is_a_mistake_of_the_command_line(fake: FakeJobs, method: str) -> None:
    async def question(server: JobServer) -> None:
        if method == "follow":
            async for _ in server.follow("a/../b"):
                pass
        else:
            await getattr(server, method)("a/../b")

    with pytest.raises(UsageRefused, match=r"Job a/\.\./b does not exist at http://127"):
        ask(fake, question)


def test_a_request_that_is_refused_says_why(fake: FakeJobs) -> None:
    with pytest.raises(UsageRefused, match="entrypoint must be a string"):
        ask(fake, lambda server: server.submit({"entrypoint": 3}))


def test_nobody_there_is_the_environments_fault() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fake = FakeJobs(address=f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(EnvironmentUnfit, match="no job server at http://127") as caught:
        ask(fake, lambda server: server.status("j"))
    assert "ray[default]" in caught.value.hint
    nobody = FakeJobs(address="http://head..cluster:8265")  # no name can be
    with pytest.raises(EnvironmentUnfit, match=r"no job server at http://head\.\.cluster:8265"):
        ask(nobody, lambda server: server.status("j"))


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(text="<html>"), web.Response(text="[]"), web.Response(text="{}"),
        web.Response(status=500, text="oh"), web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
    ],
)  # fmt: skip
def test_somebody_else_there_is_not_spoken_to(answer: web.Response, monkeypatch: pytest.MonkeyPatch) -> None:
    async def other(self: FakeJobs, request: web.Request) -> web.Response:
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    monkeypatch.setattr(FakeJobs, "_version", other)
    with serving(FakeJobs()) as fake, pytest.raises(EnvironmentUnfit, match="is not Ray's job server"):
        ask(fake, lambda server: server.submit(request("x", "first", 1)))
    assert fake.bodies == []


def test_where_the_server_is() -> None:
    env = {"RAY_ADDRESS": "http://a:1", "RAY_API_SERVER_ADDRESS": "https://b"}
    assert find_address("http://c:8265/", env) == "http://c:8265"
    assert find_address(None, env) == "https://b"
    assert find_address(None, {"RAY_ADDRESS": "http://a:1"}) == "http://a:1"
    with pytest.raises(UsageRefused, match="which Ray cluster"):
        find_address(None, {})
    for wrong in (
        "10.0.0.1:6379",
        "auto",
        "ray://h:10001",
        "http://",
        "http://u:p@h",
        "http://h:x",
        "http://h?a=b",
        "h",
    ):
        with pytest.raises(UsageRefused, match="a job server is http://HOST:PORT"):
            find_address(None, {"RAY_ADDRESS": wrong})


def run_job(command: str, stubs: Stubs, **more: str) -> None:
    """As Ray runs it."""
    env = stubs.environment() | {"TMPDIR": str(stubs.folder)} | more
    done = subprocess.run(
        command, shell=True, env=env, cwd=stubs.folder, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["'; touch bad; '", "$(touch bad)", "`touch bad`", "a\nEND_OF_PROFILE\ntouch bad", "\\", "-"])
    | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    as_file=st.booleans(),
)
def test_no_value_becomes_shell(name: str, as_file: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    stubs = Stubs(tmp_path_factory.mktemp("place") / "stubs")
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], flags={"job.name": name}, env={})
    run_job(entrypoint(profile_text(resolved), (), ["--auto-resume"], as_file=as_file), stubs)
    if as_file:
        (line,) = stubs.calls
        text = Path(line.split()[2]).read_text()
        assert line == f"nftctl launch {line.split()[2]} --auto-resume"
    else:
        assert stubs.calls == ["nftctl launch - --auto-resume"]
        text = (stubs.folder / "profile-0.toml").read_text()
    assert text == profile_text(resolved)
    assert tomllib.loads(text)["job"]["name"] == name
    assert not list(stubs.folder.rglob("bad"))


@pytest.mark.parametrize("as_file", [False, True])
def test_what_rays_head_says_does_not_reach_the_run(tmp_path: Path, as_file: bool) -> None:
    stubs = Stubs(tmp_path / "stubs")
    # Only variables of ours are unset, so the name of a token may be anything at all.
    tokens = ["NFTCTL_REWARD_TOKEN", "MY_TOKEN", "x; touch bad", "NFTCTL_JUDGE_TOKEN"]
    command = entrypoint("# p\n", ["export NFTCTL_RL__SEED=7"], ["--auto-resume"], tokens, as_file=as_file)
    (tmp_path / "job.sh").write_text(command)
    assert shellcheck(tmp_path / "job.sh", shell="sh") == (0, "")
    run_job(
        command, stubs, NFTCTL_RL__BETA="3 \n NFTCTL_X=1", NFTCTL_rl__seed="2", NFTCTL_PROFILE="p", NFTCTL_DEBUG="1",
        NFTCTL_REWARD_TOKEN="s", NFTCTL_JUDGE_TOKEN="j", MY_TOKEN="m",
    )  # fmt: skip
    seen = (stubs.folder / "environment").read_text().splitlines()
    kept = sorted(line for line in seen if line.startswith(("NFTCTL_", "MY_TOKEN")))
    assert kept == ["MY_TOKEN=m", "NFTCTL_DEBUG=1", "NFTCTL_JUDGE_TOKEN=j", "NFTCTL_REWARD_TOKEN=s"]
    assert not list(stubs.folder.rglob("bad"))


def test_setup_comes_first(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path / "stubs")
    run_job(entrypoint("# p\n", ["A=b", "export A"], ["--auto-resume"]), stubs)
    assert "A=b" in (stubs.folder / "environment").read_text().splitlines()
    with pytest.raises(NftctlError, match="--setup"):
        entrypoint("# p\n", ["a\nb"], [])
