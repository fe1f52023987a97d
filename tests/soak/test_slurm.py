"""The sbatch script under a Slurm of this test's own: munged, slurmctld and three slurmd on this host, none of it kept.

Where a run goes on after Slurm took its nodes or one of them died, it is to the bit the run that nobody touched.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from nftctl.run.checkpoints import list_steps
from tests.conftest import clean_environment
from tests.engine.kill_runs import check_same, environment_of

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(1500)]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("node1", "node2", "node3")
"""Slurm gives a job the first of them; the last is to spare."""
STEPS = 24
"""With `rl.sample_steps`, long enough that another job comes between before the run is at its end."""
ENDLESS = 5000
"""Steps of a run that is ended from outside."""
PATIENCE_S = 600.0
"""Longest that a test waits for anything, on a machine that others use."""
SETS = ('eval.prompt_file=""', "samples.prompts=0", "logging.tensorboard=false", "rl.group_size=2",
        "data.rows_per_step=2", "rl.sample_steps=40", "checkpoint.every=2", "checkpoint.keep_last=9")  # fmt: skip
PARTITIONS = f"""
PartitionName=low Nodes={",".join(NODES)} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={",".join(NODES)} PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A controller and its nodes on this host; `folder` has a short name, because sockets lie in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "slurm.conf"
        self.env = {**clean_environment(), "SLURM_CONF": str(self.config), "HF_HUB_OFFLINE": "1"}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def write(self) -> None:
        """The configuration: no cgroups, no accounting, requeued jobs begin after 5 s instead of two minutes."""
        version = tuple(map(int, re.findall(r"\d+", _output(["slurmd", "-V"]))[:2]))
        here, user, ports = socket.gethostname(), getpass.getuser(), _free_ports(1 + len(NODES))
        # Each spells the word that tells a script of its preemption as its release did.
        word = (
            "PreemptParameters=send_user_signal"
            if version >= (24, 5)
            else "SlurmctldParameters=preempt_send_user_signal"
        )
        nodes = [
            f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        lines = [
            "ClusterName=private", f"SlurmctldHost={here}(127.0.0.1)", f"SlurmctldPort={ports[0]}",
            f"SlurmUser={user}", f"SlurmdUser={user}", "AuthType=auth/munge", "CredType=cred/munge",
            f"AuthInfo=socket={self.folder}/munge.socket,cred_expire=5", f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/%n", f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/%n.pid", f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdLogFile={self.folder}/%n.log", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none", "MpiDefault=none", "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=1500", "SlurmdParameters=config_overrides",
            "ReturnToService=2", "MessageTimeout=60", "SlurmdTimeout=60",
            "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", word,
            "SchedulerParameters=sched_interval=2,bf_interval=2", *nodes, PARTITIONS,
        ]  # fmt: skip
        self.config.write_text("\n".join(lines))
        plugin = "disabled" if version >= (23, 11) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def start(self, name: str) -> None:
        """One daemon, in the foreground of a process that this test ends."""
        at = self.folder
        munged = ["munged", "--foreground", "--force", f"--socket={at}/munge.socket", f"--key-file={at}/munge.key",
                  f"--pid-file={at}/munge.pid", f"--seed-file={at}/munge.seed",
                  f"--log-file={at}/munge.log"]  # fmt: skip
        commands = {"munged": munged, "slurmctld": ["slurmctld", "-D"]}
        command = commands.get(name, ["slurmd", "-D", "-N", name])
        with (at / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(command, env=self.env, stdout=out, stderr=out)

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def call(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def idle(self) -> bool:
        return self.call("sinfo", "-h", "-N", "-p", "low", "-o", "%t", check=False).split() == ["idle"] * len(NODES)

    def processes(self, node: str) -> list[psutil.Process]:
        """All that runs on a node for jobs: tasks and the daemons that hold them."""
        tasks = [process for process in psutil.process_iter() if self._runs_on(process, node)]
        holders = {parent for task in tasks for parent in _parents(task) if parent.name().startswith("slurmstepd")}
        return [*holders, *tasks]

    def _runs_on(self, process: psutil.Process, node: str) -> bool:
        env = environment_of(process)
        return env.get("SLURM_CONF") == str(self.config) and env.get("SLURMD_NODENAME") == node

    def kill_node(self, node: str) -> None:
        """As when its power fails."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def end(self) -> None:
        self.call("scancel", "--user", getpass.getuser(), check=False)
        with contextlib.suppress(AssertionError):
            wait_until(self.idle, self.logs, 45)
        for node in NODES:
            self.kill_node(node)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.NoSuchProcess:
        return []


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def wait_until(true: Callable[[], object], say: Callable[[], str], patience_s: float = PATIENCE_S) -> None:
    """Until it is true; fails with what `say` says."""
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, say()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)}: install Slurm and munge (Debian: slurm-wlm munge)")
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Slurm(Path(folder))
        made.write()
        try:
            made.start("munged")
            wait_until((made.folder / "munge.socket").exists, made.logs, 60)
            for name in ("slurmctld", *NODES):
                made.start(name)
            wait_until(made.idle, made.logs, 120)
            yield made
        finally:
            made.end()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that no Slurm knew of."""
    folder = tmp_path_factory.mktemp("clean")
    command = [*nftctl("launch", "clean", STEPS), "--set", "job.deterministic=true"]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "clean"


def nftctl(command: str, name: str, steps: int) -> list[str]:
    line = [sys.executable, "-m", "nftctl", command, "tiny_t2i_cpu", "--name", name, "--steps", str(steps)]
    return line + [word for value in SETS for word in ("--set", value)]


class Job:
    """A run under Slurm whose relative paths count from `folder`; by default a rank on each of two nodes."""

    def __init__(self, slurm: Slurm, folder: Path, steps: int = STEPS, per_node: int = 1) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "runs" / "job"
        setup = f'PATH="{Path(sys.executable).parent}:$PATH"'
        asked = ["--to", "slurm", "--gpus-per-node", str(per_node), "--grace", "60", "--setup", setup, "--json"]
        written = subprocess.run(
            [*nftctl("submit", "job", steps), *asked, "--output", "job.sbatch"],
            cwd=folder, env=slurm.env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert written.returncode == 0, written.stderr
        self.tested = json.loads(written.stdout)["submission"]["test_only"]
        self.out = folder / "out"
        self.id = slurm.call("sbatch", "--parsable", f"--output={self.out}", str(folder / "job.sbatch"))

    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def show(self) -> dict[str, str]:
        """What Slurm says of it, as `JobState` -> `RUNNING`."""
        words = self.slurm.call("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, pattern: str) -> None:
        """Until the job has said it."""
        wait_until(lambda: re.search(pattern, self.said(), re.MULTILINE), self.said)

    def ray_folder(self) -> Path:
        """What its Ray wrote to on each node, as Ray names it."""
        found = re.search(r"/tmp/nftctl\.\w+", self.said())
        assert found, self.said()
        return Path(found[0])

    def end(self) -> tuple[str, str, str]:
        """State, exit code and number of times it was requeued, once it has ended."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        wait_until(lambda: self.show()["JobState"] in ended, self.said)
        wait_until(self.slurm.idle, self.said)
        seen = self.show()
        return seen["JobState"], seen["ExitCode"], seen["Restarts"]


@pytest.mark.parametrize(
    ("per_node", "nodes", "ranks"),
    [(2, "node1", r"ranks 0-1 on"), (1, "node[1-2]", r"ranks 0 on .*, 1 on")],
    ids=["one", "two"],
)
def test_a_run_is_the_same_under_slurm(
    slurm: Slurm, clean: Path, tmp_path: Path, per_node: int, nodes: str, ranks: str
) -> None:
    job = Job(slurm, tmp_path, per_node=per_node)
    assert job.tested["ok"], job.tested["message"]
    assert job.end() == ("COMPLETED", "0:0", "0"), job.said()
    assert job.show()["NodeList"] == nodes
    assert re.search(ranks, job.said())
    check_same(job.run, clean, STEPS)


def test_a_run_that_is_taken_away_twice_goes_on(slurm: Slurm, clean: Path, tmp_path: Path) -> None:
    """First by hand, then by a job that needs all nodes and is worth more."""
    job = Job(slurm, tmp_path)
    job.wait_for("^step 2/")
    slurm.call("scancel", "--signal=TERM", "--batch", job.id)
    job.wait_for("^submit: attempt 2 on node1 node2")
    job.wait_for(r"^resuming .*\n(.*\n)*step \d+/")
    slurm.call(
        "sbatch", "--partition=high", f"--nodes={len(NODES)}", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    assert job.end() == ("COMPLETED", "0:0", "2"), job.said()
    assert job.said().count("stopped          by SIGTERM") == 2
    check_same(job.run, clean, STEPS)


def test_a_run_whose_node_dies_goes_on(slurm: Slurm, clean: Path, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path)
    job.wait_for("^step 3/")
    slurm.kill_node("node2")
    job.wait_for("^submit: attempt 2 on node1 node3")
    # Not before: Slurm delivers to a node that comes back what it had to say to the step that died there.
    slurm.start("node2")
    assert job.end() == ("COMPLETED", "0:0", "1"), job.said()
    check_same(job.run, clean, STEPS)


def test_sigint_saves_and_ends(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, ENDLESS)
    job.wait_for("^step 2/")
    slurm.call("scancel", "--signal=INT", "--batch", job.id)
    assert job.end() == ("FAILED", "143:0", "0"), job.said()
    rows = (job.run / "metrics.jsonl").read_text().count("\n")
    assert 2 <= rows == list_steps(job.run / "checkpoints")[-1][0] < ENDLESS
    assert not job.ray_folder().exists()


def test_scancel_ends_at_once_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, ENDLESS)
    job.wait_for("^step 3/")
    slurm.call("scancel", job.id)
    state, _, restarts = job.end()
    assert (state, restarts) == ("CANCELLED", "0"), job.said()
    assert list_steps(job.run / "checkpoints")[-1][0] >= 2
    assert not job.ray_folder().exists()
    assert [process for node in NODES for process in slurm.processes(node)] == []
