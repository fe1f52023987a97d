"""`nftctl launch` and `nftctl resume`: profile, plan, job, and the closing words with the next command to type.

Everything that can be refused is refused before the engine is imported. Stdout carries the run folder alone.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nftctl.cli.completion import runs_folder
from nftctl.cli.console import Console, table
from nftctl.cli.progress import reporter_for
from nftctl.cli.report import left_behind
from nftctl.cli.signals import NOTHING, TYPED, StopSignals
from nftctl.cli.validate import every_rule, load_checked
from nftctl.cli.view import View
from nftctl.errors import ExitCode, Finding, NftctlError, UsageRefused

if TYPE_CHECKING:
    from nftctl.engine.plan import JobPlan
    from nftctl.profile.load import Resolved
    from nftctl.run.directory import RunDirectory

STOP_CODES = {"SIGINT": ExitCode.SIGINT, "SIGTERM": ExitCode.SIGTERM}


def launch(
    console: Console,
    argument: str | None,
    sets: Sequence[str],
    flags: Mapping[str, object],
    *,
    dry_run: bool,
    auto_resume: bool = False,
) -> None:
    """Start a run from a profile; with `auto_resume`, go on with it when it has a checkpoint."""
    resolved, warnings = load_checked(console, argument, sets, flags, fetch=not dry_run)
    from nftctl.engine.plan import plan_launch
    from nftctl.run.directory import refuse_impossible, refuse_used

    if auto_resume:
        plan = _continued(console, resolved, dry_run=dry_run)
        if plan is not None:
            _go_on(console, "launch", plan, warnings, dry_run=dry_run)
            return
    plan = plan_launch(resolved, argv=_typed(), note=console.say)
    refuse_impossible(plan.run_path)
    if not auto_resume:
        refuse_used(plan.run_path)
    if dry_run:
        _print_plan(console, "launch", plan, warnings)
    else:
        _run(console, "launch", plan, warnings)


def _continued(console: Console, resolved: Resolved, *, dry_run: bool) -> JobPlan | None:
    """The plan that goes on with the run of the profile's name, None when it never had a checkpoint.

    A profile that would make it another run is refused like any resume, and so is a damaged newest checkpoint.
    """
    from nftctl.engine.plan import plan_resume
    from nftctl.run.checkpoints import list_steps
    from nftctl.run.directory import RunDirectory, find_checkpoint

    job = resolved.profile.job
    if not job.name:
        raise UsageRefused("--auto-resume needs a run name to look for", hint="add --name NAME, or set job.name")
    path = Path(job.run_dir).expanduser() / job.name
    if not path.exists():
        console.say(f"{path} does not exist: a fresh start")
        return None
    run = RunDirectory.open(path)
    with run.lock():
        if not list_steps(run.checkpoints):
            kept = "" if dry_run else f"; what it left is now {run.retire()}"
            console.say(f"{path} never had a complete checkpoint: a fresh start{kept}")
            return None
        run, checkpoint = find_checkpoint(str(path), path.parent)
        return plan_resume(
            run, checkpoint, resolved, steps=resolved.profile.rl.max_steps, argv=_typed(), note=console.say
        )


def resume(
    console: Console,
    target: str,
    steps: int | None,
    sets: Sequence[str],
    *,
    dry_run: bool,
    fork: str | None = None,
    restart: str = "",
) -> None:
    """Go on with a run. Reads only, until the checkpoint, the profile and the identity have been accepted.

    `restart` says why nobody asked for it: it then goes on from the newest checkpoint that is whole, and begins again
    where there is none.
    """
    from nftctl.profile.load import load_resolved
    from nftctl.profile.preflight import refuse_if_wrong
    from nftctl.run.directory import find_checkpoint, refuse_impossible, refuse_used

    if fork is not None and not fork.strip():
        raise UsageRefused("--fork needs the name of the new run")
    run, checkpoint = (_newest if restart else find_checkpoint)(target, runs_folder())
    with run.lock():
        resolved = load_resolved(
            run.read_resolved(),
            name=str(run.read_record().get("profile", run.name)),
            text=run.profile_toml.read_text(),
            sets=sets,
            # A fork's name goes through the same rule as every run's.
            flags={"rl.max_steps": steps, "job.name": fork},
            env=os.environ,
        )
        warnings = refuse_if_wrong(resolved, every_rule())
        console.findings(warnings)
        from nftctl.engine.plan import plan_again, plan_fork, plan_resume

        if checkpoint is None:
            plan = plan_again(run, resolved, argv=_typed(), note=console.say)
        elif fork is None:
            plan = plan_resume(run, checkpoint, resolved, steps=steps, argv=_typed(), note=console.say)
        else:
            plan = plan_fork(run, checkpoint, resolved, fork, steps=steps, argv=_typed(), note=console.say)
    plan = replace(plan, restart=restart)
    if plan.parent:  # after the lock, which would make the run itself look like one that is running
        refuse_impossible(plan.run_path)
        refuse_used(plan.run_path, "use --fork with another name", again="")
    _go_on(console, "resume", plan, warnings, dry_run=dry_run)


def _newest(target: str, runs: Path) -> tuple[RunDirectory, Path | None]:
    """The run of that folder and its newest whole checkpoint; whatever is beyond it was cut off by what was lost."""
    from nftctl.run.checkpoints import newest_complete
    from nftctl.run.directory import RunDirectory

    run = RunDirectory.open(Path(target))
    return run, newest_complete(run.checkpoints)


def _go_on(console: Console, command: str, plan: JobPlan, warnings: Sequence[Finding], *, dry_run: bool) -> None:
    if plan.parent and plan.nothing_to_do:
        done, total = plan.state.step, plan.total_steps
        raise UsageRefused(f"the checkpoint has {done} steps and the fork would have {total}", hint="add --steps TOTAL")
    if plan.nothing_to_do:
        _say_nothing_to_do(console, plan, warnings)
    elif dry_run:
        _print_plan(console, command, plan, warnings)
    else:
        word = "forking" if plan.parent else "beginning again" if plan.again else "resuming"
        console.say(f"{word} {plan.resume_from or plan.run_path}: steps {plan.state.step} -> {plan.total_steps}")
        _run(console, command, plan, warnings)


def _run(console: Console, command: str, plan: JobPlan, warnings: Sequence[Finding]) -> None:
    samples = plan.profile.data.rows_per_step * plan.profile.rl.group_size
    reporter = reporter_for(console, View(plan.run_path.name, samples, step=plan.state.step))
    with StopSignals(lambda: left_of(plan.run_path)) as signals:
        console.say(f"run folder {plan.run_path}")
        from nftctl.cli.restarts import goes_on_by_itself
        from nftctl.engine.loop import request_stop, run_job, stage
        from nftctl.run.directory import RunDirectory, begin_again

        signals.arm(request_stop, lambda: reporter.last_step, stage)
        try:
            summary = run_job(plan, reporter)
        except NftctlError as error:
            if goes_on_by_itself(error, os.environ):
                error.hint = ""
            # What went wrong is best seen on the page, too; a run that never came to be has none.
            if (plan.run_path / "metrics.jsonl").exists():
                left_behind(console, plan.run_path)
            raise
        finally:
            reporter.done()
    summary["report"] = left_behind(console, plan.run_path)
    code = STOP_CODES.get(str(summary.get("stopped")), ExitCode.OK)
    for line in closing_words(summary, "" if summary.get("checkpoint") else begin_again(RunDirectory(plan.run_path))):
        console.say(line)
    console.data(str(plan.run_path))
    console.result(command, warnings, exit_code=code, summary=summary)
    if code:
        raise typer.Exit(code)


def _typed() -> list[str]:
    """The command line as a person typed it, whichever words this process was started with."""
    typed: list[str] = json.loads(os.environ.get(TYPED, "null")) or sys.argv
    return typed


def left_of(run: Path) -> str:
    """What there is of a run that was ended at once, and the command that goes on from there."""
    from nftctl.run.directory import RunDirectory, begin_again, go_on

    try:
        if way := go_on(run):
            return f"what was saved in {run} stays valid; go on with: {way}"
        return f"{NOTHING}; run folder {run}; {begin_again(RunDirectory.open(run))}"
    except (NftctlError, OSError):  # before there was a folder, or without the storage
        return NOTHING


def closing_words(summary: Mapping[str, Any], again: str = "") -> list[str]:
    """What a run came to, and what to type next; without a checkpoint that is `again`."""
    run, steps, typed = summary["run"], summary["steps"], shlex.quote(str(summary["run"]))
    rows = [("", "")]
    if summary.get("stopped"):
        rows.append(("stopped", f"by {summary['stopped']} after step {steps['to']} of {steps['total']}"))
    elif summary.get("interrupt"):
        rows.append(("finished", f"after step {steps['to']}; {summary['interrupt']} came when none was left"))
    rows += _rewards(summary)
    rows += [(name, str(summary[name])) for name in ("samples", "checkpoint", "report") if summary.get(name)]
    rows.append(("run folder", run))
    if again:
        return table([*rows, ("next", f"nothing was saved; {again}")])
    further = steps["total"] if steps["to"] < steps["total"] else 2 * steps["total"]
    rows += [
        ("next", f"nftctl resume {typed} --steps {further}"),
        ("", f"nftctl inspect-checkpoint {typed}"),
        ("", f"tensorboard --logdir {typed}"),
    ]
    return table(rows)


def _rewards(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    held_out, train = summary.get("eval"), summary.get("train")
    if held_out and held_out["after"]:
        before, after = held_out["before"], held_out["after"]
        # A stopped run was last looked at some steps before its end, so the steps are said.
        when = f"{after.get('eval/samples')} images, step {before.get('step')} -> {after.get('step')}"
        rows = [("held-out reward", f"{_change(before, after, 'eval/reward')} ({when})")]
        judges = sorted(key for key in after if key.startswith("eval/") and key.endswith("judge") and key in before)
        return rows + [("judge", f"{_change(before, after, key)} (reported, never trained on)") for key in judges]
    if train:
        return [("training reward", _change(train["first"], train["last"], "train/reward_mean"))]
    return []


def _change(before: Mapping[str, float], after: Mapping[str, float], key: str) -> str:
    return f"{before[key]:.3f} -> {after[key]:.3f}"


def _print_plan(console: Console, command: str, plan: JobPlan, warnings: Sequence[Finding]) -> None:
    described = plan.describe()
    for line in table([(key, _plain(value)) for key, value in described.items()]):
        console.data(line)
    console.say("dry run: nothing was started or written")
    console.result(command, warnings, dry_run=True, plan=described)


def _plain(value: object) -> str:
    """A value of the plan on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_plain(item) for item in value)
    return "none" if value is None or value == "" else str(value)


def _say_nothing_to_do(console: Console, plan: JobPlan, warnings: Sequence[Finding]) -> None:
    from nftctl.run.directory import RunDirectory

    done, asked, run = plan.state.step, plan.total_steps, plan.run_path
    what = f"the total is {asked}" if asked == done else f"a total of {asked} was asked for"
    console.say(f"nothing to do: {done} steps are done and {what}")
    stored = RunDirectory.open(run).read_record().get("total_steps")
    # Without --steps a run goes on to its stored total, which may lie further than what was asked for.
    further = "" if type(stored) is int and stored > done else f" --steps {2 * done}"
    console.say(f"to go further: nftctl resume {shlex.quote(str(run))}{further}")
    console.data(str(run))
    steps = {"from": done, "to": done, "total": asked}
    console.result("resume", warnings, nothing_to_do=True, run=str(run), steps=steps)
