"""The sbatch script as it runs: among stub programs, then (soak) with real Ray and a real run."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nftctl.errors import UsageRefused
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.submit import slurm
from nftctl.submit.portable import profile_text
from nftctl.submit.size import Size

from .stubs import Stubs, shellcheck

SIZE = Size(nodes=2, ranks=4, ranks_per_node=2, gpus=2, cpus=8)
HEAD = "ray start --head --port=0 --include-dashboard=false --block --num-cpus=8 --num-gpus=2 --disable-usage-stats"
PROFILE = '# The profile\n\n[job]\nname = "first"\n'
REMOVED = "srun --quiet --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 rm -rf -- "


def make(
    folder: Path | str = "/", profile: str = PROFILE, name: str = "first", size: Size = SIZE, **more: object
) -> str:
    wishes = replace(slurm.Wishes(str(folder)), **more)  # type: ignore[arg-type]
    return slurm.script(profile, name, size, (), wishes)


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path / "stubs")


def test_a_ray_cluster_then_the_run_then_nothing_is_left(stubs: Stubs, tmp_path: Path) -> None:
    code, said = stubs.run(make(tmp_path), "n1,n2", {"RAY_ADDRESS": "elsewhere:1", "SLURM_RESTART_COUNT": "2"})
    assert (code, "attempt 3 on n1 n2" in said) == (0, True)
    folder = (stubs.folder / "ray-folder").read_text().strip()
    step = "--ntasks=1 --cpus-per-task=8 --nodelist=n1"
    member = f"ray start --address=10.0.0.1:6379 {HEAD.split('--include-dashboard=false ')[1]}"
    # The two srun and what they start run beside each other; each line is there once.
    assert sorted(stubs.calls) == sorted(
        [
            "scontrol show hostnames n1,n2",
            f"srun --quiet --overlap --nodes=1 {step} {HEAD}",
            "ray --head token none",
            f"srun --quiet --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8 --exclude=n1 {member}",
            "ray --address=10.0.0.1:6379 token none",
            "nftctl submit --await-nodes 2 --address 10.0.0.1:6379",
            "nftctl launch - --auto-resume --set grid.address=10.0.0.1:6379",
            "scontrol show job 77",
            f"{REMOVED}{folder}",
        ]
    )
    order = [line.split()[1] for line in stubs.calls if line.startswith("nftctl")]
    assert order == ["submit", "launch"]
    assert stubs.calls[-1].startswith(REMOVED)
    assert (stubs.folder / "profile-0.toml").read_text() == PROFILE
    assert (stubs.folder / "folder").read_text().strip() == str(tmp_path)
    assert len((stubs.folder / "token").read_text()) == 64
    # Slurm, which ends everything at once, is not to wait for a node to drain.
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0" in (stubs.folder / "environment").read_text().splitlines()
    assert not Path(folder).exists()


def test_one_node_has_no_others(stubs: Stubs) -> None:
    assert stubs.run(make(size=Size(1, 2, 2, 0, 2)))[0] == 0
    assert [line for line in stubs.calls if "--exclude" in line] == []
    assert "nftctl submit --await-nodes 1 --address 10.0.0.1:6379" in stubs.calls


@pytest.mark.parametrize("code", [1, 7, 143])
def test_a_run_that_ends_by_itself_ends_the_job_with_its_code(stubs: Stubs, code: int) -> None:
    stubs.say(code=str(code))
    assert stubs.run(make(), "n1,n2")[0] == code
    assert not [line for line in stubs.calls if "requeue" in line]


def test_sigterm_saves_then_requeues(stubs: Stubs) -> None:
    # Slurm may say it twice; nftctl must hear it once, since a second one means "do not save".
    code, said = stubs.interrupt(make(), signal.SIGTERM, signal.SIGTERM, nodes="n1,n2")
    assert code == 143
    assert stubs.calls.count("heard") == 1
    ends = [line for line in stubs.calls if line == "saved" or line.startswith(("scontrol requeue", REMOVED))]
    assert [line.split()[0] for line in ends] == ["saved", "srun", "scontrol"]
    assert stubs.calls[-1] == "scontrol requeue 77"
    assert "back into the queue" in said


def test_the_next_attempt_is_the_same_command(stubs: Stubs) -> None:
    script = make()
    stubs.interrupt(script, signal.SIGTERM)
    (stubs.folder / "hold").unlink()
    assert stubs.run(script, extra={"SLURM_RESTART_COUNT": "1"})[0] == 0
    launches = [line for line in stubs.calls if line.startswith("nftctl launch")]
    assert len(launches) == 2
    assert len(set(launches)) == 1  # --auto-resume makes one of starting and going on
    assert (stubs.folder / "profile-1.toml").read_text() == (stubs.folder / "profile-0.toml").read_text()


@pytest.mark.parametrize(
    ("count", "saved", "requeued"), [("3", False, True), ("4", False, False), ("4", True, True), ("40", True, True)]
)
def test_a_job_that_never_comes_to_a_step_is_not_requeued_for_ever(
    stubs: Stubs, tmp_path: Path, count: str, saved: bool, requeued: bool
) -> None:
    runs = tmp_path / "it's a run's folder"
    if saved:
        (runs / "first" / "checkpoints" / "step_000002").mkdir(parents=True)
    script = make(tmp_path, runs=runs.name)
    code, said = stubs.interrupt(script, signal.SIGTERM, extra={"SLURM_RESTART_COUNT": count})
    assert code == 143
    assert ("scontrol requeue 77" in stubs.calls) is requeued
    assert ("5 attempts left no checkpoint" in said) is not requeued


@pytest.mark.parametrize(
    ("state", "requeued"), [("CANCELLED", False), ("COMPLETING", False), ("TIMEOUT", False), ("RUNNING", True)]
)
def test_a_job_that_was_cancelled_is_not_requeued(stubs: Stubs, state: str, requeued: bool) -> None:
    stubs.say(job=f"JobId=77 JobName=x\n   JobState={state} Reason=None\n")
    assert stubs.interrupt(make(), signal.SIGTERM)[0] == 143
    assert ("scontrol requeue 77" in stubs.calls) is requeued


def test_lines_of_setup_may_read_what_is_not_set(stubs: Stubs) -> None:
    assert stubs.run(make(setup=['export HEARD="$NEVER_SET_BY_ANYBODY"x', "export LATER=y"]))[0] == 0
    environment = (stubs.folder / "environment").read_text().splitlines()
    assert {"HEARD=x", "LATER=y"} <= set(environment)


def test_sigint_saves_and_ends(stubs: Stubs) -> None:
    assert stubs.interrupt(make(), signal.SIGINT)[0] == 143
    assert (stubs.calls.count("heard"), stubs.calls.count("saved")) == (1, 1)
    assert "scontrol requeue 77" not in stubs.calls


@pytest.mark.parametrize("code", [0, 7])
def test_a_run_that_was_done_when_sigterm_came_is_not_requeued(stubs: Stubs, code: int) -> None:
    stubs.say(**{"after-term": str(code)})
    assert stubs.interrupt(make(), signal.SIGTERM)[0] == code
    assert "scontrol requeue 77" not in stubs.calls


def test_a_job_that_is_taken_away_before_its_run_is_requeued(stubs: Stubs) -> None:
    # Between the cluster and the run, which then never begins.
    (stubs.folder / "bin" / "nftctl").write_text('#!/bin/sh\necho "nftctl $1" >> "$STUBS/calls"\nkill -TERM "$PPID"\n')
    code, _ = stubs.run(make())
    assert code == 143
    assert [line for line in stubs.calls if line.startswith(("nftctl", "scontrol requeue"))] == [
        "nftctl submit", "scontrol requeue 77",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "gone", "job", "requeued"),
    [
        (7, True, "PreemptTime=None", True),  # a node that Slurm may not have missed yet
        (8, True, "PreemptTime=None", True),  # the same before the run began
        (7, False, "PreemptTime=2031-01-01T00:00:00", True),  # Ray's steps alone were told
        (7, False, "PreemptTime=None", False),  # a rank of its own doing, which would die again
        (3, True, "PreemptTime=None", False),  # refused: no other node would change that
        (7, True, "JobState=CANCELLED PreemptTime=None", False),
    ],
)
def test_a_run_whose_node_was_taken_from_it_is_requeued(
    stubs: Stubs, code: int, gone: bool, job: str, requeued: bool
) -> None:
    stubs.say(code=str(code), job=f"JobId=77 {job}\n", **({"gone": ""} if gone else {}))
    assert stubs.run(make(), "n1,n2")[0] == code
    assert ("scontrol requeue 77" in stubs.calls) is requeued


def test_a_job_whose_nodes_never_were_all_there_ends(stubs: Stubs) -> None:
    """Else one that cannot start would come back for ever."""
    stubs.say(gone="")
    (stubs.folder / "bin" / "nftctl").write_text('#!/bin/sh\necho "nftctl $1" >> "$STUBS/calls"\nexit 8\n')
    assert stubs.run(make(), "n1,n2")[0] == 8
    assert [line for line in stubs.calls if line.startswith(("nftctl", "scontrol requeue"))] == ["nftctl submit"]


def test_sigterm_does_not_wait_for_nodes_that_never_join(stubs: Stubs) -> None:
    # The grace is shorter than the wait for nodes.
    (stubs.folder / "bin" / "nftctl").write_text('#!/bin/sh\nkill -TERM "$PPID"\nexec /bin/sleep 50\n')
    assert stubs.run(make(), timeout=40)[0] == 143
    assert stubs.calls[-1] == "scontrol requeue 77"


def test_sigint_is_the_last_word_even_where_a_node_is_gone(stubs: Stubs) -> None:
    stubs.say(**{"after-term": "7", "gone": ""})
    assert stubs.interrupt(make(), signal.SIGINT)[0] == 7
    assert "scontrol requeue 77" not in stubs.calls


def test_a_job_that_slurm_does_not_take_back_says_what_to_do(stubs: Stubs) -> None:
    stubs.say(**{"no-requeue": ""})
    code, said = stubs.interrupt(make(), signal.SIGTERM)
    assert (code, "sbatch this file again" in said) == (143, True)


def test_a_head_that_does_not_come_up_ends_the_job(stubs: Stubs) -> None:
    stubs.say(**{"silent-ray": ""})
    code, said = stubs.run(make())
    assert (code, "Ray did not start on n1" in said) == (8, True)
    assert not [line for line in stubs.calls if line.startswith("nftctl")]


def test_a_missing_program_is_named(stubs: Stubs) -> None:
    (stubs.folder / "bin" / "scontrol").unlink()
    for program in ("env", "sed"):
        (stubs.folder / "bin" / program).symlink_to(shutil.which(program) or "")
    code, said = stubs.run(make(setup=[f"PATH={stubs.folder}/bin"]))
    assert (code, "there is no scontrol on PATH" in said) == (8, True)
    assert stubs.calls == []


def test_variables_of_another_day_do_not_reach_the_run(stubs: Stubs) -> None:
    extra = {"NFTCTL_RL__BETA": "3", "NFTCTL_REWARD_TOKEN": "s", "NFTCTL_DEBUG": "1", "NFTCTL_PROFILE": "p", "B": "b"}
    # Nor do those that a line of --setup brings along.
    assert stubs.run(make(setup=["export NFTCTL_RL__SEED=7"]), extra=extra)[0] == 0
    seen = (stubs.folder / "environment").read_text().splitlines()
    kept = sorted(line for line in seen if line.startswith(("NFTCTL_", "B=")))
    assert kept == ["B=b", "NFTCTL_DEBUG=1", "NFTCTL_REWARD_TOKEN=s"]


def test_what_a_device_left_open_means_is_said() -> None:
    assert "so it is" not in make()
    assert "\n#\n# so it is\n#\n#   sbatch FILE" in make(size=replace(SIZE, why="so it is"))


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=20)
NASTY = st.sampled_from(
    [
        "$(touch bad)",
        "`touch bad`",
        "';touch bad;'",
        '";touch bad;"',
        "a\nEND_OF_PROFILE\ntouch bad",
        "-n",
        "@mark@",
        "*",
    ]
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NASTY | WORDS, folder=NASTY | WORDS, token=NASTY | WORDS)
def test_no_value_becomes_shell(name: str, folder: str, token: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("place")
    stubs, home = Stubs(place / "stubs"), place / f"x{folder}"
    try:
        home.mkdir()
    except OSError:  # longer than a name of a file may be
        return
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], flags={"job.name": name}, env={})
    profile = profile_text(resolved) + "".join(f"# {line}\n" for line in name.splitlines() if line.isprintable())
    script = slurm.script(profile, name, Size(1, 2, 2, 0, 2), (token,), slurm.Wishes(str(home)))
    code, said = stubs.run(script)
    assert code == 0, said
    read = tomllib.loads((stubs.folder / "profile-0.toml").read_text())
    assert read["job"]["name"] == name
    assert not list(place.rglob("bad"))
    assert not Path("/bad").exists()


def test_a_line_of_the_profile_that_looks_like_its_end_is_not(stubs: Stubs) -> None:
    profile = "END_OF_PROFILE\nEND_OF_PROFILE_\n"
    assert stubs.run(make(profile=profile))[0] == 0
    assert (stubs.folder / "profile-0.toml").read_text() == profile


def test_the_directives_come_before_anything_that_runs() -> None:
    script = make(memory="64G", directives=["--partition=a b", "-A me"], grace_s=30, name="né w")
    lines = script.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=n__w", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=8",
        "#SBATCH --gpus-per-node=2", "#SBATCH --mem=64G", "#SBATCH --open-mode=append", "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@30", "#SBATCH --partition=a b", "#SBATCH -A me",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "line"),
    [("directives", "partition=a"), ("directives", ""), ("directives", "--a\nrm x"), ("setup", "a\rb"), ("setup", " ")],
)
def test_what_is_not_one_line_is_refused(option: str, line: str) -> None:
    with pytest.raises(UsageRefused, match=r"--sbatch|--setup"):
        make(**{option: [line]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("directives", "seconds"),
    [
        ([], None),
        (["--time=3"], 180),
        (["-t 3:05"], 185),
        (["-t1:02:03"], 3723),
        (["--partition=a --time 2-3"], 183_600),
        (["--time=1-00:10", "--account=x"], 87_000),
        (["--time=1-0:10:05"], 87_005),
        (["--time=5", "--time=7"], 420),  # the last one counts, as it does for sbatch
        (["--time=0"], None),  # no limit
        (["--time=UNLIMITED"], None),
        (["--time-min=1", "--test-only"], None),
    ],
)
def test_the_time_limit_as_sbatch_reads_it(directives: list[str], seconds: int | None) -> None:
    assert slurm.time_limit(directives) == seconds


def test_a_time_limit_that_leaves_no_time_is_refused() -> None:
    """Such a job would be told to stop as soon as it begins, and go back into the queue for ever."""
    with pytest.raises(UsageRefused, match="gives the job 180 s, and 120 s before their end"):
        make(directives=["--time=3"], grace_s=120)
    assert "#SBATCH --time=3:01\n" in make(directives=["--time=3:01"], grace_s=120)


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    files = []
    for number, script in enumerate(
        [
            make(),
            make("/a b/$c", size=Size(1, 2, 2, 0, 2), setup=["module load cuda", ". /v/bin/activate"], memory="1G"),
            make(profile=profile_text(load_profile(bundled_profiles()["tiny_t2i_cpu"], env={}))),
        ]
    ):
        files.append(tmp_path / f"{number}.sbatch")
        files[-1].write_text(script)
    # What --setup names is on the cluster, not here.
    assert shellcheck(*files, shell="bash", besides="SC1091") == (0, "")


def test_slurm_itself_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.test_only("x") is None
    program = tmp_path / "sbatch"
    program.write_text('#!/bin/sh\nread -r line\necho "sbatch: $1 $line" >&2\nexit "${#line}"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert slurm.test_only("\n") == (True, "sbatch: --test-only")
    assert slurm.test_only("abc\n") == (False, "sbatch: --test-only abc")


@pytest.mark.ray
@pytest.mark.soak
def test_a_real_run_is_taken_away_and_goes_on(tmp_path: Path) -> None:
    """Two Ray nodes, the real digits on two ranks: SIGTERM after a step, saved and requeued, and the rest of it."""
    import json

    stubs = Stubs(tmp_path / "stubs")
    for name in ("nftctl", "ray", "sleep"):
        (stubs.folder / "bin" / name).unlink()
    sets = [
        "grid.device=cpu", "rl.group_size=2", "data.rows_per_step=8", 'eval.prompt_file=""', "samples.prompts=0",
        "logging.tensorboard=false",
    ]  # fmt: skip
    flags = {"job.name": "taken", "rl.max_steps": 30}
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, flags=flags, env={})
    setup = [f"PATH={stubs.folder}/bin:{Path(sys.executable).parent}:$PATH"]
    script = make(tmp_path, profile_text(resolved), "taken", Size(2, 2, 1, 0, 1), setup=setup, grace_s=60)
    metrics = tmp_path / "runs" / "taken" / "metrics.jsonl"
    extra = {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = stubs.start(script, "a,b", extra)
    out = []
    for line in process.stderr or ():
        out.append(line)
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143, "".join(out)
    assert stubs.calls[-1] == "scontrol requeue 77"
    done = len(metrics.read_text().splitlines())
    assert 1 <= done < 30
    script = script.replace("max_steps = 30", f"max_steps = {done + 2}")
    code, said = stubs.run(script, "a,b", {"SLURM_RESTART_COUNT": "1", **extra}, timeout=280)
    assert (code, f"steps {done} -> {done + 2}" in said) == (0, True), said
    steps = [json.loads(row)["step"] for row in metrics.read_text().splitlines()]
    assert steps == list(range(1, done + 3))
    assert not [
        path for path in Path("/tmp").glob("nftctl.*") if path.stat().st_uid == os.getuid() and (path / "ray").exists()
    ]
