"""Runs over hosts in namespaces of their own that lose a link, a node or the head: each ends or goes on as promised.

Where a run goes on, it is to the bit the run that nobody touched. What was measured is printed at the end.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from nftctl.run.checkpoints import list_steps
from tests.conftest import clean_environment
from tests.engine.hosts import Host, cluster
from tests.engine.kill_runs import check_same

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(1500)]

STEPS = 8
SLOW_STEPS = 40
SLOW = ("rl.sample_steps=100",)
"""Runs that a dead head has to end: what is left of them must take longer than a head may be silent."""
COLLECTIVE_S = 20.0
"""Longest that ranks wait for each other in these runs."""
PATIENCE_S = 600.0
"""Longest that a test waits for anything, on a machine that others use."""
SETS = ('eval.prompt_file=""', "samples.prompts=0", "logging.tensorboard=false", "rl.group_size=2",
        "data.rows_per_step=2", "data.shuffle=true", 'rl.old.decay="linear"', "checkpoint.keep_last=9",
        f"grid.collective_timeout_s={COLLECTIVE_S}", "reward.deadline_s=15")  # fmt: skip


def words(command: str, *more: str, sets: Sequence[str] = ()) -> list[str]:
    line = [sys.executable, "-m", "nftctl", command, *more]
    return line + [word for value in sets for word in ("--set", value)]


def launch(name: str, *more: str, every: int = 2, steps: int = STEPS, sets: Sequence[str] = ()) -> list[str]:
    settings = (*SETS, f"checkpoint.every={every}", *sets)
    return words("launch", "tiny_t2i_cpu", "--steps", str(steps), "--name", name, *more, sets=settings)


class Clock:
    """What was measured: seconds since something was struck, by what happened."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, test: str, **seconds: float) -> None:
        self.lines.append(f"{test}: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    kept = Clock()
    yield kept
    print("\n" + "\n".join(kept.lines))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on one host that nobody touched."""
    return untouched(tmp_path_factory.mktemp("straight"), launch("clean"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with longer steps."""
    return untouched(tmp_path_factory.mktemp("slow"), launch("clean", steps=SLOW_STEPS, sets=SLOW))


def untouched(folder: Path, command: Sequence[str]) -> Path:
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "clean"


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes], out: Path) -> float:
    """Seconds until the condition holds; fails with what was said when it does not in time, or the run ends before."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE_S, out.read_text()
        assert process.poll() is None or condition(), out.read_text()
        time.sleep(0.05)
    return time.monotonic() - began


def rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def saved(run: Path) -> int:
    found = list_steps(run / "checkpoints")
    return found[-1][0] if found else 0


def restarts(run: Path) -> list[tuple[int, str]]:
    return [(entry["step"], entry["reason"]) for entry in json.loads((run / "run.json").read_text())["restarts"]]


def end(process: subprocess.Popen[bytes], out: Path) -> str:
    """What a run said, once it has ended."""
    try:
        process.wait(timeout=PATIENCE_S)
    finally:
        process.kill()
    return out.read_text()


def raylet(host: Host) -> psutil.Process:
    (found,) = (process for process in host.processes("raylet") if process.name() == "raylet")
    return found


# -- placement ------------------------------------------------------------------------------------------------------


def test_where_ranks_sit_changes_nothing(tmp_path: Path) -> None:
    """Four ranks on one host without a cluster, on one node, and on three nodes: one result."""
    four = ("rl.group_size=4",)
    with cluster(4, 2, 2) as made:
        for name, sets in (("one", ()), ("three", ("grid.strategy=spread",))):
            done = made[0].run(
                *launch(name, sets=(*four, "grid.address=auto", *sets)), cwd=tmp_path, timeout=PATIENCE_S
            )
            assert done.returncode == 0, done.stderr
            places = {"one": "ranks 0-3 on {0}", "three": "ranks 0-1 on {0}, 2 on {1}, 3 on {2}"}[name]
            hosts = (f"{host.ip} ({host.name})" for host in made)
            assert places.format(*hosts) in done.stderr.splitlines()
    own = subprocess.run(
        launch("own", sets=four), cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert own.returncode == 0, own.stderr
    for name in ("one", "three"):
        check_same(tmp_path / "runs" / name, tmp_path / "runs/own", STEPS)


def test_what_nodes_do_not_share_is_refused_by_name(tmp_path: Path) -> None:
    """Another prompt file at the same path on the second host, then a folder of runs that is its own."""
    prompts, other = tmp_path / "prompts.txt", tmp_path / "other.txt"
    lines = (Path(__file__).parents[2] / "nftctl/model/tiny/prompts_train.txt").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines))
    other.write_text("".join(lines[1:]))
    (tmp_path / "runs").mkdir()
    sets = ("grid.address=auto", f'data.prompt_file="{prompts}"')
    with cluster(1, 1) as (first, second):
        assert second.run("mount", "--bind", str(other), str(prompts)).returncode == 0
        files = first.run(*launch("files", sets=sets), cwd=tmp_path)
        assert second.run("umount", str(prompts)).returncode == 0
        assert second.run("mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "runs")).returncode == 0
        folder = first.run(*launch("folder", sets=sets), cwd=tmp_path)
    assert files.returncode == 8, files.stderr
    assert re.search(
        rf"error: node {second.ip} \(host2\) reads another prompt file at {prompts}: [0-9a-f]{{64}} there, "
        r"[0-9a-f]{64} here",
        files.stderr,
    )
    assert folder.returncode == 8, folder.stderr
    assert "error: node host2 does not see" in folder.stderr


# -- losses ---------------------------------------------------------------------------------------------------------


def test_a_killed_raylet_and_a_node_that_joins_late(tmp_path: Path, straight: Path, clock: Clock) -> None:
    run, out = tmp_path / "runs/struck", tmp_path / "out"
    with cluster(1, 1, 0) as (first, second, third):
        third.end_ray()
        process = first.start(
            *launch("struck", "--max-restarts", "2", sets=("grid.address=auto",)), cwd=tmp_path, out=out
        )
        wait_until(lambda: saved(run) >= 2 and rows(run) >= 3, process, out)
        raylet(second).kill()
        said = wait_until(lambda: "restart 1 of 2" in out.read_text(), process, out)
        wait_until(lambda: "waiting for room, 900 s at the most: 2 ranks need 2 CPU" in out.read_text(), process, out)
        third.start_ray(first, 1)
        third.wait_for_ray()
        resumed = wait_until(lambda: (run / "logs/attempt_2/rank_1.log").exists(), process, out)
        text = end(process, out)
    assert process.returncode == 0, text
    assert re.search(
        r"warning: rank 1 died in step \d+, .*: node 10\.231\.77\.2 \(host2\) is gone, with rank 1: ", text
    )
    assert f"ranks 0 on {first.ip} (host1), 1 on {third.ip} (host3)" in text.splitlines()
    check_same(run, straight, STEPS)
    ((step, reason),) = restarts(run)
    assert step >= 2
    assert "is gone, with rank 1" in reason
    clock.note("killed raylet", said=said, **{"ranks up again after the node joined": resumed})


def test_a_cut_link(tmp_path: Path, straight: Path, clock: Clock) -> None:
    run, out = tmp_path / "runs/struck", tmp_path / "out"
    with cluster(1, 1, 1) as (first, second, third):
        process = first.start(
            *launch("struck", "--max-restarts", "2", sets=("grid.address=auto",)), cwd=tmp_path, out=out
        )
        wait_until(lambda: saved(run) >= 2 and rows(run) >= 3, process, out)
        second.cut()
        said = wait_until(lambda: "restart 1 of 2" in out.read_text(), process, out)
        resumed = wait_until(lambda: (run / "logs/latest/rank_1.log").exists() and restarts_made(run), process, out)
        text = end(process, out)
    assert process.returncode == 0, text
    assert f"ranks 0 on {first.ip} (host1), 1 on {third.ip} (host3)" in text.splitlines()
    check_same(run, straight, STEPS)
    assert len(restarts(run)) == 1
    assert said < COLLECTIVE_S + 40
    clock.note("cut link", said=said, resumed=resumed)


def restarts_made(run: Path) -> bool:
    return "restarts" in json.loads((run / "run.json").read_text())


def test_a_cut_link_without_restarts_ends_the_run(tmp_path: Path, clock: Clock) -> None:
    run, out = tmp_path / "runs/struck", tmp_path / "out"
    with cluster(1, 1) as (first, second):
        process = first.start(*launch("struck", sets=("grid.address=auto",)), cwd=tmp_path, out=out)
        wait_until(lambda: saved(run) >= 2 and rows(run) >= 3, process, out)
        second.cut()
        began = time.monotonic()
        text = end(process, out)
        ended = time.monotonic() - began
        left = [host.processes("ray::Worker") for host in (first,)]
    assert process.returncode == 7, text
    assert f"{second.ip} (host2)" in text
    assert "the last checkpoint is of step" in text
    assert left == [[]]
    assert ended < COLLECTIVE_S + 40
    clock.note("cut link, no restarts", ended=ended)


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_killed_head(tmp_path: Path, slow: Path, clock: Clock, allowed: int) -> None:
    """The head has no rank, and the driver is on another host. With a restart, a new head is started at its address.

    Ranks go on without a head for a while, so these runs have longer steps.
    """
    run, out = tmp_path / "runs/struck", tmp_path / "out"
    with cluster(0, 1, 1) as (head, first, second):
        more = ["--max-restarts", str(allowed)] if allowed else []
        command = launch("struck", *more, steps=SLOW_STEPS, sets=(f'grid.address="{head.ip}:6379"', *SLOW))
        process = first.start(*command, cwd=tmp_path, out=out)
        wait_until(lambda: saved(run) >= 2 and rows(run) >= 3, process, out)
        head.end_ray()
        began = time.monotonic()
        if allowed:
            said = wait_until(lambda: "restart 1 of 1" in out.read_text(), process, out)
            for host in (first, second):
                for one in host.processes("/ray/"):
                    if one.pid != process.pid and "nftctl" not in " ".join(one.cmdline()):
                        one.kill()
            for host in (head, first, second):
                host.nodes.clear()
                host.start_ray(head, 0 if host is head else 1)
                host.wait_for_ray()
        text = end(process, out)
        ended = time.monotonic() - began
    assert f"the head of the Ray cluster at {head.ip}:6379 has not answered for" in text
    if allowed:
        assert process.returncode == 0, text
        check_same(run, slow, SLOW_STEPS)
        assert len(restarts(run)) == 1
        clock.note("killed head, started again", said=said, ended=ended)
    else:
        assert process.returncode == 7, text
        assert "the last checkpoint is of step" in text
        assert ended < 60
        clock.note("killed head, no restarts", ended=ended)


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path, straight: Path, clock: Clock) -> None:
    """A Ray of its own: a rank is killed before the first checkpoint, and another one behind it."""
    run, out = tmp_path / "runs/struck", tmp_path / "out"
    with out.open("wb") as sink:
        process = subprocess.Popen(
            launch("struck", "--max-restarts", "3", every=4),
            cwd=tmp_path,
            env=clean_environment(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    began = {}
    for number, done in ((1, 2), (2, 5)):
        log = run / f"logs/attempt_{number}/rank_1.log"
        wait_until(lambda log=log, done=done: log.exists() and f"step {done}: prepare" in log.read_text(), process, out)
        if number == 2:
            wait_until(lambda: saved(run) == 4, process, out)
        (pid,) = re.findall(r"rank 1 of 2 on cpu, pid (\d+)", log.read_text())
        psutil.Process(int(pid)).send_signal(signal.SIGKILL)
        began[f"kill {number} said"] = wait_until(lambda n=number: f"restart {n} of 3" in out.read_text(), process, out)
    text = end(process, out)
    assert process.returncode == 0, text
    assert "beginning again runs/struck: steps 0 -> 8" in text.splitlines()
    check_same(run, straight, STEPS)
    assert [step for step, _ in restarts(run)] == [0, 4]
    assert json.loads((run / "run.json").read_text())["run_id"]
    clock.note("killed ranks of a private Ray", **began)
