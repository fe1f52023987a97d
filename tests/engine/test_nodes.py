"""A run over two hosts in namespaces of their own: it is, to the bit, the run on one. Longer ones are in tests/soak.

Four ranks on one, two and three nodes are there too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import finished_run
from tests.engine.hosts import cluster
from tests.engine.kill_runs import check_same

pytestmark = pytest.mark.ray

SETS = ('eval.prompt_file=""', "samples.prompts=0", "grid.address=auto")


def test_two_ranks_on_two_hosts_are_two_ranks_on_one(finished: Any, tmp_path: Path) -> None:
    with cluster(1, 1) as (first, second):
        command = [sys.executable, "-m", "nftctl", *finished_run.ARGUMENTS, "--json"]
        command += [word for value in SETS for word in ("--set", value)]
        done = first.run(*command, "--name", "two", cwd=tmp_path)
        full = first.run(*command, "--name", "six", "--set", "rl.group_size=6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"ranks 0 on {first.ip} (host1), 1 on {second.ip} (host2)" in done.stderr.splitlines()
    assert "2 nodes share the run folder and read the same base, prompt file" in done.stderr
    for rank, host in enumerate((first, second)):
        log = (tmp_path / "runs/two/logs/latest" / f"rank_{rank}.log").read_text()
        assert f"rank {rank} talks over eth0, {host.ip}" in log
    check_same(tmp_path / "runs/two", finished.run, finished_run.STEPS)
    # A shortage is refused at once, with what each node has.
    assert full.returncode == 8
    said = json.loads(full.stdout)["error"]["message"]
    assert said.startswith("6 ranks need 6 CPU, 0 GPU (rl.group_size = 6); ")
    for host in (first, second):
        assert f"{host.ip} has 1 CPU, 0 GPU free of 1 CPU, 0 GPU" in said
    assert not (tmp_path / "runs/six").exists()
