"""`nftctl validate`: every rule over one profile, the resolved values with their origins, and the list of rules.

Also the one way in which commands load a profile: said on stderr, checked in full, warnings shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nftctl.cli.console import Console, show, table
from nftctl.errors import Finding

if TYPE_CHECKING:
    from nftctl.profile.load import Origin, Resolved


def load_checked(
    console: Console, argument: str | None, sets: Sequence[str], flags: Mapping[str, object]
) -> tuple[Resolved, list[Finding]]:
    """Find, load and check a profile. Says which one on stderr, shows warnings and returns them.

    Raises ProfileRefused with every finding.
    """
    from nftctl.profile.load import find_profile, load_profile
    from nftctl.profile.preflight import refuse_if_wrong

    path, which = find_profile(argument, os.environ, Path.cwd())
    console.say(which)
    resolved = load_profile(path, sets=sets, flags={key: value for key, value in flags.items() if value is not None})
    warnings = refuse_if_wrong(resolved)
    console.findings(warnings)
    return resolved, warnings


def validate(argument: str | None, sets: Sequence[str], *, show_resolved: bool, json: bool) -> None:
    """Check one profile and print what it amounts to."""
    console = Console(json=json)
    resolved, warnings = load_checked(console, argument, sets, {})
    prompts = _prompts(resolved)
    count = f", {len(warnings)} warning{'s' if len(warnings) != 1 else ''}" if warnings else ""
    console.data(f"{resolved.name}: valid{count}; {prompts['count']} prompts, sha256 {prompts['sha256'][:12]}")
    extra: dict[str, Any] = {}
    if show_resolved:
        values = _resolved_values(resolved)
        extra["resolved"] = values
        for line in table([(key, show(entry["value"]), entry["origin"]) for key, entry in values.items()]):
            console.data(line)
    profile = {"name": resolved.name, "path": None if resolved.path is None else str(resolved.path)}
    console.result("validate", warnings, profile=profile, prompts=prompts, **extra)


def list_rules(*, json: bool) -> None:
    """Print the code and the reason of every rule that preflight applies."""
    from nftctl.profile.preflight import RULES

    console = Console(json=json)
    for line in table([(rule.code, rule.reason) for rule in RULES]):
        console.data(line)
    console.result("validate", rules=[{"code": rule.code, "reason": rule.reason} for rule in RULES])


def _prompts(resolved: Resolved) -> dict[str, Any]:
    from nftctl.profile.prompts import read_prompts, resolve_prompt_file
    from nftctl.run.hashing import hash_file

    path = resolve_prompt_file(resolved.profile.data.prompt_file, "train")
    return {"path": str(path), "count": len(read_prompts(path)), "sha256": hash_file(path)}


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
