"""Reward services of a run: the packaged scorer as a process of its own, and what a service is asked beforehand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from nftctl.engine import services
from nftctl.engine.services import ask, ask_http, component_names, embedded, for_evaluation
from nftctl.errors import RewardFailed
from nftctl.profile.schema import Profile, Provider, Reward
from nftctl.reward.scorers import scorer_revision
from nftctl.roles.reward import Endpoint
from tests.conftest import clean_environment
from tests.reward.fault_server import FaultServer
from tests.reward.reward_cases import MeanPixel, serving
from tests.roles.samples import running

HOLDER = """
import os, sys
from pathlib import Path
from nftctl.engine.services import embedded
from nftctl.profile.schema import Profile, Provider, Reward
from nftctl.reward.scorers import scorer_revision
provider = Provider(name="bright", kind="embedded", scorer="brightness")
profile = Profile(reward=Reward(providers=[provider]))
with embedded(profile, {"bright": scorer_revision("brightness")}, Path(sys.argv[1])) as started:
    print(started["bright"].endpoint.url, flush=True)
    sys.stdin.read()
"""


def bright(**changes: Any) -> Profile:
    provider = Provider(**{"name": "bright", "kind": "embedded", "scorer": "brightness", **changes})
    return Profile(reward=Reward(providers=[provider], connect_timeout_s=5.0, read_timeout_s=5.0))


REVISION = {"bright": scorer_revision("brightness")}


def test_a_service_that_other_machines_reach_wants_a_token_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NFTCTL_REWARD_TOKEN", raising=False)
    with embedded(bright(), REVISION, tmp_path, host="127.0.0.2") as started:
        endpoint = started["bright"].endpoint
        token = os.environ[services.OWN_TOKEN]
        assert endpoint.url.startswith("http://127.0.0.2:")
        assert endpoint.provider.token_env == services.OWN_TOKEN
        assert len(token) == 64
        (pid,) = services_of(os.getpid())
        assert token not in " ".join(psutil.Process(pid).cmdline())
        assert ask(endpoint, bright().reward).components == ("red", "green", "blue")
        os.environ[services.OWN_TOKEN] = "another"
        with pytest.raises(RewardFailed, match="HTTP 401"):
            ask(endpoint, bright().reward)
    assert services.OWN_TOKEN not in os.environ
    monkeypatch.setenv("NFTCTL_REWARD_TOKEN", "the-profiles-own")
    with embedded(bright(), REVISION, tmp_path, host="127.0.0.2") as started:
        assert services.OWN_TOKEN not in os.environ
        assert started["bright"].endpoint.provider.token_env == "NFTCTL_REWARD_TOKEN"


def services_of(pid: int) -> set[int]:
    """Reward services that the process started and that still run."""
    return {p.pid for p in psutil.Process(pid).children() if "reward-serve" in p.cmdline()}


def gone(pid: int, timeout: float = 20) -> bool:
    def alive() -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + timeout
    while alive() and time.monotonic() < end:
        time.sleep(0.1)
    return not alive()


def test_an_embedded_service_answers_and_ends_with_the_block(tmp_path: Path) -> None:
    with embedded(bright(), REVISION, tmp_path) as started:
        service = started["bright"]
        mine = services_of(os.getpid())
        with urllib.request.urlopen(f"{service.endpoint.url}/healthz", timeout=5) as reply:
            assert reply.status == 200
    assert len(mine) == 1
    assert service.endpoint.url.startswith("http://127.0.0.1:")
    assert service.endpoint.revision == REVISION["bright"]
    assert service.components == ("red", "green", "blue")
    assert component_names([service]) == ["bright", "bright/red", "bright/green", "bright/blue"]
    assert not services_of(os.getpid())
    assert (tmp_path / "reward_bright.log").exists()


def test_services_of_evaluations_are_those_of_its_own_providers(tmp_path: Path) -> None:
    profile = bright()
    judge = Provider(name="bright", kind="embedded", scorer="tiny_digits")
    looks = profile.eval.model_copy(update={"providers": [judge], "prompt_file": "embedded"})
    judged = profile.model_copy(update={"eval": looks})
    judging = for_evaluation(judged)
    assert judging.reward.providers == [judge]
    assert judging.reward.read_timeout_s == profile.reward.read_timeout_s
    with embedded(judging, {"bright": scorer_revision("tiny_digits")}, tmp_path, "eval") as started:
        assert "judge" in started["bright"].components
    assert [path.name for path in tmp_path.iterdir()] == ["eval_bright.log"]
    # Where nothing is evaluated nobody is asked; nor where no others are named.
    nothing = looks.model_copy(update={"prompt_file": ""})
    assert for_evaluation(profile.model_copy(update={"eval": nothing})).reward.providers == []
    assert for_evaluation(profile).reward.providers == []


def test_it_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=clean_environment(),
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline().startswith("http://127.0.0.1:")
    (service,) = services_of(run.pid)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=10)
    assert gone(service)


def test_it_ends_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), embedded(bright(), REVISION, tmp_path):
        raise ZeroDivisionError
    assert not services_of(os.getpid())


def test_its_token_is_the_one_that_its_clients_will_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFTCTL_REWARD_TOKEN", "for-the-others")
    monkeypatch.setenv("BRIGHT_TOKEN", "for-this-one")
    with embedded(bright(token_env="BRIGHT_TOKEN"), REVISION, tmp_path) as started:
        assert started["bright"].components == ("red", "green", "blue")


def test_a_service_that_cannot_start_is_said_with_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(RewardFailed, match=r"bright did not start; see .*reward_bright\.log"),
        embedded(bright(scorer="no-such-scorer"), REVISION, tmp_path),
    ):
        pass
    assert "no-such-scorer" in (tmp_path / "reward_bright.log").read_text()
    assert not services_of(os.getpid())


def test_a_service_that_never_says_where_it_listens_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "START_TIMEOUT_S", 0.2)
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    with pytest.raises(RewardFailed, match="did not start"), embedded(bright(), REVISION, tmp_path):
        pass


def endpoint(url: str, revision: str) -> Endpoint:
    return Endpoint(Provider(name="far", url=url, revision=revision), url, revision)


def test_a_service_is_asked_for_its_revision_and_components() -> None:
    with running(FaultServer()) as server:
        service = ask(endpoint(server.url, "fault/1"), Reward())
        assert (service.endpoint.url, service.components) == (server.url, ("mean",))
        assert (server.infos, server.requests) == (1, 0)


def test_another_revision_is_refused_with_both_names() -> None:
    with running(FaultServer(revision="fault/2")) as server, pytest.raises(RewardFailed) as caught:
        ask(endpoint(server.url, "fault/1"), Reward())
    for part in (server.url, "fault/1", "fault/2"):
        assert part in caught.value.message
    assert server.requests == 0


def test_a_component_may_not_be_called_like_a_metric() -> None:
    class Naming(MeanPixel):
        components = ("red", "std")  # type: ignore[assignment]

    with running(serving(Naming())) as url, pytest.raises(RewardFailed, match="component 'std', which is the name of"):
        ask(endpoint(url, "mean/1"), Reward())


@pytest.mark.parametrize("fault", ["html", "status-401", "reset", "hang"])
def test_a_service_that_does_not_answer_is_refused(fault: str) -> None:
    with running(FaultServer(fault, info=True)) as server:
        with pytest.raises(RewardFailed) as caught:
            ask(endpoint(server.url, "fault/1"), Reward(retries=0, connect_timeout_s=0.3, read_timeout_s=0.3))
        assert server.url in caught.value.message


def test_only_http_providers_are_asked_before_the_start() -> None:
    with running(FaultServer()) as server:
        far = Provider(name="far", url=server.url, revision="fault/1", weight=0.0)
        profile = Profile(reward=Reward(providers=[far, *bright().reward.providers]))
        answered = ask_http(profile, {"far": "fault/1", **REVISION})
    assert list(answered) == ["far"]
    assert server.infos == 1
