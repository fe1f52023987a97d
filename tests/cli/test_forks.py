"""A forked command is the started one: codes, both streams, input, folder, environment; and it leaves no trace."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.run.make import make_run

from . import forks
from .program import environment, nftctl


@pytest.mark.parametrize(
    ("arguments", "env", "stdin"),
    [
        (("--help",), {}, ""),
        (("launch", "--help"), {"COLUMNS": "60"}, ""),
        (("validate", "--json"), {"NFTCTL_RL__BETA": "0.5"}, ""),
        (("validate", "-", "--show-resolved"), {}, 'extends = "tiny_t2i_cpu"\n[rl]\nbeta = 0.25\n'),
        (("validate", "--set", "rl.beta=0"), {"FORCE_COLOR": "1"}, ""),
        (("launch", "tiny_t2i_cpu", "--name", "x", "--dry-run", "--json"), {}, ""),
        (("inspect-checkpoint", "tiny", "--verify"), {}, ""),
        (("diff", "tiny_t2i_cpu", "scenes_t2i_cpu"), {}, ""),
        (("profiles", "--json"), {}, ""),
        (("report", "nowhere"), {}, ""),
        (("reward-ping", "--url", "http://127.0.0.1:1"), {"NFTCTL_DEBUG": "1"}, ""),
        (("export", "nowhere", "out", "--to", "lora"), {}, ""),
        (("convert", "nowhere", "out"), {}, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_it_says_what_a_started_one_says(
    tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], stdin: str
) -> None:
    make_run(tmp_path / "runs", steps=(5,))
    assert forks.forkable(environment(env), stdin)
    forked, started = (nftctl(*arguments, cwd=tmp_path, env=env, stdin=stdin, started=how) for how in (False, True))
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)
    assert started.stdout + started.stderr


def test_a_fork_leaves_nothing_to_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = nftctl("validate", "--show-resolved", cwd=tmp_path)
    nftctl("validate", "tiny_t2i_cpu", cwd=tmp_path / "elsewhere", env={"NFTCTL_RL__BETA": "0.5"})
    again = nftctl("validate", "--show-resolved", cwd=tmp_path)
    assert (again.stdout, again.stderr) == (first.stdout, first.stderr)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "PYTHONPATH", "HF_HOME", "HOME", "LC_ALL", "OMP_NUM_THREADS"])
def test_what_is_read_at_the_start_needs_a_start(name: str) -> None:
    assert not forks.forkable(environment({name: "7"}), "")
    assert not forks.forkable(environment(), "x" * forks.ROOM)


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    arguments = ["reward-serve", "--scorer", "brightness", "--port", "0"]
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run(arguments, cwd=tmp_path, env=environment(), stdin="", timeout=1)
    assert nftctl("--version", cwd=tmp_path).returncode == 0
    left = [path for path in Path("/proc").glob("[0-9]*/cwd") if path.exists() and path.readlink() == tmp_path]
    assert left == []
