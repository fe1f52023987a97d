"""Ray's job server over HTTP: what it is asked, what it answers, and which token it hears.

Speaks the REST interface of Ray Jobs, so neither Ray's extra packages nor Ray itself are imported. Sends a token only
to a server that asks for one, and writes it nowhere. Refuses addresses that are not a job server's, and whatever does
not answer as one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from nftctl.errors import EnvironmentUnfit, UsageRefused
from nftctl.submit.portable import without_settings
from nftctl.submit.slurm import mark_outside, refuse_broken_line

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a connection."""
ANSWER_TIMEOUT_S = 60.0
"""Longest wait for one answer: the server looks for an agent before it takes a job."""
ENDED = ("SUCCEEDED", "STOPPED", "FAILED")
ADDRESS_HINT = "give the job server's: --address http://HOST:8265, or RAY_ADDRESS"


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the server has it. `exit_code` is that of nftctl once it has ended by itself."""

    id: str
    status: str
    message: str
    exit_code: int | None
    run: str

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED


def find_address(address: str | None, env: Mapping[str, str]) -> str:
    """`http://HOST:PORT` of the job server: the option, else Ray's own variables. Raises UsageRefused."""
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    how, found = next(
        ((how, text) for how, text in [("--address", address or ""), *((n, env.get(n, "")) for n in names)] if text),
        ("", ""),
    )
    if not found:
        raise UsageRefused("which Ray cluster? There is no --address and no RAY_ADDRESS", hint=ADDRESS_HINT)
    try:
        parts = urlsplit(found)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known or parts.username is not None or parts.query or parts.fragment or not found.isprintable():
        raise UsageRefused(f'{how} is "{found}", and a job server is http://HOST:PORT', hint=ADDRESS_HINT)
    return found.rstrip("/")


def find_token(env: Mapping[str, str]) -> str:
    """The token by Ray's own order: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token; or nothing."""
    if env.get("RAY_AUTH_TOKEN"):
        return env["RAY_AUTH_TOKEN"].strip()
    file = env.get("RAY_AUTH_TOKEN_PATH") or str(Path(env.get("HOME", "~")).expanduser() / ".ray" / "auth_token")
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def entrypoint(
    profile: str, setup: Sequence[str], options: Sequence[str], tokens: Sequence[str] = (), *, as_file: bool = False
) -> str:
    """The shell command of the job: `setup` lines, then `nftctl launch` with the profile as a here-document.

    Of the NFTCTL_ variables that Ray's head or a line of `setup` has, only those that hold `tokens` reach the launch.
    `as_file`: through a file, for a launch that reads the profile more than once.
    """
    for line in setup:
        refuse_broken_line("--setup", line)
    mark = mark_outside(profile)
    inside = [profile.rstrip("\n"), mark]
    before = [*setup, without_settings(tokens)]
    if not as_file:
        launch = shlex.join(["nftctl", "launch", "-", *options])
        return "\n".join([*before, f"exec {launch} <<'{mark}'", *inside, ""])
    lines = ["folder=$(mktemp -d) || exit 8", f"cat >\"$folder/profile.toml\" <<'{mark}'", *inside]
    return "\n".join([*before, *lines, f'exec nftctl launch "$folder/profile.toml" {shlex.join(options)}', ""])


def request(command: str, run: str, grace_s: int) -> dict[str, Any]:
    """The body that submits a job. Without the variable Ray kills three seconds after the word to stop."""
    runtime = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(grace_s)}}
    return {"entrypoint": command, "runtime_env": runtime, "metadata": {"job_name": run}}


class JobServer:
    """A connection to a job server. Example: `async with JobServer(address, os.environ) as server: ...`.

    Every method raises EnvironmentUnfit when the server cannot be reached or does not answer as one, and UsageRefused
    for a job that it does not know.
    """

    def __init__(self, address: str, env: Mapping[str, str]) -> None:
        self.address = address
        self.ray = ""
        """Version of the server's Ray."""
        self._env = env
        self._headers: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> JobServer:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout)
        try:
            await self._make_acquaintance()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def submit(self, body: Mapping[str, Any]) -> str:
        """Hand a job over; its id."""
        answer = await self._ask("POST", "/api/jobs/", body)
        return str(answer["submission_id"])

    async def status(self, job: str) -> Job:
        """How the job stands."""
        answer = await self._ask("GET", f"/api/jobs/{quote(job, safe='')}")
        code = answer.get("driver_exit_code")
        run = (answer.get("metadata") or {}).get("job_name", "")
        return Job(job, str(answer["status"]), str(answer.get("message") or ""), code, str(run))

    async def stop(self, job: str) -> bool:
        """Ask the job to end; whether it was still going."""
        answer = await self._ask("POST", f"/api/jobs/{quote(job, safe='')}/stop")
        return bool(answer["stopped"])

    async def logs(self, job: str) -> str:
        """All that the job has printed."""
        answer = await self._ask("GET", f"/api/jobs/{quote(job, safe='')}/logs")
        return str(answer["logs"])

    async def follow(self, job: str) -> AsyncIterator[str]:
        """What the job has printed and what it prints, until it ends."""
        await self.status(job)  # a job that is not known is refused with words, which the socket below has none for
        assert self._session is not None
        url = f"{self.address}/api/jobs/{quote(job, safe='')}/logs/tail"
        unlimited = aiohttp.ClientWSTimeout(ws_receive=None)
        try:
            async with self._session.ws_connect(url, headers=self._headers, timeout=unlimited, heartbeat=30) as socket:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        yield str(message.data)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from None

    async def _make_acquaintance(self) -> None:
        """Whether it wants a token is what the server says before it wants one; an older Ray does not know."""
        mode = await self._ask("GET", "/api/authentication_mode", missing={})
        if mode.get("authentication_mode", "disabled") != "disabled":
            token = "" if self._env.get("RAY_AUTH_MODE") == "disabled" else find_token(self._env)
            if not token:
                raise EnvironmentUnfit(
                    f"the job server at {self.address} wants a token, and there is none in RAY_AUTH_TOKEN, at "
                    "RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token (RAY_AUTH_MODE=disabled sends none)",
                    hint="`ray get-auth-token` on its head prints it",
                )
            self._headers = {"Authorization": f"Bearer {token}"}
        self.ray = str((await self._ask("GET", "/api/version")).get("ray_version", ""))
        if not self.ray:
            raise self._stranger("it names no version of Ray")

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, missing: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One answer as JSON; `missing` stands for 404 where that is allowed."""
        assert self._session is not None
        try:
            async with self._session.request(
                method, self.address + path, json=body, headers=self._headers, allow_redirects=False
            ) as answer:
                text = await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:  # the last: no host's name
            raise self._unreachable(error) from None
        if answer.status == 404 and missing is not None:
            return missing
        self._refuse_status(answer.status, text)
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise self._stranger("its answer is no JSON object")
        return document

    def _refuse_status(self, status: int, text: str) -> None:
        reason = (text.strip().splitlines() or ["no word"])[-1][:300]
        if status in (401, 403):
            raise EnvironmentUnfit(
                f"the job server at {self.address} refuses the token that is set here",
                hint="`ray get-auth-token` on its head prints the right one, for RAY_AUTH_TOKEN or ~/.ray/auth_token",
            )
        if status == 404 and "does not exist" in text:
            raise UsageRefused(f"{reason} at {self.address}", hint="`ray job list` lists the jobs that it knows")
        if status == 400:
            raise UsageRefused(f"the job server at {self.address} refuses: {reason}")
        if status != 200:
            raise self._stranger(f"it answers {status}: {reason}")

    def _unreachable(self, error: Exception) -> EnvironmentUnfit:
        reason = str(error) or type(error).__name__
        return EnvironmentUnfit(
            f"no job server at {self.address}: {reason}",
            hint="the head serves jobs with `ray[default]` installed; from elsewhere, forward its port 8265",
        )

    def _stranger(self, reason: str) -> EnvironmentUnfit:
        return EnvironmentUnfit(f"what listens at {self.address} is not Ray's job server: {reason}", hint=ADDRESS_HINT)
