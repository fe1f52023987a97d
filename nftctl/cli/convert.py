"""`nftctl convert`: a denoiser's weights between diffusers layout and a distributed checkpoint, both ways."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nftctl.cli.console import Console
from nftctl.errors import UsageRefused

SHOWN = 8


def convert(
    source: Path, target: Path, *, config: Path | None, like: Path | None, strip_prefix: str, json: bool
) -> None:
    """Write `target`, whole or not at all; the kind of `source` decides the direction."""
    from nftctl.run.outfolder import refuse_taken

    source = source.expanduser()
    if not source.is_dir():
        raise UsageRefused(f"{source} is not a folder")
    refuse_taken(target)
    console = Console(json=json)
    console.say(f"reading {source}")

    from nftctl.model.convert import component_of

    component = component_of(source)
    if component is not None:
        if config is not None or like is not None or strip_prefix:
            raise UsageRefused(f"{source} is in diffusers layout: --config, --like and --strip-prefix are for DCP")
        facts = _to_dcp(component, target)
    else:
        facts = _to_diffusers(console, source, target, config, like, strip_prefix)
    console.say(f"{facts['tensors']} tensors, {facts['bytes']:,} bytes, in {len(facts['files'])} files")
    console.data(str(target))
    console.result("convert", path=str(target), source=str(source), **facts)


def _to_dcp(component: Path, target: Path) -> dict[str, Any]:
    from nftctl.model.convert import write_dcp
    from nftctl.run.outfolder import new_folder

    with new_folder(target) as draft:
        forms = write_dcp(component, draft)
        return _facts("dcp", forms, draft, [], [])


def _to_diffusers(
    console: Console, source: Path, target: Path, config: Path | None, like: Path | None, strip_prefix: str
) -> dict[str, Any]:
    from nftctl.model.convert import config_folder, open_dcp, refuse_no_base, write_diffusers
    from nftctl.run.outfolder import new_folder

    if like is not None:
        refuse_no_base(like)
    tensors = open_dcp(source)
    _refuse_idle_prefix(source, tensors.forms, strip_prefix)
    place = config_folder(source, config, like)
    not_tensors = list(getattr(tensors, "not_tensors", []))
    with new_folder(target) as draft:
        forms, left_out = write_diffusers(tensors, place, like, strip_prefix, draft)
        facts = _facts("diffusers", forms, draft, left_out, not_tensors)
    if left_out:
        console.say(f"left out {len(left_out)} tensors whose names do not begin with {strip_prefix}")
    if not_tensors:
        console.say(f"left out {len(not_tensors)} entries that are no tensors; they were not read")
    return facts


def _refuse_idle_prefix(source: Path, names: Collection[str], prefix: str) -> None:
    """A prefix that no name has would leave every tensor out."""
    if prefix and not any(name.startswith(prefix) for name in names):
        first = sorted({name.partition(".")[0] for name in names})
        more = ", ..." if len(first) > SHOWN else ""
        message = f"--strip-prefix {shlex.quote(prefix)}: none of the {len(names)} tensors in {source} has that prefix"
        raise UsageRefused(message, hint=f"their names begin with {', '.join(f'{n}.' for n in first[:SHOWN])}{more}")


def _facts(
    kind: str, forms: dict[str, Any], draft: Path, left_out: list[str], not_tensors: list[str]
) -> dict[str, Any]:
    from nftctl.run.stored import form_bytes

    files = sorted(path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file())
    total = sum(map(form_bytes, forms.values()))
    return {"to": kind, "tensors": len(forms), "bytes": total, "files": files, "left_out": left_out,
            "not_tensors": not_tensors}  # fmt: skip
