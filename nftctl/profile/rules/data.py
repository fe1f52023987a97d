"""The prompts that are trained and evaluated on, and the run's own name."""

from __future__ import annotations

from collections.abc import Iterator

from nftctl.profile.prompts import INVALID, MISSING
from nftctl.profile.rules.rule import Facts, Problem, Rule


def _missing(facts: Facts) -> Iterator[Problem]:
    if not facts.profile.data.prompt_file:
        message = "data.prompt_file is required"
        yield Problem("data.prompt_file", message, "a .txt or .jsonl file, or `embedded`")
    for file in facts.prompt_files:
        for finding in file.findings:
            if finding.code == MISSING:
                yield Problem(file.key, f"{file.key}: {finding.message}")


def _invalid(facts: Facts) -> Iterator[Problem]:
    for file in facts.prompt_files:
        for finding in file.findings:
            if finding.code == INVALID:
                yield Problem(file.key, finding.message, finding.help, (finding.origin, finding.line, finding.column))


def _short(facts: Facts) -> Iterator[Problem]:
    rows = facts.profile.data.rows_per_step
    for file in facts.prompt_files:
        count = len(file.prompts)
        if file.key == "data.prompt_file" and 0 < count < rows:
            message = f"data.rows_per_step = {rows} asks for more prompts than the {count} in data.prompt_file"
            yield Problem("data.rows_per_step", message)


def _job_name(facts: Facts) -> Iterator[Problem]:
    name = facts.profile.job.name
    if name and (name in (".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200):
        yield Problem("job.name", "job.name must be a plain folder name of at most 200 bytes")


RULES = (
    Rule(MISSING, "There is something to train on.", _missing),
    Rule(INVALID, "Every line is of the declared format.", _invalid),
    Rule("prompt-file-short", "The rows of one step are different rows.", _short),
    Rule("job-name", "The run's name is the name of its folder.", _job_name),
)
