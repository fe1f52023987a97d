"""Runs beside and inside of a real Ray cluster of somebody else, who must not notice: nodes, jobs, resources, actor."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nftctl.engine.cluster import look_at, refuse_unfit
from nftctl.errors import EnvironmentUnfit, TrainingFailed
from nftctl.profile.schema import Grid
from tests.conftest import clean_environment
from tests.engine.heads import Head, head
from tests.engine.test_runs import left_behind, start, wait_for

pytestmark = pytest.mark.ray

SMALL = (
    "--set", "rl.group_size=2", "--set", "data.rows_per_step=2", "--set", "rl.sample_steps=4",
    "--set", 'eval.prompt_file=""', "--set", "samples.prompts=0", "--set", "grid.device=cpu",
)  # fmt: skip
"""On the CPU: the GPUs of the cluster are declared and not there."""
REWARD_TOKEN = "sentinel-93c1-of-the-scorer"

DRIVER = """
import sys
from nftctl.cli.main import main
sys.argv = ["nftctl", *sys.argv[1:]]
code = main()
print("loaded:", *sorted({"torch", "diffusers", "transformers"} & set(sys.modules)), file=sys.stderr)
raise SystemExit(code)
"""
"""The command, which at its end tells what it had to import."""


@pytest.fixture(scope="module")
def theirs() -> Iterator[Head]:
    with head() as running:
        yield running


class Looks:
    """Looks at the cluster, each of which costs a driver: the last one of a test is the first one of the next."""

    def __init__(self, cluster: Head) -> None:
        self._cluster = cluster
        self._last: dict[str, Any] | None = None

    def before(self) -> dict[str, Any]:
        """How it stands, where nobody joined it since the last look."""
        return self._last or self.after()

    def after(self) -> dict[str, Any]:
        self._last = self._cluster.look()
        return self._last

    def forget(self) -> None:
        """Somebody joins who is not looked after."""
        self._last = None


@pytest.fixture(scope="module")
def looks(theirs: Head) -> Looks:
    return Looks(theirs)


def launch(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DRIVER, "launch", "tiny_t2i_cpu", "--steps", "1", "--name", "mine", *SMALL, *arguments],
        cwd=folder,
        env={**clean_environment(), **env},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def assert_untouched(before: dict[str, Any], after: dict[str, Any], *, jobs: int) -> None:
    """Same nodes, same free resources, nothing reserved, and the same process of the tenant with its memory."""
    assert after["nodes"] == before["nodes"]
    assert after["free"] == before["free"]
    assert set(after["groups"]) <= {"REMOVED"}
    assert after["jobs"] == before["jobs"] + jobs
    (pid, calls, _), (former_pid, former_calls, _) = after["tenant"], before["tenant"]
    assert (pid, calls) == (former_pid, former_calls + 1)


def files_with(text: str, *folders: Path) -> list[Path]:
    """Every file below the folders that has this text in it."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_local_is_a_ray_of_its_own_whatever_is_running(theirs: Head, looks: Looks, tmp_path: Path) -> None:
    """Also: SIGTERM before the first step ends a run at once and leaves nothing running."""
    before, note = looks.before(), theirs.note.read_text()
    # Both ways by which Ray alone would have joined the other one, and the token with which it could.
    join = {"RAY_ADDRESS": theirs.address, "RAY_AUTH_MODE": "token", **theirs.env}
    process = start(tmp_path, "launch", "tiny_t2i_cpu", "--steps", "500", "--name", "early", *SMALL, **join)
    run = tmp_path / "runs" / "early"
    wait_for(run / "logs" / "attempt_1" / "rank_0.log", r"rank 0 of 2 on cpu")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert (run / "metrics.jsonl").read_text() == ""
    assert list((run / "checkpoints").iterdir()) == []
    assert left_behind() == []
    assert f"RAY_ADDRESS={theirs.address} is set and not used: grid.address is local" in err.splitlines()
    own = re.search(r"Ray of its own at (\S+), logs in (\S+)", err)
    assert own is not None
    assert own[1] != theirs.address
    assert Path(own[2]).is_dir()
    assert_untouched(before, looks.after(), jobs=1)  # the job is the look itself
    assert theirs.note.read_text() == note


def test_auto_joins_runs_and_leaves_nothing(theirs: Head, looks: Looks, tmp_path: Path) -> None:
    before = looks.before()
    env = {**theirs.env, "NFTCTL_REWARD_TOKEN": REWARD_TOKEN}
    result = launch(tmp_path, "--set", "grid.address=auto", **env)
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("Ray cluster at"))
    for part in (theirs.address, f"noted in {theirs.note}", "1 node: ", "5 CPU, 3 GPU", "free 4 CPU, 2 GPU"):
        assert part in line
    assert re.search(r"rank 1 of 2 on cpu", (tmp_path / "runs/mine/logs/latest/rank_1.log").read_text())
    assert [p.name for p in (tmp_path / "runs/mine/checkpoints").glob("step_*")] == ["step_000001"]
    assert_untouched(before, looks.after(), jobs=2)
    # Without torch there can be no CUDA context in the driver.
    assert "loaded:\n" in result.stderr
    # Ranks answered the scorer's question for its token, which is in no file; nor is the cluster's.
    assert files_with(REWARD_TOKEN, tmp_path, theirs.folder) == []
    assert files_with(theirs.token, tmp_path, theirs.folder) == []
    assert REWARD_TOKEN not in result.stdout + result.stderr
    assert theirs.token not in result.stdout + result.stderr


def test_no_room_is_refused_before_anything_is_created(theirs: Head, looks: Looks, tmp_path: Path) -> None:
    before = looks.before()
    more = ("--set", "rl.group_size=4", "--set", "grid.device=cuda", "--set", f"grid.address={theirs.address}")
    result = launch(tmp_path, *more, "--json", **theirs.env)
    assert result.returncode == 8, result.stderr
    error = json.loads(result.stdout)["error"]["message"]
    assert "4 ranks need 4 CPU, 4 GPU (rl.group_size = 4)" in error
    assert "4 CPU, 2 GPU free of 5 CPU, 3 GPU" in error
    assert f"held by actor tenant (pid {before['tenant'][0]})" in error
    assert list(tmp_path.iterdir()) == []
    assert_untouched(before, looks.after(), jobs=1)


def test_another_version_is_an_error_of_the_environment(theirs: Head, looks: Looks, tmp_path: Path) -> None:
    looks.forget()
    put = (
        "from ray._raylet import GcsClient\n"
        "import json\n"
        "ask = GcsClient(address=address)\n"
        "old = json.loads(ask.internal_kv_get(b'CLUSTER_METADATA', namespace=b'cluster'))\n"
        "new = json.dumps({**old, 'ray_version': %r}).encode()\n"
        "ask.internal_kv_put(b'CLUSTER_METADATA', new, overwrite=True, namespace=b'cluster')\n"
        "print(old['ray_version'])\n"
    )
    ours = theirs.run(put % "2.9.3").strip()
    try:
        result = launch(tmp_path, "--set", f"grid.address={theirs.address}", **theirs.env)
    finally:
        # Nobody else can join while it says so: put it back from without.
        subprocess.run(
            [sys.executable, "-c", f"address = {theirs.address!r}\n" + put % ours],
            env={**theirs.env, "RAY_AUTH_MODE": "token"},
            check=True,
        )
    assert result.returncode == 8
    for part in ("runs Ray 2.9.3 with Python", f"this is Ray {ours} with Python", sys.executable):
        assert part in result.stderr
    assert result.stderr.count(sys.executable) == 2  # both sides' interpreters; here they are one
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_asked_for_and_told_apart(theirs: Head, looks: Looks, tmp_path: Path) -> None:
    looks.forget()
    grid = Grid(address=theirs.address, device="cpu")
    known = {**theirs.env, "HOME": str(tmp_path)}
    unknown = {name: value for name, value in known.items() if name != "RAY_AUTH_TOKEN"}
    found = look_at(grid, known)
    assert found.token
    refuse_unfit(found, grid, 4)
    for env, said in (
        (unknown, "wants a token, and there is none"),
        ({**unknown, "RAY_AUTH_TOKEN": "0" * 64}, "refuses the token"),
        ({**known, "RAY_AUTH_MODE": "disabled"}, "wants a token, and RAY_AUTH_MODE=disabled sends none"),
        ({**unknown, "RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE is token, and there is none"),
    ):
        with pytest.raises(EnvironmentUnfit, match=said):
            look_at(grid, env)


def test_a_node_that_cannot_import_nftctl_is_refused(theirs: Head, looks: Looks, tmp_path: Path) -> None:
    before = looks.before()
    broken = theirs.shim / "nftctl"
    broken.mkdir()
    try:
        (broken / "__init__.py").write_text("raise ImportError('not for this machine')\n")
        result = launch(tmp_path, "--set", f"grid.address={theirs.address}", **theirs.env)
    finally:
        shutil.rmtree(broken)
    assert result.returncode == 8, result.stderr
    assert f"{sys.executable} on node" in result.stderr
    assert "cannot import nftctl: ImportError: not for this machine" in result.stderr
    assert_untouched(before, looks.after(), jobs=2)


DEVICES = """
import os
from pathlib import Path
from nftctl.engine.cluster import find_cluster
from nftctl.engine.group import Group
from nftctl.profile.load import bundled_profiles, load_profile
sets = [f'grid.address="{address}"', "rl.group_size=2", "grid.device=cuda"]
profile = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, env={}).profile
started = []
cluster = find_cluster(profile, os.environ, print)
try:
    Group.start(profile, Path.cwd(), started.append, cluster)
except Exception as error:
    print("start:", type(error).__name__, error)  # there is no GPU: the ranks are placed, and then cannot join
print("devices:", *sorted(started[0].call("apply", lambda rank: os.environ["CUDA_VISIBLE_DEVICES"])))
started[0].shutdown()
"""


def test_each_rank_has_one_of_the_visible_devices(theirs: Head, looks: Looks, tmp_path: Path) -> None:
    before = looks.before()
    result = subprocess.run(
        [sys.executable, "-c", f"address = {theirs.address!r}\n{DEVICES}"],
        cwd=tmp_path,
        env=theirs.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "start: TrainingFailed" in result.stdout
    found = re.search(r"devices: (\d+) (\d+)", result.stdout)
    assert found is not None, result.stdout
    # The node's are 2, 3 and 5, and one of them is the tenant's.
    assert {*found.groups(), before["tenant"][2]} == {"2", "3", "5"}
    assert_untouched(before, looks.after(), jobs=2)


def test_lines_that_differ_in_a_number_are_all_kept(world4: Any) -> None:
    def say(rank: Any) -> None:
        import logging

        logging.getLogger("nftctl.test").info("the very same words of rank %d", rank.rank)

    def fail(rank: Any) -> None:
        if rank.rank == 2:
            raise ValueError("a fault of one rank")

    world4.call("apply", say)
    with pytest.raises(TrainingFailed, match=r"rank 2 failed in .*ValueError: a fault of one rank") as caught:
        world4.call("apply", fail)
    logs = [path.read_text() for path in sorted(Path(caught.value.log).parent.glob("rank_*.log"))]
    assert [re.findall("the very same words of rank (.)", text) for text in logs] == [["0"], ["1"], ["2"], ["3"]]
    # Once, with its rank, and in no other rank's log.
    assert [text.count("ValueError: a fault of one rank") for text in logs] == [0, 0, 1, 0]
    assert [text.count("rank 2: ") for text in logs] == [0, 0, 1, 0]
    assert "in fail" in logs[2]


@pytest.mark.soak
def test_a_killed_driver_leaves_nothing_on_the_cluster(theirs: Head, tmp_path: Path) -> None:
    before = theirs.look()
    more = ("--set", f"grid.address={theirs.address}", "--name", "killed")
    process = subprocess.Popen(
        [sys.executable, "-m", "nftctl", "launch", "tiny_t2i_cpu", "--steps", "500", *SMALL, *more],
        cwd=tmp_path,
        env=theirs.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = tmp_path / "runs/killed/metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    finally:
        process.kill()
        process.wait()
    ranks = [int(found[1]) for path in metrics.parent.glob("logs/latest/rank_*.log")
             if (found := re.search(r"on cpu, pid (\d+)", path.read_text()))]  # fmt: skip
    assert len(ranks) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    wait_until(lambda: theirs.look()["free"] == before["free"])
    assert set(theirs.look()["groups"]) <= {"REMOVED"}


@pytest.mark.soak
@pytest.mark.parametrize("slow", ["runtime_env/agent", "dashboard/agent.py"])
def test_a_slow_import_is_told_in_rays_own_words(tmp_path: Path, slow: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys, time\nif {slow!r} in ' '.join(sys.orig_argv): time.sleep(25)\n"
    )
    result = launch(tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 8, result.stderr
    assert "Ray did not start: " in result.stderr
    assert "timed out during startup" in result.stderr
    assert "its raylet ended with: " in result.stderr
    logs = re.search(r"Ray's own logs are in (\S+)", result.stderr)
    assert logs is not None
    assert (Path(logs[1]) / "raylet.err").is_file()


def wait_until(condition: Any, timeout: float = 90) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
