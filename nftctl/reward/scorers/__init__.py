"""Packaged scorers by name, each one a module of this folder that is imported when it is asked for.

Owns the registry and the revision of a scorer. A scorer module has `load() -> Scorer` and `FILES`, every packaged
file that determines a score (or `revision()`, where files are not all); one line in `SCORERS` makes it known to
`reward-serve` and to profiles. Those in `MODELS` take the place of a model in both functions. Refuses an unknown name.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from nftctl.errors import RewardFailed

CHUNK = 2**20


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


def _load(module: str, *arguments: str) -> Scorer:
    return cast(Scorer, _module(module).load(*arguments))


SCORERS: dict[str, Callable[..., Scorer]] = {
    "tiny_digits": partial(_load, "tiny_digits"),
    "brightness": partial(_load, "brightness"),
    "jpeg_compressibility": partial(_load, "jpeg_compressibility"),
    "jpeg_incompressibility": partial(_load, "jpeg_incompressibility"),
    "colour_shape": partial(_load, "colour_shape"),
    "scenes": partial(_load, "scenes"),
    "ocr": partial(_load, "ocr"),
    "clip_score": partial(_load, "clip_score"),
    "pickscore": partial(_load, "pickscore"),
    "aesthetic": partial(_load, "aesthetic"),
}
"""Registry: name to loader. Names are module names."""

MODELS = ("clip_score", "pickscore", "aesthetic")
"""Scorers around a model that is not packaged: a local folder or a hub id, in `load(model)` and `revision(model)`."""


def load_scorer(name: str, model: str = "") -> Scorer:
    """The scorer called `name`, weights loaded. Raises RewardFailed naming the known ones."""
    _check(name, model)
    return SCORERS[name](model) if name in MODELS else SCORERS[name]()


def scorer_revision(name: str, model: str = "") -> str:
    """sha256 (hex) over name, size and content of the scorer's source and weight files, wherever they are installed."""
    _check(name, model)
    module = _module(name)
    if name in MODELS:
        return str(module.revision(model))
    return str(module.revision()) if hasattr(module, "revision") else files_revision(module.FILES)


def files_revision(files: Iterable[Path]) -> str:
    """sha256 (hex) over name, size and content of `files`, in order."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as content:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            while chunk := content.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _check(name: str, model: str) -> None:
    if name not in SCORERS:
        raise RewardFailed(f"there is no scorer {name!r}; packaged are {', '.join(sorted(SCORERS))}")
    if model and name not in MODELS:
        raise RewardFailed(f"scorer {name} takes no model, got {model!r}; those that do are {', '.join(MODELS)}")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
