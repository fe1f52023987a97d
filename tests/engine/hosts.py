"""Several hosts on this machine: network, process, host name and mount namespaces of their own, joined by one bridge.

Each host has an address, a name that resolves to a loopback address as many distributions have it, and may run a node
of one Ray cluster. They share the file system. Killing a host ends all its processes at once; `cut` takes its link
down. Skips, with the reason, where this user may not make such namespaces.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.conftest import clean_environment

NETWORK = "10.231.77"
PORT = 6379
NEEDED = ("unshare", "nsenter", "ip", "mount")
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(slots=True)
class Host:
    """One host; its process 1 is `init`, seen from outside."""

    number: int
    folder: Path
    token: str
    holder: subprocess.Popen[bytes]
    init: int
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"host{self.number}"

    @property
    def ip(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def env(self) -> dict[str, str]:
        """The environment of a person on this host who knows the cluster's token."""
        return {**clean_environment(), "RAY_TMPDIR": str(self.folder), "RAY_AUTH_TOKEN": self.token, **QUICK}

    def inside(self, *command: str, cwd: Path | None = None) -> list[str]:
        """The command line that runs `command` on this host."""
        spaces = ("--net", "--uts", "--mount", "--pid")
        # Another mount namespace is entered at its root.
        return ["nsenter", "--target", str(self.init), *spaces, f"--wd={cwd or self.folder}", "--", *command]

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end."""
        return subprocess.run(
            self.inside(*command, cwd=cwd),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def start(self, *command: str, cwd: Path, out: Path) -> subprocess.Popen[bytes]:
        """Start a command on this host; what it prints, on both streams, goes to the file `out`."""
        with out.open("wb") as sink:
            return subprocess.Popen(
                self.inside(*command, cwd=cwd),
                env=self.env,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start_ray(self, head: Host, cpus: int) -> None:
        """Make this host a node of the cluster whose head is on `head`; does not wait."""
        where = ["--head", "--port", str(PORT)] if head is self else ["--address", f"{head.ip}:{PORT}"]
        options = ["--node-ip-address", self.ip, "--num-cpus", str(cpus), "--num-gpus", "0", "--disable-usage-stats"]
        options += ["--object-store-memory", str(80 << 20), "--include-log-monitor", "false"]
        options += ["--include-dashboard", "false"] if head is self else []
        command = [RAY, "start", "--block", *where, *options, "--temp-dir", str(self.folder / "ray")]
        with (self.folder / "out").open("wb") as out:
            self.nodes.append(
                subprocess.Popen(
                    self.inside(*command),
                    env={**self.env, "RAY_AUTH_MODE": "token"},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def wait_for_ray(self) -> None:
        """Until this host's node runs."""
        end = time.monotonic() + 60
        while "Ray runtime started" not in (said := (self.folder / "out").read_text()):
            assert time.monotonic() < end, said
            time.sleep(0.05)

    def wait_for_head(self) -> None:
        """Until the head of a cluster listens here, which is some seconds before its node runs."""
        table, end = Path(f"/proc/{self.init}/net/tcp"), time.monotonic() + 60
        # Local address and state of each socket in hexadecimal; 0A is listening.
        while f":{PORT:04X} 00000000:0000 0A " not in table.read_text() + Path(f"{table}6").read_text().replace(
            "0" * 24, ""
        ):
            assert time.monotonic() < end, (self.folder / "out").read_text()
            time.sleep(0.05)

    def processes(self, part: str) -> list[psutil.Process]:
        """Processes of this host whose command line holds `part`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                inside = _space(process.pid) == _space(self.init)
                if inside and part in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def cut(self) -> None:
        """Take the link to all others down."""
        assert self.run("ip", "link", "set", "eth0", "down").returncode == 0

    def end_ray(self) -> None:
        """Kill every process of this host's Ray, as a host that goes down would."""
        for process in [*self.processes("ray"), *self.processes("nftctl")]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for node in self.nodes:
            node.wait()
        self.nodes.clear()

    def kill(self) -> None:
        """End the host and everything on it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.holder.wait()
        for node in self.nodes:
            node.wait()


def _space(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray's own search for dead nodes, hastened: its defaults take half a minute."""


def _unshared(folder: Path, *, name: str, names: Path | None) -> tuple[subprocess.Popen[bytes], int]:
    """A process that holds new namespaces, and its number seen from outside."""
    ready = folder / f"{name}.ready"
    hide = f"mount --bind {names} /etc/hosts && " if names else ""
    script = f"hostname {name} && ip link set lo up && {hide}touch {ready} && exec sleep infinity"
    holder = subprocess.Popen(
        [*UNSHARE, "sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    end = time.monotonic() + 10
    while not ready.exists():
        if holder.poll() is not None or time.monotonic() > end:
            holder.kill()
            said = holder.communicate()[1].decode().strip()
            pytest.skip(f"namespaces cannot be made here: {said or 'no answer'}")
        time.sleep(0.02)
    return holder, psutil.Process(holder.pid).children()[0].pid


def _must(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"hosts cannot be joined here: {' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """That many hosts, numbered from 1, each able to reach the others; no Ray runs on them yet."""
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if os.geteuid() or sys.platform != "linux" or missing:
        pytest.skip(f"hosts in namespaces need Linux, root and {', '.join(missing or NEEDED)}")
    # Short: sockets have at most 107 characters, and Ray adds some seventy.
    folder = Path(tempfile.mkdtemp(prefix="hosts", dir="/tmp"))
    token, made = secrets.token_hex(32), []
    switch: subprocess.Popen[bytes] | None = None
    try:
        switch, inner = _unshared(folder, name="switch", names=None)
        wire = ("nsenter", "--target", str(inner), "--net", "--")
        _must(*wire, "ip", "link", "add", "bridge", "type", "bridge")
        _must(*wire, "ip", "link", "set", "bridge", "up")
        for number in range(1, count + 1):
            place = folder / str(number)
            place.mkdir()
            names = place / "hosts"
            names.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{number}\n")
            holder, init = _unshared(place, name=f"host{number}", names=names)
            host = Host(number, place, token, holder, init)
            made.append(host)
            _must(*wire, "ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", f"p{number}")
            _must(*wire, "ip", "link", "set", f"p{number}", "netns", str(init), "name", "eth0")
            _must(*wire, "ip", "link", "set", f"v{number}", "master", "bridge", "up")
            _must(*host.inside("ip", "addr", "add", f"{host.ip}/24", "dev", "eth0"))
            _must(*host.inside("ip", "link", "set", "eth0", "up"))
        yield made
    finally:
        for host in made:
            host.kill()
        if switch is not None:
            switch.kill()
            switch.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[list[Host]]:
    """Hosts with one node each of one Ray cluster; the first is its head."""
    with hosts(len(cpus)) as made:
        made[0].start_ray(made[0], cpus[0])
        made[0].wait_for_head()
        for host, count in zip(made[1:], cpus[1:], strict=True):
            host.start_ray(made[0], count)
        for host in made:
            host.wait_for_ray()
        yield made
