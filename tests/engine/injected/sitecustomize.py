"""On PYTHONPATH, it makes the ranks of a real run fail from within: the fault that TEST_FAULT names, as a module loads.

Python imports this module at every start, so it must stay small and do nothing where no fault is asked for.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from types import ModuleType
from typing import Any


def memory(policy: Any) -> None:
    """Rank 1 finds no memory in the backward of its third step."""
    original, calls = policy.PolicyRole._accumulate, []

    def accumulate(self: Any, *args: Any) -> Any:
        calls.append(1)
        if self._rank == 1 and len(calls) == 3:
            raise MemoryError("out of memory on purpose")
        return original(self, *args)

    policy.PolicyRole._accumulate = accumulate


def slow_writer(checkpoint: Any) -> None:
    """From the second checkpoint on, writing takes a minute."""
    original, calls = checkpoint._write_whole, []

    def write(*args: Any) -> None:
        calls.append(1)
        time.sleep(60 * (len(calls) > 1))
        original(*args)

    checkpoint._write_whole = write


def slow_shards(checkpoint: Any) -> None:
    """What all ranks write together takes 12 seconds."""
    original = checkpoint._SnapshotWriter.write_data

    def write_data(*args: Any) -> Any:
        time.sleep(12)
        return original(*args)

    checkpoint._SnapshotWriter.write_data = write_data


FAULTS = {
    "memory": ("nftctl.roles.policy", memory),
    "slow-writer": ("nftctl.engine.checkpoint", slow_writer),
    "slow-shards": ("nftctl.engine.checkpoint", slow_shards),
}


class Patched(importlib.abc.MetaPathFinder):
    """Finds one module, once, and applies the fault to it as soon as it is loaded."""

    def __init__(self, name: str, fault: Any) -> None:
        self.name, self.fault = name, fault

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.fault(module)

        loader.exec_module = exec_module
        return spec


if fault := os.environ.get("TEST_FAULT"):
    sys.meta_path.insert(0, Patched(*FAULTS[fault]))
