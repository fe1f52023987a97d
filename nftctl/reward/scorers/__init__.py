"""Packaged scorers by name, each one a module of this folder that is imported when it is asked for.

Owns the registry and the revision of a scorer. A scorer module has `FILES` (every file that determines a score: its own
source, its weights) and `load() -> Scorer`; one line in `SCORERS` makes it known to `reward-serve` and to profiles.
Refuses an unknown name.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from nftctl.errors import RewardFailed


class Scorer(Protocol):
    """What turns images and prompts into numbers. Called from one thread at a time, never from the event loop."""

    @property
    def name(self) -> str:
        """Name in the registry and in `GET /v1/info`."""
        ...

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the parts that every answer holds."""
        ...

    def revision(self) -> str:
        """What changes when a score may change."""
        ...

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, components) per uint8 [H, W, 3] image, in order; all finite. May raise anything."""
        ...


def _load(module: str) -> Scorer:
    return cast(Scorer, _module(module).load())


SCORERS: dict[str, Callable[[], Scorer]] = {
    "tiny_digits": partial(_load, "tiny_digits"),
    "brightness": partial(_load, "brightness"),
}
"""Registry: name to loader. Names are module names."""


def load_scorer(name: str) -> Scorer:
    """The scorer called `name`, weights loaded. Raises RewardFailed naming the known ones."""
    _check(name)
    return SCORERS[name]()


def scorer_revision(name: str) -> str:
    """sha256 (hex) over name, size and content of the scorer's source and weight files, wherever they are installed."""
    _check(name)
    return files_revision(_module(name).FILES)


def files_revision(files: tuple[Path, ...]) -> str:
    """sha256 (hex) over name, size and content of `files`, in order."""
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _check(name: str) -> None:
    if name not in SCORERS:
        raise RewardFailed(f"there is no scorer {name!r}; packaged are {', '.join(sorted(SCORERS))}")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
