"""Trackers that are asked for are there: a run that logs to nothing looks like one that logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

from nftctl.profile.rules.rule import Facts, Problem, Rule

_PROJECT = re.compile(r"[A-Za-z0-9._-]{1,128}")


def _missing(facts: Facts) -> Iterator[Problem]:
    logging = facts.profile.logging
    for name, wanted in (("wandb", logging.wandb), ("trackio", logging.trackio)):
        if wanted and not _installed(name):
            message = f"logging.{name} needs the package {name}, which is not installed"
            yield Problem(f"logging.{name}", message, f"pip install 'nftctl[{name}]', or logging.{name} = false")


def _installed(name: str) -> bool:
    """Looked up, not imported. A folder of that name, such as W&B leaves in the working folder, is no package."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _project(facts: Facts) -> Iterator[Problem]:
    project = facts.profile.logging.project
    if not _PROJECT.fullmatch(project):
        message = f'logging.project = "{project}" must be 1 to 128 letters, digits, `.`, `_` or `-`'
        yield Problem("logging.project", message, "for example nftctl")


RULES = (
    Rule("tracker-missing", "A tracker that is asked for is installed.", _missing),
    Rule("tracker-project", "A project's name is one that W&B and trackio both take.", _project),
)
