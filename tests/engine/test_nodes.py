"""A run over two hosts in namespaces of their own: it is, to the bit, the run on one. Longer ones are in tests/soak."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch
from tests.engine.hosts import cluster
from tests.engine.test_world import promised, tensors_of

pytestmark = pytest.mark.ray


def test_four_ranks_on_two_hosts_are_four_ranks_on_one(
    world4: Any, reporter: Any, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    sets = ('eval.prompt_file=""', "samples.prompts=0", "logging.tensorboard=false", "data.rows_per_step=4")
    with cluster(3, 2) as (first, second):
        command = [sys.executable, "-m", "nftctl", "launch", "--steps", "2", "--name", "two", "--json"]
        command += [word for value in (*sets, "grid.address=auto") for word in ("--set", value)]
        done = first.run(*command, cwd=tmp_path)
        full = first.run(*command, "--set", "rl.group_size=6", "--name", "six", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"ranks 0-2 on {first.ip} (host1), 3 on {second.ip} (host2)" in done.stderr.splitlines()
    assert "2 nodes share the run folder and read the same base, prompt file" in done.stderr
    for rank, host in enumerate((first, first, first, second)):
        log = (tmp_path / "runs/two/logs/latest" / f"rank_{rank}.log").read_text()
        assert f"rank {rank} talks over eth0, {host.ip}" in log
    one = Path(run_job(plan_launch(tiny(2, ('job.name="one"',)), run_dir=tmp_path / "runs"), reporter, world4)["run"])
    two = tmp_path / "runs" / "two"
    rows = [[promised(json.loads(line)) for line in (run / "metrics.jsonl").open()] for run in (one, two)]
    assert len(rows[0]) == 2
    assert rows[0] == rows[1]
    assert tensors_of(one / "checkpoints/step_000002") == tensors_of(two / "checkpoints/step_000002")
    # A shortage is refused at once, with what each node has.
    assert full.returncode == 8
    said = json.loads(full.stdout)["error"]["message"]
    assert said.startswith("6 ranks need 6 CPU, 0 GPU (rl.group_size = 6); ")
    for host, cpus in ((first, 3), (second, 2)):
        assert f"{host.ip} has {cpus} CPU, 0 GPU free of {cpus} CPU, 0 GPU" in said
    assert not (tmp_path / "runs/six").exists()
