"""`validate --online` against real sockets: services up, down, or of another revision; a Ray cluster; GPUs counted."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nftctl.cli import online as online_module
from nftctl.cli.online import Answers, look_around, visible_gpus
from nftctl.engine import cluster
from nftctl.errors import Finding
from nftctl.profile.load import load_profile
from nftctl.reward.scorers import scorer_revision
from tests.engine.test_cluster import a_cluster, node
from tests.interop.test_cosmos_training import serving
from tests.profile.conftest import COMPLETE, toml_of, write_place

from .program import nftctl, the_object
from .test_ping import served

TOKEN = "sentinel-5b1e"
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("served"), "--revision", "r1", NFTCTL_REWARD_TOKEN=TOKEN) as address:
        yield address


@pytest.fixture
def closed() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def write(folder: Path, providers: list[dict[str, object]], **changes: object) -> None:
    write_place(folder)
    (folder / "p.toml").write_text(toml_of({**COMPLETE, "grid.device": "cpu", **changes}, providers))


def online(folder: Path, **env: str) -> dict:
    return the_object(nftctl("validate", "p.toml", "--online", "--json", cwd=folder, env={**NO_GPUS, **env}))


def test_everything_is_there(tmp_path: Path, url: str) -> None:
    write(tmp_path, [{"name": "judge", "url": url, "revision": "r1"}])
    document = online(tmp_path, NFTCTL_REWARD_TOKEN=TOKEN)
    assert (document["exit_code"], document["diagnostics"]) == (0, [])
    (reward,) = document["online"]["rewards"]
    assert (reward["name"], reward["up"], reward["revision"]) == ("judge", True, {"pinned": "r1", "served": "r1"})
    assert document["online"]["ray"]["reachable"] is None
    assert document["online"]["gpus"]["visible"] is None
    arguments = ("validate", "p.toml", "--online")
    shown = nftctl(*arguments, cwd=tmp_path, env={"NFTCTL_REWARD_TOKEN": TOKEN}).stdout.splitlines()[2:]
    assert [line.split("  ")[0] for line in shown] == ["reward judge", "ray", "gpus"]
    assert f"up at {url}, revision r1 as pinned" in shown[0]


def test_services_of_evaluations_are_asked_as_well(tmp_path: Path, url: str, closed: str) -> None:
    judges = [{"name": "judge", "url": f"http://{closed}", "revision": "r1"}]
    changes: dict[str, object] = {"eval.prompt_file": "prompts.txt", "eval.providers": judges}
    write(tmp_path, [{"name": "judge", "url": url, "revision": "r1"}], **changes)
    document = online(tmp_path, NFTCTL_REWARD_TOKEN=TOKEN)
    assert document["exit_code"] == 4
    assert [(f["code"], f["key"]) for f in document["diagnostics"]] == [
        ("reward-unreachable", "eval.providers.0.url"),
    ]
    assert [(e["section"], e["name"], e["up"]) for e in document["online"]["rewards"]] == [
        ("reward", "judge", True), ("eval", "judge", False),
    ]  # fmt: skip


def test_all_reward_faults_are_told_at_once_and_end_with_4(tmp_path: Path, url: str, closed: str) -> None:
    scorer = {"name": "bright", "kind": "embedded", "scorer": "brightness"}
    write(
        tmp_path,
        [
            {"name": "other", "url": url, "revision": "r2"},
            {"name": "down", "url": f"http://{closed}", "revision": "r1"},
            {"name": "closed", "url": url, "revision": "r1", "token_env": "UNSET_TOKEN"},
            {**scorer, "revision": "0" * 64},
            {**scorer, "name": "pinned", "revision": scorer_revision("brightness")},
            {**scorer, "name": "free"},
        ],
    )
    document = online(tmp_path, NFTCTL_REWARD_TOKEN=TOKEN)
    assert document["exit_code"] == 4
    assert [(f["code"], f["key"]) for f in document["diagnostics"]] == [
        ("reward-revision-differs", "reward.providers.0.revision"),
        ("reward-unreachable", "reward.providers.1.url"),
        ("reward-unreachable", "reward.providers.2.url"),
        ("reward-revision-differs", "reward.providers.3.revision"),
    ]
    lines = (tmp_path / "p.toml").read_text().split("\n")
    for finding in document["diagnostics"]:
        assert lines[finding["line"] - 1].startswith(finding["key"].split(".")[-1])
        assert (finding["origin"], finding["severity"]) == ("p.toml", "error")
    assert "'r1'" in document["diagnostics"][0]["message"]
    assert "HTTP 401" in document["diagnostics"][2]["message"]
    assert [entry["up"] for entry in document["online"]["rewards"]] == [True, False, False, None, None, None]
    assert document["error"]["message"].endswith("4 checks of what is around it failed")
    assert TOKEN not in json.dumps(document)
    answer = nftctl("validate", "p.toml", "--online", cwd=tmp_path, env={"NFTCTL_REWARD_TOKEN": TOKEN})
    assert answer.returncode == 4
    assert answer.stderr.count("error[reward-") == 4
    assert answer.stdout.count("not asked: a run starts the packaged scorer itself") == 3


def test_other_faults_beside_end_with_3(tmp_path: Path, closed: str) -> None:
    write(tmp_path, [{"name": "down", "url": f"http://{closed}", "revision": "r1"}], **{"grid.device": "cuda"})
    document = online(tmp_path)
    assert document["exit_code"] == 3
    assert {f["code"] for f in document["diagnostics"]} == {"reward-unreachable", "gpus-too-few"}


def answers_of(folder: Path, address: str) -> tuple[Answers, list[Finding]]:
    """In process, with no variable set."""
    embedded: dict[str, object] = {"name": "digits", "kind": "embedded", "scorer": "tiny_digits"}
    write(folder, [embedded], **{"grid.address": address})
    return look_around(load_profile(folder / "p.toml", env={}), {"RAY_TMPDIR": str(folder)})


def test_a_ray_that_does_not_listen(tmp_path: Path, closed: str) -> None:
    answers, (finding,) = answers_of(tmp_path, closed)
    assert (finding.code, finding.key, finding.line) == ("ray-unreachable", "grid.address", 8)
    assert finding.message == f"no Ray at {closed} (grid.address): Connection refused"
    assert answers.ray == {"address": closed, "reachable": False, "how": "not reachable"}


def test_what_listens_has_to_be_a_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SURVEY_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers, (finding,) = answers_of(tmp_path, f"127.0.0.1:{server.getsockname()[1]}")
    assert finding.code == "ray-unreachable"
    assert "does not answer as Ray" in finding.message
    assert answers.ray["reachable"] is False
    assert answers.gpus["how"] == "not needed: grid.device is cpu"


def test_auto_without_a_cluster(tmp_path: Path) -> None:
    _, (finding,) = answers_of(tmp_path, "auto")
    assert finding.code == "ray-unreachable"
    assert f"there is no {tmp_path}/ray/ray_current_cluster" in finding.message


def test_what_a_cluster_is_and_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = a_cluster(node(8, 2, held=(1, 1)), holders=("actor hog: 1 CPU, 1 GPU",))
    monkeypatch.setattr(online_module, "look_at", lambda grid, env: there)
    answers, findings = answers_of(tmp_path, "10.0.0.1:6379")
    assert findings == []
    assert answers.ray == {"address": "10.0.0.1:6379", "reachable": True, "how": there.describe()}
    gpus = load_profile(tmp_path / "p.toml", env={}, sets=["grid.device=auto"])
    answers, (unfit,) = look_around(gpus, {})
    assert unfit.code == "ray-unfit"
    assert unfit.key == "grid.address"
    assert "4 ranks need 4 CPU, 4 GPU (rl.group_size = 4)" in unfit.message
    assert answers.gpus["visible"] == 2
    assert answers.gpus["how"] == "2 on the nodes of the cluster"


def test_a_full_disk_is_told_for_a_private_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "RAY_FILES_BYTES", 1 << 80)
    _, (finding,) = answers_of(tmp_path, "local")
    assert (finding.code, finding.key) == ("ray-unfit", "grid.address")
    assert f"{1 << 80:,} are needed" in finding.message


@pytest.mark.parametrize("fault", ["", "down"])
def test_a_service_that_declares_no_revision_is_only_asked_if_it_is_up(tmp_path: Path, closed: str, fault: str) -> None:
    with serving() as address:
        url = f"http://{closed}" if fault else address
        write(tmp_path, [{"name": "brightness", "protocol": "cosmos-rl", "url": url, "revision": "said/1"}])
        document = online(tmp_path)
    assert [f["code"] for f in document["diagnostics"]] == (["reward-unreachable"] if fault else [])
    (reward,) = document["online"]["rewards"]
    assert reward["up"] == (not fault)
    assert reward["revision"] == {"pinned": "said/1", "served": None}
    assert fault or "declares no revision" in reward["how"]


def test_too_few_gpus(tmp_path: Path, url: str) -> None:
    write(tmp_path, [{"name": "a", "url": url, "revision": "r1"}], **{"grid.device": "cuda"})
    document = online(tmp_path, NFTCTL_REWARD_TOKEN=TOKEN)
    (finding,) = document["diagnostics"]
    assert (document["exit_code"], finding["code"], finding["key"]) == (8, "gpus-too-few", "grid.device")
    assert finding["message"].startswith("4 GPUs are needed, one per rank (rl.group_size = 4); 0 by CUDA_VISIBLE_")
    write_auto = toml_of({**COMPLETE, "grid.device": "auto"}, [{"name": "a", "url": url, "revision": "r1"}])
    (tmp_path / "p.toml").write_text(write_auto)
    document = online(tmp_path, NFTCTL_REWARD_TOKEN=TOKEN)
    assert document["exit_code"] == 0
    assert "ranks compute on the CPU" in document["online"]["gpus"]["how"]


def test_a_refused_profile_asks_nobody(tmp_path: Path, closed: str) -> None:
    write(tmp_path, [{"name": "down", "url": f"http://{closed}", "revision": "r1"}], **{"rl.group_size": 1})
    document = online(tmp_path)
    assert [f["code"] for f in document["diagnostics"]] == ["group-size"]
    assert "online" not in document


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (None, 3),
        ("", 0),
        ("0", 1),
        ("2,0", 2),
        ("0,-1,1", 1),
        ("0,3,1", 1),
        ("GPU-1a,GPU-2b", 2),
        ("0, 1", 2),
        ("7", 0),
    ],
)
def test_gpus_are_counted_as_cuda_would(tmp_path: Path, chosen: str | None, count: int) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    env = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    found, how = visible_gpus(env, tmp_path / "gpus", tmp_path)
    assert found == count
    assert "3 by" in how
    assert ("CUDA_VISIBLE_DEVICES" in how) == (chosen is not None)


def test_without_the_drivers_listing_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path / "nothing", tmp_path) == (2, f"2 by {tmp_path}/nvidia*")
    assert visible_gpus({}, tmp_path / "nothing", tmp_path / "nothing")[0] == 0
