"""`nftctl submit`: what is refused before anything is handed over or written, and what comes out otherwise."""

from __future__ import annotations

import json
import os
import resource
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nftctl.cli import main
from nftctl.cli import submit as command
from tests.submit.job_server import FakeJobs, serving

from .program import nftctl

Run = Callable[..., tuple[int, str, str]]
KUBERNETES = ("--to", "kubernetes", "--image", "i:1", "--volume", "runs:/data")
DESCRIBED = ["to", "run", "run_dir", "nodes", "ranks", "gpus_per_node", "cpus_per_node"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`nftctl submit ...` in an empty folder: exit code, stdout, stderr."""
    for name in [name for name in os.environ if name.startswith(("NFTCTL_", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def submit(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.run(["submit", *arguments])
        said = capsys.readouterr()
        return int(code), said.out, said.err

    return submit


@pytest.fixture
def fake() -> Iterator[FakeJobs]:
    with serving(FakeJobs()) as running:
        yield running


def profile_in(script: str) -> dict[str, Any]:
    """The profile of an sbatch script or of a job's command."""
    return tomllib.loads(script.split("END_OF_PROFILE'")[1].split("\n", 1)[1].split("\nEND_OF_PROFILE\n")[0])


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing says where to"),
        (("--to", "ray", "--status", "j"), "--to and --status go not together"),
        (("--to", "aws"), 'there is no --to "aws"'),
        (("--to", "slurm", "--image", "x", "--follow"), "--image, --follow means nothing with --to slurm"),
        (("--to", "ray", "--output", "x"), "--output means nothing with --to ray"),
        (("--to", "slurm", "--max-restarts", "1"), "--max-restarts means nothing with --to slurm"),
        (("--status", "j", "--grace", "3"), "--grace means nothing with --status"),
        (("--status", "j", "--follow"), "--follow means nothing with --status"),
        (("profile.toml", "--stop", "j"), "--stop is about a job and takes no profile"),
        (("--logs", "j", "--steps", "3"), "--logs is about a job and takes no profile"),
        (("--to", "kubernetes"), "--to kubernetes needs --image and --volume"),
        (("--to", "kubernetes", "--volume", "a:/b"), "--to kubernetes needs --image"),
        (("--to", "kubernetes", "--image", "a"), "--to kubernetes needs --volume"),
        (("--to", "slurm", "--memory-per-node", "much"), '--memory-per-node "much" is no size of slurm'),
        (("--to", "slurm", "--memory-per-node", "512Gi"), '--memory-per-node "512Gi" is no size of slurm'),
        (("--to", "ray"), "which Ray cluster?"),
        (("--status", " ", "--address", "http://h"), "the id of the job is empty"),
        (("--to", "slurm", "--name", ""), "--name is empty"),
        ((*KUBERNETES, "--memory-per-node", "4g"), '--memory-per-node "4g" is no size of kubernetes'),
        ((*KUBERNETES, "--name", " "), "--name is empty"),
        ((*KUBERNETES[:-1], "runs:/etc/nftctl"), "is in the way of /etc/nftctl"),
        ((*KUBERNETES, "--secret", "scorer"), "--secret scorer means nothing: no reward provider"),
        (("--await-nodes", "2", "--address", "http://h:1"), '--address "http://h:1" is not HOST:PORT'),
        (("--await-nodes", "2", "--address", "head"), '--address "head" is not HOST:PORT'),
        (("--await-nodes", "2", "--address", "ray://h:1"), "is Ray's client mode"),
        (("--await-nodes", "2"), '--address "" is not HOST:PORT'),
    ],
)
def test_a_command_line_that_cannot_be_meant(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, said = run(*arguments)
    assert (code, out) == (2, "")
    assert message in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "target", [("--to", "slurm", "--output", "x"), (*KUBERNETES, "--output", "x"), ("--to", "ray")]
)
def test_a_wrong_profile_is_refused_with_all_findings(
    run: Run, tmp_path: Path, fake: FakeJobs, target: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", fake.address)
    code, out, said = run("tiny_t2i_cpu", *target, "--set", "rl.group_size=1", "--set", "optimizer.betas=[2,3]")
    assert (code, out) == (3, "")
    assert "error[group-size]" in said
    assert "error[optimizer-betas]" in said
    assert list(tmp_path.iterdir()) == []
    assert fake.asked == []


def test_a_path_that_leads_nowhere_on_the_cluster_is_refused(run: Run, fake: FakeJobs, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a red circle\n" * 9)
    code, _, said = run("--to", "ray", "--address", fake.address, "--set", "data.prompt_file=p.txt")
    assert code == 3
    assert 'error[path-elsewhere]: data.prompt_file = "p.txt" is relative' in said
    assert 'error[path-elsewhere]: job.run_dir = "runs" is relative' in said
    assert fake.bodies == []
    code, _, said = run(*KUBERNETES, "--set", f"data.prompt_file={prompts}", "--run-dir", "/elsewhere")
    assert code == 3
    assert f'error[path-elsewhere]: data.prompt_file = "{prompts}" is not on the volume' in said
    assert 'error[path-elsewhere]: job.run_dir = "/elsewhere" is not on the volume' in said


def test_a_file_is_never_written_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    code, out, said = run("--to", "slurm", "--output", "x")
    assert (code, out) == (2, "")
    assert "x is there already" in said
    assert (tmp_path / "x").read_text() == "mine"
    assert run("--to", "slurm", "--output", "no/where")[0] == 2


def test_half_a_file_is_not_left(run: Run, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a disk that is full
    try:
        code, out, said = run("--to", "slurm", "--output", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, out) == (2, "")
    assert "x cannot be written: File too large" in said
    assert list(tmp_path.iterdir()) == []


# -- slurm and kubernetes -------------------------------------------------------------------------------------------


def test_a_script_is_printed_or_written(run: Run, tmp_path: Path) -> None:
    sets = ("--set", "rl.group_size=12", "--set", "grid.device=cuda")
    arguments = ("--to", "slurm", "--name", "it's", *sets, "--sbatch", "--time=1:00:00")
    code, out, said = run(*arguments)
    assert code == 0
    assert out.startswith("#!/bin/bash\n")
    assert "run it's: 12 ranks on 2 nodes with 6 GPUs and 24 CPUs each" in said
    assert f"cd -- {tmp_path}\n" in out
    assert "#SBATCH --time=1:00:00\n" in out
    assert profile_in(out)["job"] == {"name": "it's"}
    assert profile_in(out)["rl"]["group_size"] == 12
    code, written, said = run(*arguments, "--output", "a b.sbatch")
    assert (code, written) == (0, "a b.sbatch\n")
    assert (tmp_path / "a b.sbatch").read_text() == out
    assert "next: sbatch 'a b.sbatch'" in said
    assert run(*arguments, "--output", "c", "--dry-run")[1] == out
    assert not (tmp_path / "c").exists()


def test_what_slurm_says_to_the_script_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sbatch"
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    down = "allocation failure: Unable to contact slurm controller (connect failure)"
    for code, says, words, ok in (
        (0, "fine", "sbatch --test-only accepts it: fine", True),
        (1, "too large", "warning: sbatch --test-only refuses it: too large", False),
        (1, down, f"warning: no Slurm controller answered, so the script is not tested; sbatch says: {down}", None),
    ):
        program.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
        program.chmod(0o755)
        ended, out, said = run("--to", "slurm", "--json")
        assert (ended, words in said) == (0, True)
        assert json.loads(out)["submission"]["test_only"] == {"ok": ok, "message": says}


def test_a_manifest_takes_the_volume_for_what_is_on_it(run: Run) -> None:
    sets = ("--set", "rl.init_from=/data/base", "--set", "data.prompt_file=/data/p.txt", "--set", "eval.prompt_file=")
    code, out, said = run("tiny_t2i_cpu", *KUBERNETES, *sets, "--name", "My_Run", "--max-restarts", "2")
    assert code == 0, said
    config, job = yaml.safe_load_all(out)
    profile = tomllib.loads(config["data"]["profile.toml"])
    assert profile["job"] == {"name": "My_Run", "run_dir": "/data/runs"}
    assert profile["grid"] == {"address": "auto"}
    assert profile["rl"]["init_from"] == "/data/base"
    assert job["spec"]["entrypoint"] == "sh /etc/nftctl/launch.sh"
    launch = "exec nftctl launch /etc/nftctl/profile.toml --auto-resume --max-restarts 2\n"
    assert config["data"]["launch.sh"].endswith(launch)
    assert "left to the pod, which sees the volume: init-from-missing of rl.init_from" in said
    assert "RayJob my-run-" in said  # with a hash, since my-run is another run
    assert (
        config["metadata"]["name"]
        == job["metadata"]["name"]
        == json.loads(run("tiny_t2i_cpu", *KUBERNETES, *sets, "--name", "My_Run", "--json")[1])["submission"]["object"]
    )
    # What lies on the volume says nothing of its size here; the packaged base does, where its ranks compute on CPUs.
    assert "No memory is asked for" in out
    assert 'memory: "6Gi"' in run("tiny_t2i_cpu", *KUBERNETES)[1]
    assert "No memory is asked for" in run("tiny_t2i_cpu", *KUBERNETES, "--set", "grid.device=cuda")[1]
    # A file that is neither here nor on the volume is missed as ever.
    code, _, said = run("tiny_t2i_cpu", *KUBERNETES, "--set", "rl.init_from=/elsewhere/base")
    assert (code, "error[init-from-missing]" in said) == (3, True)


def test_no_secret_is_ever_in_a_text(run: Run, fake: FakeJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NFTCTL_REWARD_TOKEN", "hush-hush")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hush-hush")
    http = '{name="r", kind="http", url="http://r:80", revision="1"}'
    sets = ("tiny_t2i_cpu", "--set", f"reward.providers=[{http}]", "--run-dir", "/data/runs")
    for target in (("--to", "slurm"), (*KUBERNETES, "--secret", "scorer"), ("--to", "ray", "--address", fake.address)):
        code, out, said = run(*sets, *target)
        assert code == 0, said
        assert "hush-hush" not in out + said
    assert "hush-hush" not in json.dumps(fake.bodies)
    assert "NFTCTL_REWARD_TOKEN is not sent to the cluster" in said
    assert "without --secret no pod gets NFTCTL_REWARD_TOKEN" in run(*sets, *KUBERNETES)[2]


def test_a_profile_on_standard_input_is_read_once(tmp_path: Path) -> None:
    text = 'extends = "tiny_t2i_cpu"\n[rl]\nmax_steps = 3\n'
    answer = nftctl("submit", "-", "--to", "slurm", cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, stdin=text)
    assert answer.returncode == 0, answer.stderr
    profile = profile_in(answer.stdout)
    assert (profile["job"]["name"].startswith("stdin-2"), profile["rl"]["max_steps"]) == (True, 3)


@pytest.mark.parametrize("target", [("--to", "slurm"), KUBERNETES])
def test_the_object_of_a_text(run: Run, target: tuple[str, ...]) -> None:
    code, out, _ = run(*target, "--json", "--name", "n")
    document = json.loads(out)
    assert (code, list(document)) == (
        0, ["schema_version", "command", "ok", "exit_code", "diagnostics", "dry_run", "submission"],
    )  # fmt: skip
    own = "test_only" if target[1] == "slurm" else "object"
    assert list(document["submission"]) == [*DESCRIBED, own, "output", "text"]
    # The embedded default is made for CPUs.
    assert (document["submission"]["run"], document["submission"]["gpus_per_node"]) == ("n", 0)
    assert 'grid.device = "cuda" asks for them' in document["submission"]["text"]
    assert "gpu" not in "".join(
        line for line in document["submission"]["text"].splitlines() if line.startswith("#SBATCH") or "nvidia" in line
    )
    assert "launch" in document["submission"]["text"]


@pytest.mark.parametrize("target", [("--to", "slurm"), KUBERNETES])
def test_an_interface_of_other_machines_is_not_looked_for_here(run: Run, target: tuple[str, ...]) -> None:
    code, out, said = run(*target, "--set", "grid.interface=none-such")
    assert (code, "none-such" in out) == (0, True), said


# -- ray ------------------------------------------------------------------------------------------------------------


def test_a_run_is_handed_to_a_job_server(run: Run, fake: FakeJobs) -> None:
    arguments = ("tiny_t2i_cpu", "--to", "ray", "--address", fake.address, "--run-dir", "/shared", "--name", "n")
    code, out, said = run(*arguments, "--setup", ". /v/bin/activate", "--grace", "9", "--set", "grid.address=h:1")
    assert (code, out) == (0, "raysubmit_0\n")
    (body,) = fake.bodies
    assert body["entrypoint"].startswith(". /v/bin/activate\n# All that NFTCTL_ variables said is in the profile")
    assert "\nexec nftctl launch - --auto-resume <<'END_OF_PROFILE'\n" in body["entrypoint"]
    assert profile_in(body["entrypoint"])["grid"] == {"address": "auto"}
    assert profile_in(body["entrypoint"])["job"] == {"name": "n", "run_dir": "/shared"}
    assert body["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "9"}}
    assert "grid.address = h:1 is not used" in said
    assert "nftctl submit --logs raysubmit_0 --follow" in said
    assert run(*arguments, "--dry-run")[0] == 0
    assert len(fake.bodies) == 1
    assert run(*arguments, "--max-restarts", "2")[0] == 0
    assert 'nftctl launch "$folder/profile.toml" --auto-resume --max-restarts 2\n' in fake.bodies[1]["entrypoint"]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (("SUCCEEDED", 0), 0), (("FAILED", 7), 7), (("FAILED", None), 8), (("STOPPED", None), 143),
        (("FAILED", -9), 137),  # a signal ended it, as the system does that has no memory left
    ],
)  # fmt: skip
def test_who_follows_a_job_ends_as_the_run_does(
    run: Run, fake: FakeJobs, ends: tuple[str, int | None], expected: int
) -> None:
    fake.ends = ends
    fake.add("j")
    assert run("--logs", "j", "--follow", "--address", fake.address)[:2] == (expected, "one\ntwo\n")
    fake.add("j")
    code, out, _ = run("--logs", "j", "--follow", "--address", fake.address, "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["ok"]) == (expected, expected, expected == 0)
    assert document["job"] == {
        "id": "j", "address": fake.address, "run": "first", "status": ends[0], "message": "Job is RUNNING.",
        "exit_code": ends[1],
    }  # fmt: skip


def test_questions_about_a_job(run: Run, fake: FakeJobs) -> None:
    fake.add("j", "FAILED", 3)
    fake.add("k")
    to = ("--address", fake.address)
    assert run("--status", "j", *to)[:2] == (0, "j: FAILED, exit code 3\n")
    assert run("--logs", "j", *to)[:2] == (0, "one\ntwo\n")
    assert run("--stop", "k", *to)[:2] == (0, "k: STOPPED\n")
    assert json.loads(run("--stop", "k", *to, "--json")[1])["stopped"] is False
    assert json.loads(run("--logs", "j", *to, "--json")[1])["logs"] == "one\ntwo\n"
    assert run("--status", "other", *to)[0] == 2


def test_a_server_that_is_not_there_is_the_environments_fault(run: Run) -> None:
    code, out, said = run("--status", "j", "--address", "http://127.0.0.1:1")
    assert (code, out) == (8, "")
    assert "no job server at http://127.0.0.1:1" in said


# -- the nodes of a script ------------------------------------------------------------------------------------------


def test_nodes_are_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from nftctl.engine import cluster

    sizes = iter([1, 1, 3])
    asked = []

    def look_at(grid: Any, env: Any) -> Any:
        asked.append(grid.address)
        return cluster.Cluster(grid.address, "", "", "", (None,) * next(sizes), (), False)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster, "look_at", look_at)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    code, out, said = run("--await-nodes", "3", "--address", "10.0.0.1:6379")
    assert (code, out) == (0, "")
    assert asked == ["10.0.0.1:6379"] * 3
    assert "3 of 3 nodes have joined" in said
    sizes = iter([1, 2])
    monkeypatch.setattr(command, "AWAIT_S", -1.0)
    code, _, said = run("--await-nodes", "3", "--address", "10.0.0.1:6379")
    assert (code, "1 of 3 nodes joined" in said) == (8, True)
