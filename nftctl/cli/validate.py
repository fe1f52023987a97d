"""`nftctl validate`: every rule over one profile, the resolved values with their origins, and the list of rules.

Also the one way in which commands load a profile: said on stderr, checked in full, warnings shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nftctl.cli.console import Console, show, table
from nftctl.errors import ExitCode, Finding

if TYPE_CHECKING:
    from nftctl.profile.load import Origin, Resolved
    from nftctl.profile.preflight import Rule


def every_rule() -> tuple[Rule, ...]:
    """The rules of preflight, and the one that knows the packaged scorers, which are above profiles."""
    from nftctl.profile.preflight import RULES
    from nftctl.reward.judgeable import RULE

    return (*RULES, RULE)


def load_checked(
    console: Console, argument: str | None, sets: Sequence[str], flags: Mapping[str, object], *, fetch: bool = False
) -> tuple[Resolved, list[Finding]]:
    """Find, load and check a profile. Says which one on stderr, shows warnings and returns them.

    With `fetch` a base that the local cache of the hub lacks is downloaded, if that is all that is wrong. Raises
    ProfileRefused with every finding.
    """
    from nftctl.profile.load import find_profile, load_profile
    from nftctl.profile.preflight import refuse_if_wrong

    path, which = find_profile(argument, os.environ, Path.cwd())
    console.say(which)
    resolved = load_profile(path, sets=sets, flags={key: value for key, value in flags.items() if value is not None})
    if fetch:
        _fetch_base(console, resolved)
    warnings = refuse_if_wrong(resolved, every_rule())
    console.findings(warnings)
    return resolved, warnings


def _fetch_base(console: Console, resolved: Resolved) -> None:
    from nftctl.profile.artifacts import hub_id

    hub = hub_id(resolved.profile.rl.init_from)
    if hub is None:
        return
    from nftctl.profile.hub import is_offline
    from nftctl.profile.preflight import check

    wrong = {finding.code for finding in check(resolved) if finding.severity == "error"}
    if wrong and wrong <= {"init-from-hub", "init-from-weights", "text-encoder-missing"} and not is_offline():
        console.say(f"downloading {hub.repository} at {hub.revision}: safetensors, JSON and tokenizer files")
        hub.fetch()


def validate(
    argument: str | None, sets: Sequence[str], *, show_resolved: bool, memory: bool, online: bool, json: bool
) -> None:
    """Check one profile and print what it amounts to."""
    console = Console(json=json)
    resolved, warnings = load_checked(console, argument, sets, {})
    prompts = _prompts(resolved)
    count = f", {len(warnings)} warning{'s' if len(warnings) != 1 else ''}" if warnings else ""
    console.data(f"{resolved.name}: valid{count}; {prompts['count']} prompts, sha256 {prompts['sha256'][:12]}")
    estimated = estimated_memory(resolved)
    for line in memory_lines(estimated, whole=memory):
        console.data(line)
    extra: dict[str, Any] = {"memory": estimated}
    if show_resolved:
        extra["resolved"] = values = _resolved_values(resolved)
        for line in table([(key, show(entry["value"]), entry["origin"]) for key, entry in values.items()]):
            console.data(line)
    profile = {"name": resolved.name, "path": None if resolved.path is None else str(resolved.path)}
    extra = {"profile": profile, "prompts": prompts, **extra}
    if online:
        _look_around(console, resolved, warnings, extra)
    else:
        console.result("validate", warnings, **extra)


def _look_around(console: Console, resolved: Resolved, warnings: Sequence[Finding], extra: dict[str, Any]) -> None:
    """The part that needs more than files. Ends with 4 when only reward services are at fault, with 8 when only Ray or
    GPUs are, as `launch` does, else with 3.
    """
    from nftctl.cli.online import ENVIRONMENT, look_around

    answers, findings = look_around(resolved, os.environ)
    for line in table(answers.rows()):
        console.data(line)
    extra["online"] = answers.facts()
    if not findings:
        console.result("validate", warnings, **extra)
        return
    codes = {finding.code for finding in findings}
    code = ExitCode.PROFILE
    if all(name.startswith("reward-") for name in codes):
        code = ExitCode.REWARD
    elif codes <= ENVIRONMENT:
        code = ExitCode.ENVIRONMENT
    checks = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    message = f"{resolved.name} is valid, and {checks} of what is around it failed"
    console.findings(findings)
    console.error(message)
    error = {"message": message, "hint": ""}
    console.result("validate", [*warnings, *findings], exit_code=code, error=error, **extra)
    raise typer.Exit(code)


def list_rules(*, json: bool) -> None:
    """Print the code and the reason of every rule: those of preflight, then those of `--online`."""
    from nftctl.cli.online import RULES as ONLINE

    console = Console(json=json)
    rules = [{"code": r.code, "severity": r.severity, "online": False, "reason": r.reason} for r in every_rule()]
    rules += [{"code": c, "severity": "error", "online": True, "reason": reason} for c, reason in ONLINE.items()]
    kinds = {(False, "error"): "", (False, "warning"): "warns", (True, "error"): "--online"}
    rows = [(str(r["code"]), kinds[bool(r["online"]), str(r["severity"])], str(r["reason"])) for r in rules]
    for line in table(rows):
        console.data(line)
    console.result("validate", rules=rules)


def _prompts(resolved: Resolved) -> dict[str, Any]:
    from nftctl.profile.prompts import read_prompts, resolve_prompt_file
    from nftctl.run.hashing import hash_file

    path = resolve_prompt_file(resolved.profile.data.prompt_file, "train")
    return {"path": str(path), "count": len(read_prompts(path)), "sha256": hash_file(path)}


def estimated_memory(resolved: Resolved) -> dict[str, Any] | None:
    """The estimate of one rank's memory as the JSON object has it; None where the base does not say its geometry."""
    from nftctl.profile.estimate import NOT_COUNTED, estimate
    from nftctl.profile.rules.rule import Facts

    facts = Facts(resolved)
    if facts.contract is None:
        return None
    prompts = [prompt.text for file in facts.prompt_files for prompt in file.prompts]
    found = estimate(resolved.profile, facts.base, facts.weights, facts.contract, prompts)
    if found is None:
        return None
    parts = [{"name": p.name, "bytes": p.bytes, "when": p.when, "rough": p.rough, "how": p.how} for p in found.parts]
    totals = {"always_bytes": found.always, "peak_bytes": found.peak}
    return {"ranks": resolved.profile.ranks, **totals, "parts": parts, "not_counted": NOT_COUNTED}


def memory_lines(memory: Mapping[str, Any] | None, *, whole: bool) -> list[str]:
    """One line for a quick look, or the whole table."""
    if memory is None:
        return ["memory: not estimated, the base's files do not say its geometry"]
    head = f"memory per rank: about {in_mib(memory['peak_bytes'])} at the peak"
    if not whole:
        largest = sorted(memory["parts"], key=lambda part: -part["bytes"])[:3]
        named = ", ".join(f"{part['name']} {in_mib(part['bytes'])}" for part in largest)
        return [f"{head}, most of it {named} (--memory)"]
    rows = [
        (
            f"  {part['name']}",
            in_mib(part["bytes"]).rjust(12),
            "about" if part["rough"] else "",
            part["when"],
            part["how"],
        )
        for part in memory["parts"]
        if part["bytes"]
    ]
    return [head, *table(rows), f"  not counted: {memory['not_counted']}"]


def in_mib(size: int) -> str:
    """A size for people: MiB below one GiB, else GiB."""
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, with entries of arrays of tables counted from 0, as origins are keyed."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                found |= _leaves(item, f"{prefix}{key}.{index}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _resolved_values(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """Dotted key -> value, kind of source, and the place to go to."""
    from nftctl.profile.preflight import locate_origins

    origins = locate_origins(resolved)
    return {
        key: {"value": value, "source": origins[key].source, "origin": _place(origins[key])}
        for key, value in _leaves(resolved.profile.model_dump()).items()
    }


def _place(origin: Origin) -> str:
    numbers = (str(number) for number in (origin.line, origin.column) if number is not None)
    return ":".join([f"{origin.text} {origin.argument}".rstrip(), *numbers])
