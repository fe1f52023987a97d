"""Every preflight rule stops `launch` and `resume` alike: exit 3, no Ray, no torch, nothing on the disk."""

from __future__ import annotations

import json
from pathlib import Path

from nftctl.profile.preflight import RULES
from tests.profile.conftest import COMPLETE, PROVIDER, REMOVED, toml_of, write_place
from tests.profile.test_preflight import ALONE, ALONE_IN_PROVIDER
from tests.run.make import snapshot

from .program import HEAVY, python
from .test_job import make_resumable

WARNINGS = {rule.code for rule in RULES if rule.severity == "warning"}

PROGRAM = """
import contextlib, io, json, os, sys, typer
from nftctl.cli import main as program
program.app = typer.main.get_command(program.app)  # made once, not a hundred times
answers = []
for arguments in json.load(open(sys.argv[1])):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program.run(arguments)
    answers.append([code, err.getvalue()])
print(json.dumps({"answers": answers, "modules": sorted(set(sys.modules) & set(sys.argv[2:]))}))
"""


def run_all(folder: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each command line, all in one process that must stay light."""
    (folder / "commands.json").write_text(json.dumps(commands))
    answer = python(PROGRAM, "commands.json", *HEAVY, cwd=folder)
    (folder / "commands.json").unlink()
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout.splitlines()[-1])
    odd = [pair for pair in zip(commands, document["answers"], strict=True) if pair[1][0] not in (3, 5)]
    assert document["modules"] == [], odd
    return [(code, err) for code, err in document["answers"]]


def test_launch_is_refused_by_every_rule(tmp_path: Path) -> None:
    write_place(tmp_path)
    cases = [(code, changes, [PROVIDER]) for code, _, changes in ALONE if code not in WARNINGS]
    cases += [(code, {}, providers) for code, _, providers in ALONE_IN_PROVIDER]
    for i, (_, changes, providers) in enumerate(cases):
        (tmp_path / f"case{i}.toml").write_text(toml_of({**COMPLETE, **changes}, providers))
    before = snapshot(tmp_path)
    answers = run_all(tmp_path, [["launch", f"case{i}.toml"] for i in range(len(cases))])
    for (code, _, _), (exit_code, said) in zip(cases, answers, strict=True):
        assert exit_code == 3, said
        assert f"error[{code}]" in said
    assert snapshot(tmp_path) == before


def test_resume_is_refused_by_every_rule_that_a_set_can_break(tmp_path: Path) -> None:
    write_place(tmp_path)
    make_resumable(tmp_path)
    cases = [
        (code, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
        for code, _, changes in ALONE
        if code not in WARNINGS and not any(value is REMOVED or isinstance(value, dict) for value in changes.values())
    ]
    # These belong to another base or another file than the tiny run's, so a --set on it breaks other rules first.
    cases = [(code, sets) for code, sets in cases if code in {
        "grid-backend", "grid-grouping", "grid-placement", "gpus-per-role", "group-size", "role-shape", "sampler-type",
        "moving-old-cadence", "reference-not-frozen", "advantage-bounds", "grid-timeout", "optimizer-betas",
        "rl-profile-unknown", "lora-touches-prompt-encoder", "lora-pattern", "prompt-file-missing", "init-from-hub",
    }]  # fmt: skip
    assert len({code for code, _ in cases}) == 17
    before = snapshot(tmp_path)
    commands = [["resume", "first", "--steps", "9", *(x for s in sets for x in ("--set", s))] for _, sets in cases]
    for (code, _), (exit_code, said) in zip(cases, run_all(tmp_path, commands), strict=True):
        assert exit_code == 3, (code, said)
        assert f"error[{code}]" in said
    assert snapshot(tmp_path) == before
