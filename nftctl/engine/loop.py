"""The imperative loop: start everything, take step after step on all ranks, stop cleanly however it ends.

Owns the order of a run and the one RunState. A failed step leaves cursor and checkpoint where they were; whatever
happens, no process of the run is left behind.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from nftctl.engine import services
from nftctl.engine.alarms import Alarm
from nftctl.engine.cluster import Cluster, find_cluster
from nftctl.engine.evaluation import Evaluation
from nftctl.engine.group import Group
from nftctl.engine.looking import Looking
from nftctl.engine.lost import noted
from nftctl.engine.observation import Observation, observe
from nftctl.engine.pictures import write_curve
from nftctl.engine.placement import refuse_shadowed
from nftctl.engine.plan import JobPlan, plan_versions
from nftctl.engine.reporter import Reporter
from nftctl.engine.saving import Checkpoints
from nftctl.engine.worker import Rewards, WorkerSpec
from nftctl.errors import CheckpointUnusable, NftctlError, RewardFailed, TrainingFailed
from nftctl.profile.schema import Profile
from nftctl.run.canonical import pretty_bytes
from nftctl.run.checkpoints import discard_partials, list_steps, set_aside_newer
from nftctl.run.directory import RunDirectory, atomic_write, begin_again
from nftctl.run.disk import cure
from nftctl.run.ending import recorded
from nftctl.run.rows import done_again
from nftctl.run.state import RunState

_stop_signal = 0

Stage = Literal["starting", "stepping", "ending"]
_stage: Stage = "starting"


def request_stop(signum: int) -> None:
    """Finish the running step, save, and end. Safe to call from a signal handler."""
    global _stop_signal
    _stop_signal = signum


def stage() -> Stage:
    """Where the job of this process is: before its first step there is nothing to finish, and after its last one
    nothing but the end."""
    return _stage


def _enter(name: Stage) -> None:
    global _stage
    _stage = name


def run_job(plan: JobPlan, reporter: Reporter, group: Group | None = None) -> dict[str, Any]:
    """Run `plan` to its end and return the closing summary.

    Starts and ends its own ranks, unless a started `group` of the right size is lent; that one is left running.
    Raises before anything is created: EnvironmentUnfit when Ray has no place for it, RewardFailed when an http provider
    is not what is pinned. Then CheckpointUnusable when the run folder is in use, TrainingFailed when a rank fails.
    """
    try:
        return _run_job(plan, reporter, group)
    except OSError as error:
        saved = list_steps(plan.run_path / "checkpoints")
        raise CheckpointUnusable(
            f"cannot write to {plan.run_path}: {error.strerror or error}",
            hint=cure(error)
            + (f"; what was saved is whole: nftctl resume {shlex.quote(str(saved[-1][1]))}" if saved else ""),
        ) from error


def _run_job(plan: JobPlan, reporter: Reporter, group: Group | None) -> dict[str, Any]:
    cluster = find_cluster(plan.profile, os.environ, reporter.note) if group is None else None
    if group is None and cluster is None:
        refuse_shadowed(Path.cwd())
    judging = services.for_evaluation(plan.profile)
    http = services.ask_http(plan.profile, plan.revisions)
    http_judges = services.ask_http(judging, plan.judges)
    run = _open_folder(plan)
    with run.lock(), contextlib.ExitStack() as stack:
        # Forgotten at the end and not at the start: a signal may already be there.
        stack.callback(request_stop, 0)
        _enter("starting")
        if plan.continues:
            discard_partials(run.checkpoints)
            set_aside_newer(run.checkpoints, plan.state.step)
            atomic_write(run.run_json, pretty_bytes(run.read_record() | {"total_steps": plan.total_steps}))
        logs = run.new_attempt()
        ending = stack.enter_context(recorded(logs))
        stack.enter_context(noted(logs))
        host = services.LOOPBACK if cluster is None or cluster.only_here else cluster.our_ip
        embedded = stack.enter_context(services.embedded(plan.profile, plan.revisions, logs, host=host))
        judges = http_judges | stack.enter_context(services.embedded(judging, plan.judges, logs, "eval", host))
        answered = [(http | embedded)[p.name] for p in plan.profile.reward.providers]
        observation = stack.enter_context(observe(run, plan, reporter))
        if again := done_again(observation.metrics, plan.state.step):
            reporter.note(again)
        observation.refuse_standing(f"nftctl resume {shlex.quote(str(run.path))}")
        if group is None:
            reporter.note(f"{'starting Ray' if cluster is None else 'joining it'} with {plan.profile.ranks} ranks")
            group = stack.enter_context(ranks_of(plan, logs, cluster, reporter))
        spec = replace(
            spec_of(plan, answered, logs),
            judges=tuple(judges[p.name].endpoint for p in judging.reward.providers),
            base_grid=Evaluation.of(plan.profile, plan.prompt_path).base_grid,
        )
        facts = group.call("build", spec)[0]
        if plan.restart:
            _count_restart(plan, run, logs)
        reporter.note(_built(plan.profile, group.device, facts))
        summary = _Run(plan, run, group, observation, reporter).go()
        _enter("ending")
        if summary["stopped"]:
            ending.state, ending.reason = "stopped", summary["stopped"]
        return summary


def _built(profile: Profile, device: str, facts: Mapping[str, Any]) -> str:
    """What the ranks have built, in one line."""
    loaded = f"{facts['tensors_loaded']} of {facts['tensors_expected']} base tensors loaded"
    text = f"{profile.ranks} ranks on {device}: {loaded}, {facts['base_parameters']:,} parameters {facts['base_is']}"
    if profile.model.shard == "auto" and device == "cuda":
        text += f' (model.shard = "auto" took "{facts["shard"]}" by the memory that is free)'
    text += f"; {facts['trained_parameters']:,} trained in {facts['trained_tensors']} tensors"
    if facts["compiled_layers"]:
        text += f"; {facts['compiled_layers']} layers are compiled in the first step"
    return text


def _open_folder(plan: JobPlan) -> RunDirectory:
    if plan.continues:
        return RunDirectory.open(plan.run_path)
    return RunDirectory.create(
        plan.run_path.parent,
        plan.run_path.name,
        profile_text=plan.profile_text,
        resolved=plan.profile.model_dump(),
        record=plan.record() | {"versions": plan_versions()},
    )


def _count_restart(plan: JobPlan, run: RunDirectory, logs: Path) -> None:
    """Note in run.json that the run has gone on by itself: from where, why, when, and in which attempt."""
    record = run.read_record()
    entry = {
        "attempt": logs.name,
        "step": plan.state.step,
        "reason": plan.restart,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    atomic_write(run.run_json, pretty_bytes(record | {"restarts": [*record.get("restarts", []), entry]}))


def spec_of(plan: JobPlan, answered: list[services.Service], logs: Path) -> WorkerSpec:
    """What every rank of the plan is built from."""
    return WorkerSpec(
        profile=plan.profile,
        family=plan.family,
        base=plan.base,
        prompt_path=plan.prompt_path,
        endpoints=tuple(service.endpoint for service in answered),
        component_names=tuple(services.component_names(answered)),
        request_key=f"{plan.run_id}/{logs.name}",
        resume_from=plan.resume_from,
    )


@contextlib.contextmanager
def ranks_of(plan: JobPlan, logs: Path, cluster: Cluster | None, reporter: Reporter) -> Iterator[Group]:
    """The plan's ranks, started; ended with the block."""
    started: list[Group] = []
    # Ray announces dead workers on our standard output, which carries data only.
    with (logs / "ray.log").open("a") as sink, contextlib.redirect_stdout(sink):
        try:
            yield Group.start(plan.profile, logs, started.append, cluster, reporter.note, plan.inputs())
        finally:
            for group in started:
                group.shutdown()


class _EndedByAlarm(TrainingFailed):
    """Nothing broke, and all is saved."""


@dataclass(slots=True)
class _Run:
    plan: JobPlan
    run: RunDirectory
    group: Group
    observation: Observation
    reporter: Reporter
    started: float = field(default_factory=time.monotonic)
    last: RunState = field(default_factory=RunState)

    def go(self) -> dict[str, Any]:
        """Look, train, look again, sum up."""
        plan, state = self.plan, self.plan.state
        saves = Checkpoints(plan, self.run, self.group)
        looking = Looking.of(plan, self.run, self.group, self.observation)
        if state.step == 0 and not _stop_signal:
            self._say_look(looking, state)
            looking.now(state)
        try:
            state = self._train(state, saves, looking)
            saves.finish()
        except RewardFailed as error:
            # All ranks are alive and no weight has moved since the last whole step, so nothing of it need be lost.
            self._save_last(saves)
            error.hint = "; ".join(filter(None, (error.hint, self._way_back(saves))))
            raise
        except _EndedByAlarm:
            raise
        except TrainingFailed as error:
            # The step is lost, but not the checkpoint that was being written meanwhile.
            with contextlib.suppress(NftctlError, OSError):
                saves.finish() if self.group.whole else saves.settle()
            error.hint = "; ".join(filter(None, (error.hint, self._way_back(saves))))
            raise
        except CheckpointUnusable as error:
            error.hint = "; ".join(filter(None, (error.hint, self._way_back(saves))))
            raise
        finally:
            self.reporter.done()
        return self._summary(state, saves, looking.last_grid())

    def _say_look(self, looking: Looking, state: RunState) -> None:
        """An evaluation can take many steps' time, so that it has begun is said as well as what it found."""
        if count := len(looking.evaluation.held_out):
            when = f"after step {state.step}" if state.step else "before the first step"
            self.reporter.note(f"evaluating {when}: {count} held-out samples")

    def _save_last(self, saves: Checkpoints) -> None:
        saves.finish()
        if self.last.step > saves.newest_step:
            saves.begin(self.last, self.observation.metrics.rows)
            saves.finish()

    def _way_back(self, saves: Checkpoints) -> str:
        if saves.newest is None:
            return f"no checkpoint was written yet; {begin_again(self.run)}"
        # By its own name: a save that broke off may lie beyond it, and that is not passed over.
        newest = shlex.quote(str(saves.newest))
        return f"the last checkpoint is of step {saves.newest_step}; go on with: nftctl resume {newest}"

    def _train(self, state: RunState, saves: Checkpoints, looking: Looking) -> RunState:
        every = self.plan.profile.checkpoint.every
        _enter("stepping")
        while state.step < self.plan.total_steps:
            if _stop_signal:
                # Asked to stop before the first step, or since the last one ended: at most there is a save to make.
                self._save_last(saves)
                break
            state = self.last = self._step(state, saves, looking.draws(state.step + 1))
            saves.advance()
            last = state.step == self.plan.total_steps or bool(_stop_signal) or self.observation.fatal is not None
            if last or (every and state.step % every == 0):
                saves.begin(state, self.observation.metrics.rows)
            if state.step == self.plan.total_steps:
                saves.finish()  # nobody who has enough of the closing evaluation is to lose the run
            if looking.scores(state):
                self._say_look(looking, state)
            looking.if_due(state)
            if self.observation.fatal is not None:
                self._end_at_alarm(saves, self.observation.fatal)
            if last:
                break
        return state

    def _end_at_alarm(self, saves: Checkpoints, alarm: Alarm) -> None:
        """Save the step that is done, which an evaluation may have judged after it was passed over, and raise."""
        self._save_last(saves)
        fork = f"nftctl resume {shlex.quote(str(self.run.checkpoints))}/STEP --fork NAME --set ..."
        raise _EndedByAlarm(
            f"ended by alarms.stop at step {self.last.step}: {alarm.code}: {alarm.message}",
            hint=f"{alarm.advice}; a changed run from any of its checkpoints: {fork}; this one all the same: "
            f"nftctl resume {shlex.quote(str(self.run.path))} --set 'alarms.stop=[]'",
        )

    def _step(self, state: RunState, saves: Checkpoints, keep: bool) -> RunState:
        row, state, rewards = take_step(self.group, state, saves.advance_if_written, keep=keep)
        if state.step == self.plan.total_steps:
            _enter("ending")
        self.observation.step(row, rewards, self.plan.total_steps)
        return state

    def _summary(self, state: RunState, saves: Checkpoints, grid: Path | None) -> dict[str, Any]:
        evaluations, rows = self.observation.evaluations.rows, self.observation.metrics.rows
        asked = signal.Signals(_stop_signal).name if _stop_signal else None
        # Whoever asks in the last step is given all of it.
        finished = state.step == self.plan.total_steps
        write_curve(self.run.path / "reward.svg", rows, evaluations)
        return {
            "run": str(self.run.path),
            "profile": self.plan.profile_name,
            "device": self.group.device,
            "steps": {"from": self.plan.state.step, "to": state.step, "total": self.plan.total_steps},
            "stopped": None if finished else asked,
            "interrupt": asked,
            "checkpoint": str(saves.newest) if saves.newest else None,
            "samples": str(grid) if grid else None,
            "eval": {"before": evaluations[0], "after": evaluations[-1] if len(evaluations) > 1 else None}
            if evaluations
            else None,
            "train": {"first": rows[0], "last": rows[-1]} if rows else None,
            "seconds": round(time.monotonic() - self.started, 1),
        }


def take_step(
    group: Group, state: RunState, sampled: Callable[[], None] = lambda: None, *, keep: bool = False
) -> tuple[dict[str, Any], RunState, Rewards]:
    """One step on all ranks: its metrics row, the state after it, and its rewards. `sampled` is called when the images
    are made; `keep` has the ranks keep them, to show some after the step."""
    timer = _Timer()
    with timer.stage("sample"):
        group.call("sample", state, keep)
    sampled()
    with timer.stage("prepare"):
        group.call("prepare", state)
    with timer.stage("reward_exposed"):
        group.call("score")
    with timer.stage("train"):
        answers = group.call("train", state)
    metrics, after = _agreed(answers)
    row = {"step": after.step, **metrics, **timer.row()}
    # Every rank makes one sample of each source row.
    row["timer/samples_per_second_per_rank"] = round((after.cursor - state.cursor) / row["timer/step"], 4)
    if "system/least_seconds" in row:
        row["system/mfu"] = round(row["system/least_seconds"] / len(answers) / row["timer/step"], 4)
    return row, after, answers[0][2]


def _agreed(answers: list[tuple[dict[str, float], RunState, Any]]) -> tuple[dict[str, float], RunState]:
    """The ranks' common row and state; machine figures are summed, everything else must be equal to the bit."""
    rows = [{k: v for k, v in row.items() if not k.startswith("system/")} for row, _, _ in answers]
    for rank, (row, (_, state, _)) in enumerate(zip(rows, answers, strict=True)):
        if row != rows[0] or state != answers[0][1]:
            keys = sorted(k for k in rows[0] if row.get(k) != rows[0][k])
            raise TrainingFailed(f"rank {rank} disagrees with rank 0 on {', '.join(keys) or 'the state'}", rank=rank)
    system: dict[str, float] = {}
    for row, _, _ in answers:
        for key, value in row.items():
            if key.startswith("system/"):
                system[key] = max(system.get(key, 0.0), value) if "peak" in key else system.get(key, 0.0) + value
    return rows[0] | system, answers[0][1]


class _Timer:
    """Seconds per stage of one step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._stages: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._stages[name] = time.perf_counter() - before

    def row(self) -> dict[str, float]:
        stages = {f"timer/{name}": round(seconds, 4) for name, seconds in self._stages.items()}
        return stages | {"timer/step": round(time.perf_counter() - self._start, 4)}
