"""A scorer out of a person's own file: one function `(images, prompts, metadata) -> scores`.

Owns how it is named (`path/to/file.py:function`), loaded and hashed. Scores are numbers, one per image; a function that
wants files of its own in the revision lists them in the module's `FILES`. What the file imports from its own folder is
hashed as well. Refuses anything that is not a function of an importable file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from nftctl.errors import RewardFailed
from nftctl.reward.scorers import files_revision

SUFFIX = ".py"

Function = Callable[[list[npt.NDArray[np.uint8]], list[str], list[dict[str, Any]]], Any]


class UserScorer:
    """Calls `function`; its name is the scorer's, and there are no components."""

    components: tuple[str, ...] = ()

    def __init__(self, function: Function, name: str, revision: str) -> None:
        self.name = name
        self._function = function
        self._revision = revision

    def revision(self) -> str:
        """sha256 over the function's name and the files that it was loaded from."""
        return self._revision

    def score(
        self, images: list[npt.NDArray[np.uint8]], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """One (score, {}) per uint8 [H, W, 3] image, whatever sequence or array of numbers the function returned."""
        scores = self._function(images, prompts, metadata)
        # A scalar of NumPy or torch is a number to its author; `item` says which.
        return [(value.item() if hasattr(value, "item") else value, {}) for value in scores]


def is_user_scorer(where: str) -> bool:
    """Whether `where` names a file rather than a packaged scorer."""
    return where.endswith(SUFFIX) or where.rpartition(":")[0].endswith(SUFFIX)


def load_user_scorer(where: str) -> UserScorer:
    """The function behind `path/to/file.py:function`. Raises RewardFailed that says what is wrong with it."""
    text, _, name = where.rpartition(":")
    if not text:
        raise RewardFailed(f"{where} does not say which function to call", hint=f"--scorer {where}:FUNCTION")
    path = Path(text).expanduser().resolve()
    if not path.is_file():
        raise RewardFailed(f"there is no scorer file {path}")
    module = _import(path)
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        )
        raise RewardFailed(f"{path} has no function {name!r}; it has: {', '.join(there) or 'none'}")
    try:
        files = [*source_files(path), *_listed(module, path)]
    except SyntaxError as error:
        raise RewardFailed(f"{error.filename or path} is not Python: {error}") from None
    digest = hashlib.sha256(f"{name} {files_revision(files)}".encode())
    return UserScorer(function, name, digest.hexdigest())


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nftctl_user_scorer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardFailed(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Like a script: what lies beside the file can be imported.
    sys.path.insert(0, str(path.parent))
    try:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardFailed(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def source_files(path: Path) -> list[Path]:
    """`path` and every file of its folder that it imports, directly or through another, wherever the statement stands.

    Read from the text, not from what happens to be loaded, so that every process finds the same.
    """
    found, waiting = {path}, [path]
    while waiting:
        new = {file for name in _import_names(waiting.pop()) for file in _places(path.parent, name)} - found
        found |= new
        waiting += new
    return [path, *sorted(found - {path})]


def _import_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # "from a import b" may mean the file a/b.py; inside a package, names are relative to it.
            inside = ".".join([*[path.parent.name][: node.level], *filter(None, [node.module])])
            yield inside
            yield from (f"{inside}.{alias.name}" for alias in node.names)


def _places(folder: Path, name: str) -> Iterator[Path]:
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:n])
        yield from (f for f in (place.with_suffix(SUFFIX), place / f"__init__{SUFFIX}") if parts[0] and f.is_file())


def _listed(module: ModuleType, path: Path) -> Iterator[Path]:
    for entry in getattr(module, "FILES", ()):
        file = path.parent / entry
        if not file.is_file():
            raise RewardFailed(f"{path} lists {str(entry)!r} in FILES, and there is no such file")
        yield file
