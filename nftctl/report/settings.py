"""What a run was told: its profile where it differs from the defaults or from other runs, and what it ran on."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nftctl.report.facts import RunFacts
from nftctl.report.figures import size
from nftctl.report.markup import Markup, folded, table, tag
from nftctl.run.identity import ABSENT, OUTSIDE_KEYS, OUTSIDE_SECTIONS, differences, why

CHECKPOINTS = 12
"""Newest checkpoints that are listed."""


def flat(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted leaves; entries of a list of tables by their number. What is empty is a leaf."""
    for key, value in _entries(tree):
        leaves = list(flat(value, f"{prefix}{key}."))
        yield from leaves or [(f"{prefix}{key}", value)]


def _entries(tree: object) -> Iterable[tuple[object, Any]]:
    if isinstance(tree, Mapping):
        return tree.items()
    tables = isinstance(tree, list) and all(isinstance(item, Mapping) for item in tree)
    return enumerate(tree) if tables and isinstance(tree, list) else ()


def defaults_for(profile: Mapping[str, Any]) -> dict[str, Any]:
    """What each key would be if nobody had said anything; a provider's by the defaults of providers."""
    from nftctl.profile.schema import Profile, Provider

    known = dict(flat(Profile().model_dump()))
    known.pop("reward.providers", None)
    provider = Provider(name="").model_dump()
    listed = profile.get("reward", {}).get("providers") or []
    return known | {f"reward.providers.{i}.{key}": value for i in range(len(listed)) for key, value in provider.items()}


def changed(run: RunFacts) -> list[tuple[str, Any, Any]]:
    """Key, value and default where they differ."""
    defaults = defaults_for(run.profile)
    return [
        (key, value, defaults.get(key, ABSENT))
        for key, value in flat(run.profile)
        if value != defaults.get(key, ABSENT)
    ]


def compared(runs: Sequence[RunFacts]) -> list[tuple[str, list[Any]]]:
    """Keys whose values are not the same in all runs, with each run's value; names and places are no difference."""
    first, *others = documents = [dict(flat(run.profile)) for run in runs]
    keys = sorted({d.key for other in others for d in differences(first, other)} - {"job.name", "job.run_dir"})
    return [(key, [document.get(key, ABSENT) for document in documents]) for key in keys]


def comparison(runs: Sequence[RunFacts], names: Sequence[str]) -> Markup:
    """The table of what differs between the runs."""
    rows = [(_code(key), *map(_code, map(shown, values)), _effect(key)) for key, values in compared(runs)]
    if not rows:
        return tag("p", "Their profiles differ in nothing but name and place.")
    return table(("key", *names, "what it changes"), rows, caption="Profile keys that differ between the runs")


def _effect(key: str) -> str:
    outside = key in OUTSIDE_KEYS or key.partition(".")[0] in OUTSIDE_SECTIONS
    return "no result: when, where or how it is written down" if outside else why(key)


def profile_section(run: RunFacts) -> Markup:
    """The profile where it is not the default, and all of it folded away."""
    rows = [(_code(key), _code(shown(value)), _code(shown(default))) for key, value, default in changed(run)]
    own = table(("key", "value", "default"), rows, caption="Profile values that are not the default")
    every = [(_code(key), _code(shown(value))) for key, value in flat(run.profile)]
    whole = folded(f"All {len(every)} values", table(("key", "value"), every, caption="The whole resolved profile"))
    return Markup(own + whole)


def record_section(run: RunFacts) -> Markup:
    """Identity, versions, command line, attempts and checkpoints."""
    facts = [(tag("span", name), value) for name, value in _facts(run)]
    return Markup(table(("what", "value"), facts, caption="Identity and environment") + _checkpoints(run))


def _facts(run: RunFacts) -> Iterator[tuple[str, object]]:
    record = run.record
    for name, key in (("run id", "run_id"), ("profile", "profile"), ("identity", "identity"),
                      ("base", "init_from"), ("base fingerprint", "base_fingerprint")):  # fmt: skip
        if record.get(key):
            yield name, _code(record[key])
    for name, key in (("reward revision", "reward_revisions"), ("version", "versions")):
        entries = record.get(key)
        for label, value in entries.items() if isinstance(entries, Mapping) else ():
            yield f"{name} of {label}", _code(value)
    argv = record.get("argv")
    if isinstance(argv, list) and argv:
        yield "command", _code(shlex.join(["nftctl", *map(str, argv[1:])]))
    parent = record.get("parent")
    if isinstance(parent, Mapping) and parent:
        yield "forked from", _code(f"{parent.get('run')} at step {parent.get('step')}")
    yield "attempts", f"{len(run.attempts)}" + (" (resumed)" if len(run.attempts) > 1 else "")
    restarts = record.get("restarts")
    if isinstance(restarts, list) and restarts and isinstance(restarts[-1], Mapping):
        last = restarts[-1]
        yield "restarts by itself", f"{len(restarts)}, the last from step {last.get('step')}: {last.get('reason')}"
    yield "folder", _code(run.path)


def _checkpoints(run: RunFacts) -> Markup:
    found = run.checkpoints
    heading = tag("h3", "Checkpoints")
    if not found:
        return Markup(heading + tag("p", "None."))
    rows = [(_code(name), size(count), state) for name, count, state in found[-CHECKPOINTS:]]
    said = "Looked at from outside; nftctl inspect-checkpoint --verify reads every byte."
    if len(found) > CHECKPOINTS:
        said = f"The newest {CHECKPOINTS} of {len(found)}. {said}"
    return Markup.join_all(
        [heading, table(("name", "size", "state"), rows, caption="Checkpoints"), tag("p", said, class_="note")]
    )


def shown(value: object) -> str:
    """A value as a profile would write it."""
    from nftctl.run.canonical import canonical_bytes

    if value is None:
        return "unset"
    return value if value == ABSENT and isinstance(value, str) else canonical_bytes(value).decode()


def _code(value: object) -> Markup:
    return tag("code", value)
