"""`nftctl inspect-checkpoint --diff`: what differs between two checkpoints, or that nothing promised does. No torch.

Both are verified to the byte first: what a damaged one differs in means nothing, so it is refused with exit code 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nftctl.cli.console import Console, shorten, table
from nftctl.cli.inspect import count, facts_of, locate, other_checkpoints
from nftctl.errors import ExitCode, Finding

if TYPE_CHECKING:
    from nftctl.run.compare import Comparison

NAMES = 4
"""Tensors that one line names."""

EQUAL = "equal to the bit in everything promised: counters, identity, seeds, rewards, schedule, metrics, tensors"


def diff(target: str, other: str, *, tensors: bool, json: bool) -> None:
    """Print what is different in `other`; with `tensors`, also every tensor whose content differs."""
    from nftctl.run.compare import compare
    from nftctl.run.manifest import read_manifest, verify

    console = Console(json=json)
    folders = [locate(target), locate(other)]
    damaged = {folder: faults for folder in folders if (faults := verify(folder))}
    if damaged:
        _refuse(console, damaged)
    manifests = [read_manifest(folder) for folder in folders]
    found = compare(folders[0], manifests[0], folders[1], manifests[1])
    for line in _lines(folders, found, all_tensors=tensors):
        console.data(line)
    this_facts, other_facts = (facts_of(f, m, hashes=True) for f, m in zip(folders, manifests, strict=True))
    document = _document(found, all_tensors=tensors)
    console.result(
        "inspect-checkpoint", complete=True, verified=True, checkpoint=this_facts, other=other_facts, diff=document
    )


def _refuse(console: Console, damaged: dict[Path, list[str]]) -> None:
    faults = [
        Finding("checkpoint-damaged", "", text, origin=str(folder))
        for folder, texts in damaged.items()
        for text in texts
    ]
    console.findings(faults)
    for folder, texts in damaged.items():
        console.error(f"{folder} is not whole: {count(texts)}", other_checkpoints(folder))
    code = ExitCode.CHECKPOINT
    console.result("inspect-checkpoint", faults, exit_code=code, complete=False, verified=True)
    raise typer.Exit(code)


def _document(found: Comparison, *, all_tensors: bool) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "only_in_this": found.only_in_this,
        "only_in_other": found.only_in_other,
        "other_form": found.other_form,
        "parts": found.parts(),
    }
    if all_tensors:
        tensors["differing"] = [
            {
                "name": name,
                "numbers": change.numbers,
                "max_abs_difference": change.largest,
                "not_finite": change.not_finite,
            }
            for name, change in found.changes.items()
        ]
    return {"equal": found.equal, **found.facts, "tensors": tensors}


def _lines(folders: list[Path], found: Comparison, *, all_tensors: bool) -> list[str]:
    verdict = EQUAL if found.equal else "different"
    lines = table([("this", str(folders[0])), ("other", str(folders[1])), ("verdict", verdict)])
    facts = _fact_rows(found)
    if facts:
        lines += ["", *table([("what", "key", "this", "other"), *facts])]
    parts = [(name, *_part_cells(part)) for name, part in found.parts().items()]
    lines += ["", *table([("tensors", "compared", "differ", "max |difference|"), *parts])]
    forms = _form_rows(found)
    lines += ["", *table(forms)] if forms else []
    if all_tensors and found.changes:
        rows = [(name, str(c.numbers), _size(c.largest, c.not_finite)) for name, c in found.changes.items()]
        lines += ["", *table([("tensor", "numbers that differ", "max |difference|"), *rows])]
    return lines


def _fact_rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    seeds = {entry["key"] for entry in found.facts["seed_contract"]}
    rows = []
    for section, entries in found.facts.items():
        # Seeds are part of the identity too; numbers of a step are many, and follow from the rest.
        shown = [e for e in entries if section != "identity" or e["key"] not in seeds] if section != "metrics" else []
        rows += [(section, e["key"], shorten(e["this"]), shorten(e["other"])) for e in shown]
    metrics = len(found.facts["metrics"])
    return rows + ([("metrics", f"{metrics} differ at the newest step in both", "", "")] if metrics else [])


def _part_cells(part: dict[str, Any]) -> tuple[str, str, str]:
    size = _size(part["max_abs_difference"], part["not_finite"])
    where = f" in {part['where']}" if part["where"] else ""
    return str(part["tensors"]), str(part["differing"]), f"{size}{where}" if part["differing"] else "0"


def _size(largest: float | None, not_finite: int) -> str:
    parts = [f"{largest:.6g}"] if largest is not None else []
    parts += [f"{not_finite} not finite"] if not_finite else []
    return ", ".join(parts) or "not floating"


def _form_rows(found: Comparison) -> list[tuple[str, str]]:
    rows = []
    for label, names in (("only in this", found.only_in_this), ("only in other", found.only_in_other)):
        if names:
            more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
            rows.append((label, ", ".join(names[:NAMES]) + more))
    rows += [
        ("other form", f"{e['name']}: {_form(e['this'])} here, {_form(e['other'])} in other") for e in found.other_form
    ]
    return rows


def _form(entry: dict[str, Any]) -> str:
    return f"{entry['dtype']} {entry['shape']}"
