"""What is known of a Ray cluster before it is joined: where it is, and every reason to stay away. No Ray is started."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine import cluster as cluster_module
from nftctl.engine.cluster import (
    Cluster,
    _holder,
    choose_device,
    find_cluster,
    look_at,
    refuse_full_disk,
    refuse_unfit,
    resolve,
    token_at_hand,
)
from nftctl.engine.seats import Node, seat, told
from nftctl.engine.survey import _group_holders
from nftctl.errors import EnvironmentUnfit
from nftctl.profile.schema import Grid, Profile

OURS = (version("ray"), platform.python_version())


def node(cpus: float, gpus: float = 0, *, held: tuple[float, float] = (0, 0), **others: Any) -> Node:
    values = {"host": "h", "ip": "10.0.0.1", "here": True, "python": "/opt/py/bin/python", **others}
    free = {"CPU": cpus - held[0], "GPU": gpus - held[1]}
    return Node(total={"CPU": cpus, "GPU": gpus}, free=free, **{"id": f"id of {values['ip']}", **values})


def a_cluster(*nodes: Node, ray: str = OURS[0], python: str = OURS[1], holders: tuple[str, ...] = ()) -> Cluster:
    return Cluster("10.0.0.1:6379", "grid.address", ray, python, nodes, holders, False)


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "chosen"),
    [
        ("auto", 4, 0, "cpu"),
        ("auto", 4, 4, "cuda"),
        ("auto", 2, 8, "cuda"),
        ("cpu", 4, 0, "cpu"),
        ("cpu", 4, 8, "cpu"),
        ("cuda", 4, 4, "cuda"),
    ],
)
def test_the_device_of_a_run(device: str, ranks: int, gpus: int, chosen: str) -> None:
    assert choose_device(Grid(device=device), ranks, gpus) == chosen


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("auto", 3), ("cuda", 0), ("cuda", 3)])
def test_too_few_gpus_are_said_with_both_numbers_and_a_way_out(device: str, gpus: int) -> None:
    with pytest.raises(EnvironmentUnfit, match=rf"4 GPUs are needed.*rl\.group_size = 4.*{gpus} are visible") as caught:
        choose_device(Grid(device=device), 4, gpus)
    assert 'grid.device = "cpu"' in caught.value.hint


# -- where ----------------------------------------------------------------------------------------------------------


def test_an_address_is_taken_as_it_stands(tmp_path: Path) -> None:
    assert resolve("10.0.0.1:6379", {"RAY_ADDRESS": "10.0.0.9:1"}) == ("10.0.0.1", 6379, "grid.address")


def test_auto_takes_the_variable_then_the_note_then_refuses(tmp_path: Path) -> None:
    env = {"RAY_TMPDIR": str(tmp_path)}
    note = tmp_path / "ray" / "ray_current_cluster"
    with pytest.raises(EnvironmentUnfit, match="finds no cluster: RAY_ADDRESS is not set, and there is no") as caught:
        resolve("auto", env)
    assert str(note) in caught.value.message
    assert int(caught.value.exit_code) == 8
    note.parent.mkdir()
    note.write_text("10.0.0.2:6379\n")
    assert resolve("auto", env) == ("10.0.0.2", 6379, f"noted in {note}")
    assert resolve("auto", {**env, "RAY_ADDRESS": "10.0.0.3:1"}) == ("10.0.0.3", 1, "RAY_ADDRESS")
    assert resolve("auto", {"TMPDIR": str(tmp_path)})[0] == "10.0.0.2"


@pytest.mark.parametrize(
    ("value", "said"), [("ray://head:10001", "is Ray's client mode"), ("http://head:8265", "is not HOST:PORT")]
)
def test_a_variable_that_names_nothing_to_join_is_refused(value: str, said: str) -> None:
    with pytest.raises(EnvironmentUnfit, match=said) as caught:
        resolve("auto", {"RAY_ADDRESS": value})
    assert f'"{value}" (RAY_ADDRESS)' in caught.value.message


def test_local_uses_no_other_address_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    env = {"RAY_ADDRESS": "10.0.0.9:6379", "RAY_TMPDIR": str(tmp_path)}
    assert find_cluster(Profile(), env, said.append) is None
    assert said == ["RAY_ADDRESS=10.0.0.9:6379 is set and not used: grid.address is local"]


# -- what answers ---------------------------------------------------------------------------------------------------


def test_a_dead_address_is_answered_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    before = time.monotonic()
    with pytest.raises(EnvironmentUnfit, match=rf"no Ray at {address} \(grid.address\): Connection refused"):
        look_at(Grid(address=address), {})
    assert time.monotonic() - before < 5  # Ray alone: two minutes


@pytest.mark.parametrize("host", ["head..cluster", "h" * 64])
def test_what_can_be_no_host_is_not_there(host: str) -> None:
    with pytest.raises(EnvironmentUnfit, match=rf"no Ray at {host}:6379 \(grid.address\): that is no host name"):
        look_at(Grid(address=f"{host}:6379"), {})


def test_a_token_that_is_to_be_sent_and_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EnvironmentUnfit, match="RAY_AUTH_MODE is token, and there is none in RAY_AUTH_TOKEN"):
            look_at(Grid(address=address), {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"})


def test_a_placement_group_is_told_with_the_program_that_made_it() -> None:
    """Other runs of nftctl hold their room by one. By Ray's own ids."""
    from ray._raylet import JobID, PlacementGroupID

    job = JobID.from_int(7)
    ours, theirs = (PlacementGroupID.of(one).hex() for one in (job, JobID.from_int(8)))
    total = {b"n": {"CPU": 4.0, f"CPU_group_{ours}": 3.0, f"CPU_group_0_{ours}": 3.0, f"GPU_group_{theirs}": 1.0}}
    assert _group_holders(total, {job.hex(): "nftctl launch p.toml"}) == [
        {"what": f"placement group {ours[:12]}", "program": "nftctl launch p.toml", "held": {"CPU": 3.0, "GPU": 0.0}},
        {"what": f"placement group {theirs[:12]}", "program": "", "held": {"CPU": 0.0, "GPU": 1.0}},
    ]


def test_who_holds_room_is_told_on_one_line() -> None:
    """A command line is somebody else's, and may be a whole program."""
    row = {"what": "actor a\x1b[2J (pid 7)", "program": "python -c \nimport ray\n" + "x" * 200, "held": {"CPU": 1.0}}
    said = "python -c import ray "
    assert _holder(row) == rf"actor a\x1b[2J (pid 7) of `{said}{'x' * (117 - len(said))}...`: 1 CPU, 0 GPU"
    assert _holder(row | {"program": "", "what": "actor b"}) == "actor b: 1 CPU, 0 GPU"


def test_what_listens_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "SURVEY_TIMEOUT_S", 1.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            EnvironmentUnfit, match=rf"what listens at {address} .* does not answer as Ray .* within 2 s"
        ):
            look_at(Grid(address=address), {})


def test_a_token_is_looked_for_and_never_read(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert not token_at_hand(home)
    assert token_at_hand({**home, "RAY_AUTH_TOKEN": "x"})
    assert not token_at_hand({**home, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "t")})
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch(mode=0)
    assert token_at_hand(home)


# -- why not --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ray", "python"), [("2.9.3", OURS[1]), (OURS[0], "3.11.99"), (f"{OURS[0]}rc1", OURS[1])])
def test_another_version_is_told_with_both_and_both_interpreters(ray: str, python: str) -> None:
    with pytest.raises(EnvironmentUnfit) as caught:
        refuse_unfit(a_cluster(node(9), ray=ray, python=python), Grid(device="cpu"), 2)
    for part in (f"Ray {ray} with Python {python}", "(/opt/py/bin/python)", f"Ray {OURS[0]} with", sys.executable):
        assert part in caught.value.message


def test_a_cluster_without_a_node_here_cannot_be_joined() -> None:
    with pytest.raises(EnvironmentUnfit, match=r"no node of the Ray cluster at 10\.0\.0\.1:6379 runs on this machine"):
        refuse_unfit(a_cluster(node(9, here=False)), Grid(device="cpu"), 2)


@pytest.mark.parametrize(
    ("device", "nodes"),
    [
        ("cpu", [node(4)]),
        ("auto", [node(4)]),
        ("auto", [node(8, 8, held=(4, 4))]),
        ("cuda", [node(1), node(4, 4, ip="10.0.0.2")]),
        ("cpu", [node(8, 8, held=(4, 8))]),
    ],
)
def test_room_on_one_node_is_enough(device: str, nodes: list[Node]) -> None:
    assert refuse_unfit(a_cluster(*nodes), Grid(device=device), 4).seats == (nodes[-1],) * 4


@pytest.mark.parametrize(
    ("device", "nodes"),
    [
        ("cpu", [node(3)]),
        ("cpu", [node(8, held=(5, 0))]),
        ("cpu", [node(2), node(1, ip="10.0.0.2")]),
        ("cuda", [node(8, 3), node(8, 8, ip="10.0.0.2", held=(8, 0))]),  # GPUs, and no CPU to go with them
        ("cuda", [node(8)]),
        ("auto", [node(8, 2)]),  # not on the CPU: there are GPUs
        ("auto", [node(8, 8, held=(0, 5))]),
    ],
)
def test_no_room_is_told_with_what_is_needed_free_and_held(device: str, nodes: list[Node]) -> None:
    holders = ("actor hog (pid 7) of `python train.py`: 1 CPU, 5 GPU",)
    with pytest.raises(EnvironmentUnfit) as caught:
        refuse_unfit(a_cluster(*nodes, holders=holders), Grid(device=device), 4)
    needed = "4 CPU, 0 GPU" if device == "cpu" else "4 CPU, 4 GPU"
    first = nodes[0]
    assert f"4 ranks need {needed} (rl.group_size = 4)" in caught.value.message
    assert (
        f"{first.free['CPU']:g} CPU, {first.free['GPU']:g} GPU free of {first.total['CPU']:g} CPU"
        in caught.value.message
    )
    assert f"held by {holders[0]}" in caught.value.message


# -- which node each rank gets ----------------------------------------------------------------------------------------


def ips(seats: tuple[Node, ...]) -> list[str]:
    """The last number of each rank's address."""
    return [seat.ip.rpartition(".")[2] for seat in seats]


@pytest.mark.parametrize(
    ("strategy", "free", "ranks", "group", "expected"),
    [
        ("pack", {2: 4, 1: 4}, 4, None, "1111"),  # this machine's node before another
        ("pack", {2: 9, 3: 4}, 4, None, "3333"),  # the tightest fit, where this machine has no node with room
        ("pack", {1: 2, 2: 1, 3: 3}, 4, None, "1333"),  # the fewest nodes, in the order of their addresses
        ("pack", {1: 1, 2: 1, 3: 1, 10: 1}, 4, None, ["1", "2", "3", "10"]),  # by number and not by letters
        ("spread", {2: 4, 1: 4}, 4, None, "1122"),
        ("spread", {1: 1, 2: 8}, 4, None, "1222"),
        ("spread", {3: 9, 1: 9, 2: 9}, 4, None, "1123"),
        ("spread", {1: 9, 2: 9, 3: 9}, 2, None, "12"),
        ("pack", {1: 3, 2: 3}, 4, 2, "1122"),  # and not 1112: that would tear a group
        ("spread", {1: 9, 2: 9, 3: 9}, 4, 2, "1122"),
        ("pack", {1: 3, 2: 1}, 4, 2, "1112"),  # torn, since there is no other room
        ("pack", {1: 1, 2: 2}, 4, None, ""),
    ],
)
def test_seats(strategy: Any, free: dict[int, int], ranks: int, group: int | None, expected: Any) -> None:
    nodes = [node(cpus, ip=f"10.0.0.{n}", here=n == 1) for n, cpus in free.items()]
    found = seat(nodes, {"CPU": 1.0}, ranks, strategy, group)
    assert ips(found) == list(expected)
    assert found == seat(nodes[::-1], {"CPU": 1.0}, ranks, strategy, group)  # in whatever order Ray lists them


def test_seats_are_told_with_torn_groups() -> None:
    first, second = node(9, host="a"), node(9, ip="10.0.0.2", host="b")
    assert told((first, first, second, second), 2) == "ranks 0-1 on 10.0.0.1 (a), 2-3 on 10.0.0.2 (b)"
    torn = told((first, first, first, second), 2)
    assert torn.startswith("ranks 0-2 on 10.0.0.1 (a), 3 on 10.0.0.2 (b); no room for whole shard groups: ranks 2-3 ")


def test_a_run_on_several_nodes_knows_how_it_is_reached() -> None:
    here, there = node(1, ip="10.0.0.5"), node(1, ip="10.0.0.2", here=False)
    seated = refuse_unfit(a_cluster(there, here), Grid(device="cpu"), 2)
    assert (ips(seated.seats), seated.only_here, seated.our_ip) == (["2", "5"], False, "10.0.0.5")
    assert refuse_unfit(a_cluster(there, node(2)), Grid(device="cpu"), 2).only_here


# -- disk -----------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "enough"), [((256 << 20) - 1, False), (256 << 20, True)])
def test_room_for_rays_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, enough: bool) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or Usage(10 << 30, 0, free))
    env = {"RAY_TMPDIR": str(tmp_path)}
    if enough:
        refuse_full_disk(env)
    else:
        with pytest.raises(EnvironmentUnfit, match="268,435,455 bytes free; 268,435,456 are needed"):
            refuse_full_disk(env)
    assert asked == [tmp_path]  # <RAY_TMPDIR>/ray is not there yet


def test_small_disks_are_found_before_anything_is_created(tmp_path: Path, cli: Any) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        ray = cli("launch", "--steps", "1", RAY_TMPDIR=str(small))
        run = cli("launch", "--steps", "1", "--run-dir", str(small))
    finally:
        subprocess.run(["umount", small], check=True)
    assert ray.returncode == 8
    assert f"{small}/ray, which has 65,536 bytes free; 268,435,456 are needed" in ray.stderr
    assert run.returncode == 3
    assert "error[disk-space]" in run.stderr
    assert "has 0.1 MiB free" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
