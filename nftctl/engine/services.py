"""Reward services as a run sees them: embedded ones are started and stopped here, http ones are asked who they are.

Refuses a service that does not answer, that declares another revision, or that cannot score images.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nftctl import itself
from nftctl.errors import RewardFailed
from nftctl.profile.schema import Profile, Provider, Reward
from nftctl.reward.protocol import ServiceInfo
from nftctl.roles.reward import Endpoint

TAKEN = ("std", "group_std", "failures")
"""Metrics `reward/<provider>/...` that are not components."""
LOOPBACK = "127.0.0.1"
OWN_TOKEN = "NFTCTL_EMBEDDED_TOKEN"
"""The variable with the token of embedded services that other machines reach, made anew for each run."""
START_TIMEOUT_S = 60.0
"""Seconds an embedded service may take to say where it listens."""


@dataclass(frozen=True, slots=True)
class Service:
    """A provider that answered: its endpoint and the components that it declares."""

    endpoint: Endpoint
    components: tuple[str, ...]


def ask(endpoint: Endpoint, reward: Reward) -> Service:
    """Ask a service for its revision; RewardFailed when it is unreachable or another one."""

    async def info() -> ServiceInfo:
        async with endpoint.client(reward) as client:
            return await client.info()

    declared = asyncio.run(info())
    if declared.revision != endpoint.revision:
        raise RewardFailed(
            f"reward provider {endpoint.provider.name} at {endpoint.url}: revision {endpoint.revision} is pinned, "
            f"{declared.revision} is served",
            hint="start the pinned service, or pin the served revision in a new run",
        )
    taken = [part for part in declared.components if part in TAKEN]
    if taken:
        raise RewardFailed(
            f"reward provider {endpoint.provider.name} at {endpoint.url} declares a component {taken[0]!r}, "
            "which is the name of a metric",
            hint="rename the component in the service",
        )
    return Service(endpoint, tuple(declared.components))


def ask_http(profile: Profile, revisions: Mapping[str, str]) -> dict[str, Service]:
    """Every http provider's service, asked before any process is started."""
    return {
        p.name: ask(Endpoint(p, p.url, revisions[p.name]), profile.reward)
        for p in profile.reward.providers
        if p.kind == "http"
    }


def for_evaluation(profile: Profile) -> Profile:
    """The profile with the providers of its evaluation in place of its reward's: none where nothing is evaluated."""
    providers = profile.eval.providers if profile.eval.prompt_file else []
    return profile.model_copy(update={"reward": profile.reward.model_copy(update={"providers": providers})})


def component_names(services: Sequence[Service]) -> list[str]:
    """Columns of the reward table: each provider's score, then its declared components."""
    names = []
    for service in services:
        name = service.endpoint.provider.name
        names += [name, *(f"{name}/{part}" for part in service.components)]
    return names


@contextlib.contextmanager
def embedded(
    profile: Profile, revisions: Mapping[str, str], logs: Path, purpose: str = "reward", host: str = LOOPBACK
) -> Iterator[dict[str, Service]]:
    """Start every embedded provider on a free port of `host`; they end with the block, and with this process.

    Each has a log, `<purpose>_<name>.log`. Other machines can reach it where `host` is no loopback address; it then
    wants a token, the profile's or one that is in the environment for the time of the block.
    """
    running: list[subprocess.Popen[str]] = []
    try:
        services = {}
        for given in profile.reward.providers:
            if given.kind == "embedded":
                p = given if host == LOOPBACK else _guarded(given)
                process, url = _start(p, revisions[p.name], logs / f"{purpose}_{p.name}.log", host)
                running.append(process)
                services[p.name] = ask(Endpoint(p, url, revisions[p.name]), profile.reward)
        yield services
    finally:
        for process in running:
            _stop(process)
        os.environ.pop(OWN_TOKEN, None)


def _guarded(provider: Provider) -> Provider:
    if os.environ.get(provider.token_env):
        return provider
    os.environ.setdefault(OWN_TOKEN, secrets.token_hex(32))
    return provider.model_copy(update={"token_env": OWN_TOKEN})


def _start(provider: Provider, revision: str, log: Path, host: str) -> tuple[subprocess.Popen[str], str]:
    command = itself.command("nftctl", "reward-serve", "--scorer", provider.scorer)
    command += ["--host", host, "--port", "0"]
    # The service reads its token under the default name; the value is in the child's environment and nowhere else.
    env = {k: v for k, v in os.environ.items() if k not in ("NFTCTL_REWARD_TOKEN", OWN_TOKEN)}
    if token := os.environ.get(provider.token_env, ""):
        env["NFTCTL_REWARD_TOKEN"] = token
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [*command, "--revision", revision, "--parent-pid", str(os.getpid())],
            stdout=subprocess.PIPE,
            stderr=sink,
            env=env,
            text=True,
            # A Ctrl-C in the terminal is for the run: it still needs scores to finish the step.
            start_new_session=True,
        )
    line = _first_line(process)
    prefix = "listening on "
    if not line.startswith(prefix):
        _stop(process)
        raise RewardFailed(f"the embedded reward service {provider.name} did not start; see {log}")
    return process, line[len(prefix) :].strip()


def _first_line(process: subprocess.Popen[str]) -> str:
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        return process.stdout.readline() if process.stdout else ""
    finally:
        watchdog.cancel()


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()
