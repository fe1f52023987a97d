"""A real one-node Ray cluster for tests: started by `ray start --head`, ended by its own process, never `ray stop`."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import clean_environment

MARK = "TEST_HEAD"

TENANT = """
import os, ray
@ray.remote(num_cpus=1, num_gpus=1)
class Tenant:
    def __init__(self):
        self.calls = 0
    def call(self):
        self.calls += 1
        return os.getpid(), self.calls, os.environ.get("CUDA_VISIBLE_DEVICES")
Tenant.options(name="tenant", namespace="theirs", lifetime="detached").remote()
"""
"""Another user's work on the cluster: an actor that outlives its program and remembers how often it was called."""

LOOK = """
import json, ray
from ray._raylet import GcsClient
ask = GcsClient(address=address)
batch = ask.get_all_resource_usage(timeout=5).resource_usage_data.batch
jobs = ask.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=5)
groups = ray.util.placement_group_table().values()
print(json.dumps({
    "tenant": ray.get(ray.get_actor("tenant", namespace="theirs").call.remote()),
    "nodes": [node["NodeID"] for node in ray.nodes() if node["Alive"]],
    "free": {name: batch[0].resources_available[name] for name in ("CPU", "GPU")},
    "jobs": len(jobs) - 1,
    "groups": [group["state"] for group in groups],
}))
"""


@dataclass(frozen=True, slots=True)
class Head:
    """A running cluster. `env` is what a process needs to be its member; `token` is what it wants to hear."""

    address: str
    folder: Path
    shim: Path
    token: str
    process: subprocess.Popen[bytes]

    @property
    def env(self) -> dict[str, str]:
        """The environment of another person on this machine who knows the cluster's token."""
        return {**clean_environment(), "RAY_TMPDIR": str(self.folder), "RAY_AUTH_TOKEN": self.token}

    @property
    def note(self) -> Path:
        """Where `ray start` noted the address."""
        return self.folder / "ray" / "ray_current_cluster"

    def run(self, program: str) -> str:
        """Run a program as a driver of this cluster, joined as Ray's own documents say; its standard output."""
        opening = f"import logging, ray\naddress = {self.address!r}\n"
        opening += "ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)\n"
        result = subprocess.run(
            [sys.executable, "-c", opening + program],
            env={**self.env, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def look(self) -> dict[str, Any]:
        """Its nodes, free resources, jobs (this look left out), placement groups, and the tenant's answer."""
        found: dict[str, Any] = json.loads(self.run(LOOK).splitlines()[-1])
        return found


@contextlib.contextmanager
def head(cpus: int = 5, gpus: int = 3, devices: str = "2,3,5") -> Iterator[Head]:
    """Start a cluster with declared, not real, GPUs. It wants a token; its workers import from `shim` first."""
    # Short: sockets have at most 107 characters, and Ray adds some seventy.
    folder = Path(tempfile.mkdtemp(prefix="head", dir="/tmp"))
    shim = folder / "shim"
    shim.mkdir()
    token = secrets.token_hex(32)
    env = {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PYTHONPATH": str(shim)}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", "0"]
    command += ["--num-cpus", str(cpus), "--num-gpus", str(gpus), "--include-dashboard", "false"]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--disable-usage-stats"],
            env={**clean_environment(), **env, "CUDA_VISIBLE_DEVICES": devices, MARK: str(folder)},
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        address = _wait_for(folder / "ray" / "ray_current_cluster", process, folder / "out")
        running = Head(address, folder, shim, token, process)
        running.run(TENANT)
        yield running
    finally:
        _end(process, folder)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(note: Path, process: subprocess.Popen[bytes], out: Path) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            if "Ray runtime started" in out.read_text() and (text := note.read_text().strip()):
                return text
        time.sleep(0.05)
    raise AssertionError(f"no Ray head: {out.read_text()}")


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Ask `ray start --block` to end; kill whatever of it is left, found by the mark in its environment alone."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.environ().get(MARK) == str(folder):
                other.kill()
    process.wait()
