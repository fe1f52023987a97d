"""The ways to learn that are compared, by name; each is one module that is imported when it is asked for.

Owns the table, and which method is whose control. Refuses names that are not in it.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from nftctl.errors import UsageRefused
from nftctl.learning.methods.method import Method, Settings
from nftctl.learning.task import Task

METHODS = {
    "nft": "nftctl.learning.methods.nft",
    "flow-grpo": "nftctl.learning.methods.flow_grpo",
    "best-of-group": "nftctl.learning.methods.best_of_group",
    "control": "nftctl.learning.methods.control",
}
"""Method -> the module whose `make` makes it from a task and settings."""


def make(name: str, task: Task, settings: Settings) -> Method:
    """The method called `name`, at its first step."""
    if name not in METHODS:
        raise UsageRefused(f"no method {name!r}", hint=f"methods: {', '.join(METHODS)}")
    return cast(Method, import_module(METHODS[name]).make(task, settings))
