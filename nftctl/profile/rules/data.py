"""The prompts that are trained and evaluated on, and the place of the run: its name and the disk under it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nftctl.profile.adapter import adapted, adapter_numbers, checkpoint_bytes, most_checkpoints
from nftctl.profile.artifacts import EMBEDDED_SETS, embedded_set, exists, local
from nftctl.profile.estimate import in_denoiser
from nftctl.profile.prompts import INVALID, MISSING
from nftctl.profile.rules.rule import Facts, Problem, Rule
from nftctl.profile.vocabulary import known, lacking, no_words

_MOST_LINES = 20  # of one file: the hundredth wrong line teaches nothing that the first did not


def _missing(facts: Facts) -> Iterator[Problem]:
    if not facts.profile.data.prompt_file:
        message = "data.prompt_file is required"
        # Of the packaged base; prompts of another one are allowed elsewhere, and nobody's wish.
        packaged = facts.contract is not None and facts.contract.embedded
        yield Problem("data.prompt_file", message, "a .txt or .jsonl file" + (", or `embedded`" if packaged else ""))
    for file in facts.prompt_files:
        for finding in file.findings:
            if finding.code == MISSING:
                value = f' = "{finding.origin}"' if finding.help else ""
                yield Problem(file.key, f"{file.key}{value}: {finding.message}", finding.help)


def _invalid(facts: Facts) -> Iterator[Problem]:
    for file in facts.prompt_files:
        for finding in file.findings:
            if finding.code == INVALID:
                yield Problem(file.key, finding.message, finding.help, (finding.origin, finding.line, finding.column))


def _other_set(facts: Facts) -> Iterator[Problem]:
    """A packaged base has seen no words but those of its own prompts."""
    profile = facts.profile
    base = embedded_set(profile.rl.init_from) if not facts.other_set else None
    for key, value in (("data.prompt_file", profile.data.prompt_file), ("eval.prompt_file", profile.eval.prompt_file)):
        prompts = embedded_set(value)
        if base is not None and prompts is not None and prompts != base:
            names = {folder: name for name, folder in EMBEDDED_SETS.items()}
            message = (
                f'{key} = "{value}" are prompts of {names[prompts]}, and rl.init_from is the base of {names[base]}'
            )
            yield Problem(key, message, f'{key} = "embedded:{names[base]}", or the other base')


def _unknown_words(facts: Facts) -> Iterator[Problem]:
    """Told line by line, the words that there are once a file."""
    packaged = set(EMBEDDED_SETS.values())  # those of another set are another rule's
    for file in facts.prompt_files if facts.words else ():
        lines = [] if file.path.parent in packaged else file.rows
        wrong = [(line, unknown) for line, prompt in lines if (unknown := lacking(prompt.text, facts.words))]
        for index, (line, unknown) in enumerate(wrong[:_MOST_LINES]):
            help = known(facts.words) if index == 0 else ""
            yield Problem(file.key, no_words(unknown), help, (str(file.path), line, 1))
        if len(wrong) > _MOST_LINES:
            more = f"{len(wrong) - _MOST_LINES} more lines have words that the base's tokenizer does not know"
            yield Problem(file.key, more, at=(str(file.path), None, None))
    rl, look = facts.profile.rl, facts.profile.eval
    unknown = lacking(rl.negative_prompt, facts.words) if facts.words else []
    if unknown and (rl.guidance, look.guidance) not in ((1.0, None), (1.0, 1.0)):  # else nobody reads it
        yield Problem("rl.negative_prompt", f"rl.negative_prompt: {no_words(unknown)}", known(facts.words))


def _short(facts: Facts) -> Iterator[Problem]:
    rows = facts.profile.data.rows_per_step
    for file in facts.prompt_files:
        count = len(file.prompts)
        if file.key == "data.prompt_file" and 0 < count < rows:
            message = f"data.rows_per_step = {rows} asks for more prompts than the {count} in data.prompt_file"
            help = "lower data.rows_per_step, or give a file with more prompts"
            yield Problem("data.rows_per_step", message, help, against=("data.prompt_file",))


def _duplicate(facts: Facts) -> Iterator[Problem]:
    """Told once per file, at the first repetition."""
    for file in facts.prompt_files:
        first: dict[str, int] = {}
        repeated: list[tuple[int, int]] = []
        for line, prompt in file.rows:
            row = json.dumps([prompt.text, prompt.reward_text, prompt.metadata], sort_keys=True)
            if first.setdefault(row, line) != line:
                repeated.append((line, first[row]))
        if repeated:
            line, earlier = repeated[0]
            more = f", and {len(repeated) - 1} more lines repeat one" if len(repeated) > 1 else ""
            yield Problem(file.key, f"line {line} is line {earlier} again{more}", at=(str(file.path), line, 1))


def _disk(facts: Facts) -> Iterator[Problem]:
    """Silent where the base's headers or the disk cannot be read: other rules have the word."""
    profile = facts.profile
    tensors, numbers = _trained(facts)
    free = _free_bytes(local(profile.job.run_dir))
    if not tensors or free is None:
        return
    count, each = most_checkpoints(profile), checkpoint_bytes(profile, tensors, numbers)
    if facts.resolved.path is None:  # a run that goes on has what it keeps on the disk already
        count = min(count, 2)
    if count * each > free:
        message = f"up to {count:,} checkpoints of {_mib(each)} are on the disk at once, and {profile.job.run_dir} "
        help = "lower checkpoint.keep_last, raise checkpoint.keep_every, or set job.run_dir to another disk"
        yield Problem("checkpoint.keep_last", f"{message}has {_mib(free)} free", help, against=("job.run_dir",))


def _trained(facts: Facts) -> tuple[int, int]:
    """Tensors of the policy, and the numbers in them; zeros where the base does not say."""
    model, contract = facts.profile.model, facts.contract
    if model.train == "full" and contract is not None:
        shapes = [shape for name, shape in facts.weights.shapes.items() if in_denoiser(contract.family, name)]
        return len(shapes), sum(map(math.prod, shapes))
    modules = adapted(model.lora.targets, facts.denoiser_modules)
    return 2 * len(modules), adapter_numbers(modules, model.lora.rank)


def _free_bytes(folder: Path) -> int | None:
    """Free space where `folder` is, or would be made."""
    try:
        place = Path(os.path.abspath(folder))  # noqa: PTH100 - `..` is resolved by name, the folder need not exist
        return shutil.disk_usage(next(p for p in (place, *place.parents) if exists(p))).free
    except (OSError, ValueError, StopIteration):
        return None


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _job_name(facts: Facts) -> Iterator[Problem]:
    name = facts.profile.job.name
    if name and (name in (".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200):
        yield Problem("job.name", "job.name must be a plain folder name of at most 200 bytes")


def _stop(facts: Facts) -> Iterator[Problem]:
    alarms, look = facts.profile.alarms, facts.profile.eval
    if alarms.stop and not alarms.enabled:
        message = "alarms.stop names alarms, and alarms.enabled = false raises none"
        yield Problem("alarms.stop", message, "set alarms.enabled = true, or stop = []")
    elif "reward-hacking" in alarms.stop and not (look.prompt_file and look.every):
        message = 'alarms.stop names "reward-hacking", which evaluations during the run alone can raise'
        yield Problem("alarms.stop", message, "set eval.prompt_file, and eval.every above 0")


RULES = (
    Rule(MISSING, "There is something to train on.", _missing),
    Rule(INVALID, "Every line is of the declared format.", _invalid),
    Rule("prompt-file-other-set", "A packaged base reads the prompts of its own set.", _other_set),
    Rule("prompt-word-unknown", "Prompts have words that the base's tokenizer knows.", _unknown_words),
    Rule("prompt-file-short", "The rows of one step are different rows.", _short),
    Rule("prompt-duplicate", "A line that stands twice is trained on twice as often.", _duplicate, "warning"),
    Rule("disk-space", "There is room for every checkpoint that is kept.", _disk),
    Rule("job-name", "The run's name is the name of its folder.", _job_name),
    Rule("alarms-stop", "A run that is to end at an alarm can raise it.", _stop),
)
