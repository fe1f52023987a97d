"""Every rule that a loaded profile must pass before anything is started. No network, nothing written, no torch.

Owns the list of rules and the way from a rule's word to a finding with its place. Rules refuse rather than warn;
warnings are about values that are allowed and mislead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.diagnose import Places, arrange, printable
from nftctl.profile.keys import Path, parse
from nftctl.profile.load import Resolved
from nftctl.profile.origins import BESIDE, DEFAULT, Fault, Origin
from nftctl.profile.rules import base, data, lora, modality, objective, reward, topology, trackers
from nftctl.profile.rules.rule import Facts, Problem, Rule, Severity

__all__ = ["RULES", "Rule", "check", "locate_origins", "place", "refuse_if_wrong"]

RULES: tuple[Rule, ...] = (
    *topology.RULES,
    *modality.RULES,
    *lora.RULES,
    *base.RULES,
    *objective.RULES,
    *reward.RULES,
    *data.RULES,
    *trackers.RULES,
)


def check(resolved: Resolved, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """What every rule has to say, sorted by line. An empty list means that nothing is wrong."""
    facts = Facts(resolved)
    return place(resolved, ((rule.code, rule.severity, found) for rule in rules for found in rule.function(facts)))


def place(resolved: Resolved, problems: Iterable[tuple[str, Severity, Problem]]) -> list[Finding]:
    """Problems, each with its code and severity, as findings with their lines, sorted by them."""
    places = Places(resolved.texts)
    found = [_finding(code, severity, problem, resolved, places) for code, severity, problem in problems]
    return arrange(found, list(resolved.texts))


def refuse_if_wrong(resolved: Resolved, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """The warnings, if there is nothing worse. Raises ProfileRefused with all findings otherwise."""
    findings = check(resolved, rules)
    if any(finding.severity == "error" for finding in findings):
        raise ProfileRefused(findings)
    return findings


def locate_origins(resolved: Resolved) -> dict[str, Origin]:
    """`resolved.origins` with line and column filled in for values from files; costs a parse of each file."""
    places = Places(resolved.texts)
    located = {}
    for key, origin in resolved.origins.items():
        line, column = places.find(origin, parse(key.split("."))) or (None, None)
        located[key] = Origin(origin.source, origin.text, line, column, origin.argument)
    return located


def _finding(code: str, severity: Severity, problem: Problem, resolved: Resolved, places: Places) -> Finding:
    if problem.at is not None:
        origin, line, column = problem.at
        message, help, origin = map(printable, (problem.message, problem.help, origin))
        return Finding(code, problem.key, message, help, severity, origin, line, column)
    path = parse(problem.key.split("."))
    fault = Fault(path, _blamed(problem, path, resolved), code, problem.message, problem.help)
    return replace(places.finding(fault), severity=severity)


def _blamed(problem: Problem, path: Path, resolved: Resolved) -> Origin:
    """Where the finding is: at the key, unless it was put in the wrong by something that was typed beside it."""
    own = _origin(problem.key, path, resolved)
    others = (resolved.origins[key] for key in problem.against if key in resolved.origins)
    typed = (origin for origin in others if origin.source in BESIDE)
    return own if own.source in BESIDE else next(typed, own)


def _origin(key: str, path: Path, resolved: Resolved) -> Origin:
    """Where the value came from; a value left out is looked for where it would stand, in the profile."""
    inside = (origin for name, origin in resolved.origins.items() if name.startswith(f"{key}."))
    origin = resolved.origins.get(key) or next(inside, DEFAULT)
    if origin.source != "default":
        return origin
    file = str(resolved.path) if resolved.path is not None else resolved.name
    return Origin("profile", file)
