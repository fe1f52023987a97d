"""What is different in two whole checkpoints: facts by key, tensors by content, whatever files they are spread over.

Owns what a checkpoint promises to the bit: counters, identity, seed contract, reward revisions, schedule, metrics and
tensors; not when, by which versions and in which run it was written. Reads a few million numbers at a time. Neither
verifies nor judges: hand it checkpoints that are whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nftctl.errors import CheckpointUnusable
from nftctl.run.identity import differences
from nftctl.tensorblocks import Block, read_blocks
from nftctl.tensorfile import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from nftctl.run.manifest import Manifest

PROMISED = ("step", "state", "identity", "seed_contract", "reward", "ranks", "schedule", "metrics")
"""Facts that are equal in two checkpoints of equal runs; `run` and `versions` may differ."""

SLAB = 1 << 22
"""Numbers of one tensor that are read at once; a single row may be longer."""

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
"""Dtypes that NumPy has; BF16 is the upper half of an F32."""


@dataclass(slots=True)
class Change:
    """How the content of one tensor differs."""

    numbers: int = 0
    """Places where the bits differ."""
    largest: float | None = None
    """Greatest |difference| that is a finite number; None for a tensor whose numbers are not floating."""
    not_finite: int = 0
    """Differing places where the difference is NaN or infinite."""


@dataclass(slots=True)
class Comparison:
    """Everything that differs. Keys of `facts` are sections, each a list of {key, this, other}."""

    facts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    only_in_this: list[str] = field(default_factory=list)
    only_in_other: list[str] = field(default_factory=list)
    other_form: list[dict[str, Any]] = field(default_factory=list)
    """Tensors of another dtype or shape: {name, this, other}, each side {dtype, shape}."""
    compared: list[str] = field(default_factory=list)
    """Tensors in both, of one form."""
    changes: dict[str, Change] = field(default_factory=dict)
    """Those of them whose content differs."""

    @property
    def equal(self) -> bool:
        """Whether everything that is promised is the same to the bit."""
        tensors = (self.only_in_this, self.only_in_other, self.other_form, self.changes)
        return not any(tensors) and not any(self.facts[section] for section in PROMISED)

    def parts(self) -> dict[str, dict[str, Any]]:
        """Policy, moving old and optimizer: tensors compared, how many differ, and by how much at most."""
        names = dict.fromkeys(["policy", "old", "optim", *sorted(name.partition(".")[0] for name in self.compared)])
        return {name: self._part([n for n in self.compared if n.partition(".")[0] == name]) for name in names}

    def _part(self, names: list[str]) -> dict[str, Any]:
        changed = {name: self.changes[name] for name in names if name in self.changes}
        largest = {name: c.largest for name, c in changed.items() if c.largest is not None}
        where = max(largest, key=largest.__getitem__, default=None)
        return {
            "tensors": len(names),
            "differing": len(changed),
            "max_abs_difference": None if where is None else largest[where],
            "where": where,
            "not_finite": sum(change.not_finite for change in changed.values()),
        }


def compare(this: Path, this_manifest: Manifest, other: Path, other_manifest: Manifest) -> Comparison:
    """Compare two whole checkpoints. Raises CheckpointUnusable when a file goes away meanwhile."""
    a, b = this_manifest.tensors, other_manifest.tensors
    found = Comparison(_facts(this_manifest, other_manifest), sorted(set(a) - set(b)), sorted(set(b) - set(a)))
    for name in sorted(set(a) & set(b)):
        if a[name] == b[name]:
            found.compared.append(name)
        else:
            found.other_form.append({"name": name, "this": a[name], "other": b[name]})
    blocks_a, blocks_b = _blocks(this, this_manifest), _blocks(other, other_manifest)
    try:
        for name in found.compared:
            change = _compare_tensor(blocks_a[name], blocks_b[name])
            if change.numbers:
                found.changes[name] = change
    except OSError as error:
        raise CheckpointUnusable(f"cannot read {error.filename}: {error.strerror}") from error
    return found


def _facts(this: Manifest, other: Manifest) -> dict[str, list[dict[str, Any]]]:
    a, b = _documents(this), _documents(other)
    return {
        section: [{"key": d.key, "this": d.was, "other": d.now} for d in differences(a[section], b[section])]
        for section in a
    } | {"metrics": _metrics(this, other)}


def _documents(manifest: Manifest) -> dict[str, dict[str, Any]]:
    return {
        "run": {"run_id": manifest.run_id},
        "step": {"step": manifest.step},
        "state": {key: value for key, value in manifest.state.items() if key != "step"},
        "identity": manifest.identity,
        "seed_contract": manifest.seed_contract,
        "reward": {str(entry.get("name")): entry.get("revision") for entry in manifest.reward},
        "ranks": {"world_size": manifest.world_size},
        "schedule": manifest.schedule,
        "versions": manifest.versions,
    }


def _metrics(this: Manifest, other: Manifest) -> list[dict[str, Any]]:
    """The newest step that both remember, without timings and machine figures."""
    a, b = (
        {row["step"]: row for row in m.metric_tail if isinstance(row, dict) and type(row.get("step")) is int}
        for m in (this, other)
    )
    step = max(set(a) & set(b), default=None)
    if step is None:
        return []
    rows = ({k: v for k, v in tail[step].items() if not k.startswith(("timer/", "system/"))} for tail in (a, b))
    return [{"key": d.key, "this": d.was, "other": d.now} for d in differences(*rows)]


def _blocks(folder: Path, manifest: Manifest) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for entry in manifest.files:
        if entry["name"].endswith(".safetensors"):
            for name, block in read_blocks(folder / entry["name"]):
                found.setdefault(name, []).append(block)
    return found


def _compare_tensor(this: list[Block], other: list[Block]) -> Change:
    """Every place lies in exactly one block of each side, so the blocks' common boxes are the whole tensor."""
    change = Change()
    for a in this:
        for b in other:
            if a.overlaps(b):
                for mine, theirs in _common(a, b):
                    _count(a.dtype, mine, theirs, change)
    return change


def _common(a: Block, b: Block) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """The bits of the box that both blocks cover, slab by slab along the first dimension."""
    low = [max(pair) for pair in zip(a.offsets, b.offsets, strict=True)]
    high = [min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)]
    if not low:
        yield _slab(a, 0, 1, [], []), _slab(b, 0, 1, [], [])
        return
    rows = max(1, SLAB // max(math.prod(a.shape[1:]), math.prod(b.shape[1:]), 1))
    for start in range(low[0], high[0], rows):
        stop = min(start + rows, high[0])
        yield _slab(a, start, stop, low, high), _slab(b, start, stop, low, high)


def _slab(block: Block, start: int, stop: int, low: list[int], high: list[int]) -> npt.NDArray[Any]:
    """Rows [start, stop) of the whole tensor, of which `block` holds all between `low` and `high`, as unsigned."""
    import numpy as np

    row, size = math.prod(block.shape[1:]), ITEM_BYTES[block.dtype]
    first = start - (block.offsets[0] if block.offsets else 0)
    count = (stop - start) * row
    raw = np.fromfile(block.path, f"<u{size}", count, offset=block.info.begin + first * row * size)
    if len(raw) < count:
        raise CheckpointUnusable(f"{block.path} became shorter while it was read")
    inside = [slice(lo - at, hi - at) for lo, hi, at in zip(low[1:], high[1:], block.offsets[1:], strict=True)]
    return raw.reshape(stop - start, *block.shape[1:])[(slice(None), *inside)]


def _count(dtype: str, this: npt.NDArray[Any], other: npt.NDArray[Any], change: Change) -> None:
    differ = this != other
    if not differ.any():
        return
    change.numbers += int(differ.sum())
    if dtype not in FLOATS and dtype != "BF16":
        return
    import numpy as np

    with np.errstate(all="ignore"):
        gap = np.abs(_wide(dtype, this[differ]) - _wide(dtype, other[differ]))
    finite = np.isfinite(gap)
    change.not_finite += int((~finite).sum())
    if finite.any():
        change.largest = max(change.largest or 0.0, float(gap[finite].max()))


def _wide(dtype: str, bits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    import numpy as np

    if dtype == "BF16":
        return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)
    return bits.view(FLOATS[dtype]).astype(np.float64)
