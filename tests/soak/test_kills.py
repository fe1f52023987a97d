"""Whatever ends a run of two or four ranks, wherever it strikes: resumed, it is to the bit the run that nobody touched.

Several strikes are dealt to one run, one per attempt, so that histories grow as odd as they do in real life.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Set
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, Signals

import pytest

from nftctl.run.checkpoints import list_partials, list_steps
from nftctl.run.manifest import verify
from tests.cli.test_refused_before_start import run_all
from tests.cli.test_storage_faults import FAULTS
from tests.engine import kill_runs
from tests.engine.kill_runs import NAME, Attempt, Blow, Strike, check_same, deal, last_stage, play, table
from tests.run.make import snapshot

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(3600)]

STEPS = 12
WORLD = 4
ROWS = 8
QUIET = ('eval.prompt_file=""', "samples.prompts=0", "checkpoint.keep_last=20")
LINEAR = ('rl.old.decay="linear"', "data.shuffle=true")
COPIED = ('rl.old.decay="copy"', "rl.updates_per_rollout=2", "rl.old.update_every=2", "rl.seed=3")
AVERAGED = (*LINEAR, "rl.ema_decay=0.9")
FULL = (*AVERAGED, 'model.train="full"', "optimizer.lr=1e-3")
WITH_EMA = kill_runs.PARTS | {"ema"}
INJECTED = os.pathsep.join((str(Path(kill_runs.__file__).with_name("injected")), os.environ.get("PYTHONPATH", "")))


def launch(*sets: str, steps: int = STEPS, quiet: tuple[str, ...] = QUIET) -> tuple[str, ...]:
    chosen = (part for s in (*quiet, *sets) for part in ("--set", s))
    return ("launch", "tiny_t2i_cpu", "--steps", str(steps), "--name", NAME, *chosen)


class Straight(dict[tuple[str, ...], Path]):
    """The runs that nobody touched by their settings, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, sets: tuple[str, ...]) -> Path:
        self[sets] = kill_runs.straight(self._folder / str(len(self)), launch(*sets))
        return self[sets]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    return Straight(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def blows() -> Iterator[list[Blow]]:
    """All strikes of this campaign; told at its end."""
    dealt: list[Blow] = []
    yield dealt
    print(f"\n{table(dealt)}\n{sum(blow.hit for blow in dealt)} of {len(dealt)} strikes hit")


KILLS = {
    "1 linear": (LINEAR, 1, [
        ("driver", "rollout", 2), ("rank 2", "backward", 4), ("rank 0", "save", 6), ("everybody", "reward", 8),
    ]),
    "2 copied": (COPIED, 2, [
        ("rank 0", "prepare", 2), ("driver", "optimizer", 5), ("rank 3", "reward", 7), ("group", "backward", 10),
    ]),
    "3 linear": (LINEAR, 3, [
        ("rank 1", "optimizer", 2), ("driver", "save", 6), ("everybody", "rollout", 8), ("rank 0", "backward", 11),
    ]),
    "4 copied": (COPIED, 1, [
        ("driver", "prepare", 3), ("rank 0", "save", 5), ("rank 1", "rollout", 7), ("driver", "reward", 10),
    ]),
    "5 linear": (LINEAR, 2, [
        ("everybody", "save", 4), ("rank 3", "prepare", 6), ("driver", "backward", 8), ("rank 0", "optimizer", 11),
    ]),
    "6 averaged": (AVERAGED, 2, [
        ("driver", "rollout", 2), ("rank 0", "save", 4), ("rank 2", "optimizer", 7), ("everybody", "save", 8),
        ("driver", "backward", 11),
    ]),
    "7 full": (FULL, 1, [
        ("rank 2", "save", 2), ("driver", "optimizer", 4), ("rank 1", "backward", 6), ("everybody", "save", 8),
        ("rank 0", "save", 10),
    ]),
    "8 full": (FULL, 2, [
        ("driver", "save", 2), ("rank 3", "prepare", 5), ("driver", "reward", 7), ("group", "rollout", 9),
        ("rank 1", "save", 10),
    ]),
}  # fmt: skip
"""Which run, its checkpoint.every, and who is killed in which stage from which step on: every stage at least thrice.

An adapter is saved by rank 0 alone; all weights by all ranks together, so there any of them can die of it.
"""


@pytest.mark.parametrize("run", KILLS)
def test_killed_in_any_stage(tmp_path: Path, clean: dict[tuple[str, ...], Path], blows: list[Blow], run: str) -> None:
    sets, every, victims = KILLS[run]
    strikes = [Strike(who, SIGKILL, stage, step) for who, stage, step in victims]
    arguments = launch(*sets, f"checkpoint.every={every}")
    blows += play(tmp_path / "struck", arguments, strikes, world=WORLD, label=run)
    parts = WITH_EMA if AVERAGED[-1] in sets else kill_runs.PARTS
    check_same(tmp_path / "struck" / "runs" / NAME, clean[sets], STEPS, parts)
    kill_runs.check_prompts(tmp_path / "struck", STEPS, ROWS)


PAIR = (*AVERAGED, "rl.group_size=2", "data.rows_per_step=2", "rl.sample_steps=4", "checkpoint.every=2")
PAIR_STEPS = 20
PAIR_STRIKES = [
    Strike("driver", SIGKILL, "rollout", 3),
    Strike("group", SIGTERM, "backward", 4),
    Strike("group", SIGINT, "rollout", 6),
    Strike("rank 0", SIGKILL, "save", 8),  # the one that writes an adapter
    Strike("driver", SIGTERM, "save", 8),
    Strike("driver", SIGINT, "optimizer", 10),
    Strike("rank 1", SIGKILL, "backward", 12),
    Strike("driver", SIGTERM, "reward", 13),
    Strike("group", SIGINT, "prepare", 15),
]


def test_two_ranks_killed_stopped_and_interrupted_in_turn(tmp_path: Path, blows: list[Blow]) -> None:
    """Three kills, three SIGTERM and three Ctrl-C, dealt to one run."""
    arguments = launch(*PAIR, steps=PAIR_STEPS)
    clean = kill_runs.straight(tmp_path / "clean", arguments)
    blows += play(tmp_path / "struck", arguments, PAIR_STRIKES, world=2, label="two ranks")
    check_same(tmp_path / "struck" / "runs" / NAME, clean, PAIR_STEPS, WITH_EMA)
    kill_runs.check_prompts(tmp_path / "struck", PAIR_STEPS, 2)


STOPS = {
    "1 linear": (LINEAR, 1, [
        ("rollout", 1), ("prepare", 2), ("reward", 4), ("save", 5), ("backward", 7), ("optimizer", 8), ("rollout", 10),
    ]),
    "2 copied": (COPIED, 3, [
        ("save", 3), ("rollout", 4), ("prepare", 5), ("save", 6), ("reward", 8), ("backward", 9), ("optimizer", 10),
    ]),
    "3 linear": (LINEAR, 2, [
        ("backward", 1), ("optimizer", 3), ("save", 4), ("reward", 6), ("prepare", 8), ("rollout", 10),
    ]),
}  # fmt: skip
"""Which run, its checkpoint.every, and in which stage it is asked to stop from which step on: 20 moments per signal.

By its cadence a step is saved only every second or third time; else the stop itself must do it.
"""


def test_each_campaign_strikes_every_stage_at_least_twice() -> None:
    kills = [stage for _, _, victims in KILLS.values() for _, stage, _ in victims]
    stops = [stage for _, _, moments in STOPS.values() for stage, _ in moments]
    for stages in (kills, stops):
        assert len(stages) >= 20
        assert all(stages.count(stage) >= 2 for stage in kill_runs.STAGES), stages


@pytest.mark.parametrize("run", STOPS)
@pytest.mark.parametrize("signum", [SIGTERM, SIGINT])
def test_asked_to_stop_in_any_stage(
    tmp_path: Path, clean: dict[tuple[str, ...], Path], blows: list[Blow], signum: Signals, run: str
) -> None:
    """The step is finished and saved, every time, and the run goes on from there."""
    sets, every, moments = STOPS[run]
    # A scheduler sends its signal to one process or to the whole group, a shell Ctrl-C to the group.
    strikes = [Strike(("driver", "group")[i % 2], signum, stage, step) for i, (stage, step) in enumerate(moments)]
    blows += play(tmp_path / "struck", launch(*sets, f"checkpoint.every={every}"), strikes, world=WORLD, label=run)
    check_same(tmp_path / "struck" / "runs" / NAME, clean[sets], STEPS)
    kill_runs.check_prompts(tmp_path / "struck", STEPS, ROWS)


# ---- ends that are no clean cut


def ended(attempt: Attempt, timeout: float = 120) -> tuple[int, float]:
    """Exit code and seconds to the end, when nothing of the attempt is left and what it saved is whole."""
    before = time.monotonic()
    code = attempt.finish(timeout)
    seconds = time.monotonic() - before
    assert not attempt.left()
    assert all(verify(path) == [] for _, path in list_steps(attempt.run / "checkpoints"))
    return code, seconds


def watched(attempt: Attempt, rank: int, stage: str, step: int) -> tuple[int, str]:
    """Process id of a rank that has just begun the stage, and what its log said."""
    pids = [attempt.pid_of(n) for n in range(WORLD)]
    log = attempt.run / "logs" / "latest" / f"rank_{rank}.log"
    with kill_runs.eager():
        seen = kill_runs.wait_for_stage(log, stage, step, attempt.process)
    assert seen, attempt.err
    return pids[rank], seen


@pytest.mark.parametrize(("first", "second"), [(SIGTERM, SIGTERM), (SIGINT, SIGINT), (SIGINT, SIGTERM)])
def test_a_second_signal_ends_the_run_at_once(
    tmp_path: Path, clean: dict[tuple[str, ...], Path], first: Signals, second: Signals
) -> None:
    arguments = launch(*LINEAR, "checkpoint.every=2")
    attempt = Attempt(tmp_path, arguments)
    try:
        watched(attempt, 0, "rollout", 4)
        os.kill(attempt.process.pid, first)
        time.sleep(0.05)
        os.kill(attempt.process.pid, second)
        code, seconds = ended(attempt)
    finally:
        attempt.end()
    print(f"{first.name} and {second.name}: exit {code} after {seconds:.1f} s")
    assert code == kill_runs.CODES[second], attempt.err
    assert "stopped at once" in attempt.err
    # Ray lets the driver go within a second, in which the fourth step may still end; it is not saved.
    assert len(kill_runs.rows_of(attempt.run)) in (3, 4)
    assert list_steps(attempt.run / "checkpoints")[-1][0] == 2
    assert seconds < 15
    go_on(tmp_path, arguments, clean[LINEAR])


def go_on(folder: Path, arguments: tuple[str, ...], clean: Path, parts: Set[str] = kill_runs.PARTS) -> None:
    last, _ = kill_runs.begin(folder, arguments)
    assert last.finish() == 0, last.err
    assert not last.left()
    check_same(last.run, clean, STEPS, parts)


@pytest.mark.parametrize(("rank", "stage"), [(2, "backward"), (2, "rollout"), (2, "prepare"), (0, "save")])
def test_a_rank_that_stands_still_is_named_within_the_time_out(
    tmp_path: Path, clean: dict[tuple[str, ...], Path], rank: int, stage: str
) -> None:
    limit = 20
    arguments = launch(*LINEAR, "checkpoint.every=1", f"grid.collective_timeout_s={limit}", "reward.deadline_s=9")
    attempt = Attempt(tmp_path, arguments)
    try:
        pid, seen = watched(attempt, rank, stage, 3)
        os.kill(pid, SIGSTOP)
        step = seen.split()[-1]
        assert last_stage(attempt.run / "logs" / "latest" / f"rank_{rank}.log") == seen
        code, seconds = ended(attempt)
    finally:
        attempt.end()
    print(f"SIGSTOP in {stage}: exit {code} after {seconds:.1f} s, time-out {limit} s")
    assert code == 7, attempt.err
    assert re.search(
        rf"rank {rank} did not finish step {step}, {stage} \(pid {pid} on \S+\) within the {limit} s", attempt.err
    )
    # The time-out, a moment to hear of all failures, and the end of Ray.
    assert seconds < limit + 15
    go_on(tmp_path, arguments, clean[LINEAR])


def test_a_rank_that_stands_still_while_all_write_is_named_within_the_time_out(
    tmp_path: Path, clean: dict[tuple[str, ...], Path]
) -> None:
    """The last save of a run has no step beside it, whose collectives would find out; the writers' wait much longer."""
    limit = 20
    arguments = launch(*FULL, f"grid.collective_timeout_s={limit}", "reward.deadline_s=9")
    attempt = Attempt(tmp_path, arguments, {"PYTHONPATH": INJECTED, "TEST_FAULT": "slow-shards"})
    try:
        pid, _ = watched(attempt, 2, "save", STEPS)
        time.sleep(4)  # the snapshot is taken, and all ranks are writing for some seconds more
        os.kill(pid, SIGSTOP)
        code, seconds = ended(attempt)
    finally:
        attempt.end()
    print(f"SIGSTOP while all write: exit {code} after {seconds:.1f} s, time-out {limit} s")
    assert code == 7, attempt.err
    assert re.search(
        rf"rank 2 did not finish step {STEPS}, save \(pid {pid} on \S+\) within the {limit} s", attempt.err
    )
    assert seconds < limit + 15
    go_on(tmp_path, launch(*FULL), clean[FULL], WITH_EMA)


def test_a_rank_that_crashes_is_named_with_its_stage(tmp_path: Path, clean: dict[tuple[str, ...], Path]) -> None:
    arguments = launch(*LINEAR, "checkpoint.every=1")
    attempt = Attempt(tmp_path, arguments)
    try:
        pid, seen = watched(attempt, 1, "backward", 3)
        os.kill(pid, SIGSEGV)
        code, seconds = ended(attempt)
    finally:
        attempt.end()
    print(f"SIGSEGV: exit {code} after {seconds:.1f} s\n{attempt.err}")
    assert code == 7
    assert f"rank 1 died in step {seen.split()[-1]}, backward (pid {pid} on " in attempt.err
    assert "Segmentation fault" in attempt.err  # from the rank's own log, whose end is shown
    go_on(tmp_path, arguments, clean[LINEAR])


def test_a_rank_without_memory_is_named_with_its_stage(tmp_path: Path, clean: dict[tuple[str, ...], Path]) -> None:
    arguments = launch(*LINEAR, "checkpoint.every=1")
    attempt = Attempt(tmp_path, arguments, {"PYTHONPATH": INJECTED, "TEST_FAULT": "memory"})
    try:
        code, _ = ended(attempt)
    finally:
        attempt.end()
    assert code == 7, attempt.err
    assert re.search(
        r"rank 1 failed in step 3, backward \(pid \d+ on \S+\): MemoryError: out of memory on purpose", attempt.err
    )
    go_on(tmp_path, arguments, clean[LINEAR])


# ---- asked to stop when no step runs


def test_sigterm_in_the_first_evaluation_ends_before_the_first_step(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, launch("checkpoint.every=1", quiet=()))
    try:
        watched(attempt, 0, "evaluation", 0)
        os.kill(attempt.process.pid, SIGTERM)
        code, seconds = ended(attempt)
    finally:
        attempt.end()
    print(f"SIGTERM in the first evaluation: exit {code} after {seconds:.1f} s")
    assert code == 143, attempt.err
    assert kill_runs.rows_of(attempt.run) == []
    assert list_steps(attempt.run / "checkpoints") == list_partials(attempt.run / "checkpoints") == []


@pytest.mark.parametrize("stage", ["evaluation", "commit"])
def test_sigterm_between_steps_is_heard_and_the_run_goes_on_to_the_bit(
    tmp_path: Path, clean: dict[tuple[str, ...], Path], blows: list[Blow], stage: str
) -> None:
    sets = (*LINEAR, "checkpoint.every=2", 'eval.prompt_file="embedded"', "eval.samples_per_prompt=4", "eval.every=2")
    blow = deal(tmp_path, launch(*sets), Strike("driver", SIGTERM, stage, 2), WORLD, f"in {stage}")
    blows.append(blow)
    assert blow.code == 143
    assert blow.saved == blow.rows < STEPS
    assert blow.partials == []
    go_on(tmp_path, launch(*sets), clean[LINEAR])


def test_sigterm_while_the_ranks_start_ends_before_the_first_step(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, launch(*LINEAR))
    try:
        attempt.pid_of(WORLD - 1)
        os.kill(attempt.process.pid, SIGTERM)
        code, seconds = ended(attempt)
    finally:
        attempt.end()
    print(f"SIGTERM in the start: exit {code} after {seconds:.1f} s")
    assert code == 143, attempt.err
    assert kill_runs.rows_of(attempt.run) == []


# ---- the disk


def test_a_killed_slow_writer_leaves_the_pointer_at_the_checkpoint_before(
    tmp_path: Path, clean: dict[tuple[str, ...], Path]
) -> None:
    """The second checkpoint is dispatched and not yet written when everybody is killed."""
    arguments = launch(*LINEAR, "checkpoint.every=2")
    attempt = Attempt(tmp_path, arguments, {"PYTHONPATH": INJECTED, "TEST_FAULT": "slow-writer"})
    checkpoints = attempt.run / "checkpoints"
    try:
        watched(attempt, 0, "rollout", 5)
        for pid in (attempt.process.pid, *attempt.family()):
            os.kill(pid, SIGKILL)
        assert ended(attempt)[0] == -SIGKILL
    finally:
        attempt.end()
    assert (checkpoints / "latest").readlink().name == "step_000002"
    assert [step for step, _ in list_steps(checkpoints)] == [2]
    assert [step for step, _ in list_partials(checkpoints)] == [4]
    go_on(tmp_path, arguments, clean[LINEAR])
    assert (checkpoints / "latest").readlink().name == f"step_{STEPS:06d}"


def test_every_storage_fault_is_refused_and_the_mended_run_goes_on(
    tmp_path: Path, clean: dict[tuple[str, ...], Path]
) -> None:
    """Each fault once in each part of the newest checkpoint of a real run, in copies; one of them in place."""
    arguments = launch(*LINEAR, "checkpoint.every=2")
    blow = deal(tmp_path, arguments, Strike("driver", SIGTERM, "rollout", 6), WORLD, "to be damaged")
    run = tmp_path / "runs" / NAME
    newest = list_steps(run / "checkpoints")[-1][1]
    parts = sorted(p.relative_to(newest) for p in newest.rglob("*") if p.is_file())
    assert {part.name for part in parts} > {"manifest.json"}, parts
    cases = [(fault, part) for fault in FAULTS for part in parts]
    copies = tmp_path / "copies"
    for i, (fault, part) in enumerate(cases):
        shutil.copytree(run, copies / f"case{i}", symlinks=True)
        fault(copies / f"case{i}" / newest.relative_to(run) / part)
    before = snapshot(copies)
    answers = run_all(tmp_path, [["resume", f"copies/case{i}"] for i in range(len(cases))])
    for (fault, part), (code, said) in zip(cases, answers, strict=True):
        assert code == 5, (fault.__name__, part, said)
        assert part.name in said, (fault.__name__, part, said)
    assert snapshot(copies) == before
    print(f"{len(cases)} faults refused: {len(FAULTS)} kinds in each of {len(parts)} parts of step {blow.saved}")
    for i, (_, part) in enumerate(cases):  # mended, each copy is again what the run is
        broken = copies / f"case{i}" / newest.relative_to(run) / part
        shutil.rmtree(broken) if broken.is_dir() else broken.unlink(missing_ok=True)
        (broken.with_name(f"copy-{part.name}")).unlink(missing_ok=True)
        shutil.copy(newest / part, broken)
        assert verify(copies / f"case{i}" / newest.relative_to(run)) == []
    held = (newest / parts[-1]).read_bytes()
    (newest / parts[-1]).unlink()
    refused = Attempt(tmp_path, ("resume", NAME))
    assert refused.finish() == 5
    assert parts[-1].name in refused.err
    (newest / parts[-1]).write_bytes(held)
    go_on(tmp_path, arguments, clean[LINEAR])


# ---- two at once


def test_two_runs_at_once_and_a_taken_port_do_not_meet(tmp_path: Path, clean: dict[tuple[str, ...], Path]) -> None:
    """On one host, with the port that torch would take by default occupied."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", 29500))
        taken.listen()
        attempts = [Attempt(folder, launch(*LINEAR)) for folder in folders]
        try:
            codes = [attempt.finish(400) for attempt in attempts]
        finally:
            for attempt in attempts:
                attempt.end()
    assert codes == [0, 0], [attempt.err for attempt in attempts]
    for attempt in attempts:
        check_same(attempt.run, clean[LINEAR], STEPS)
