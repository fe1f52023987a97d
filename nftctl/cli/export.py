"""`nftctl export`: a checkpoint as a folder that diffusers loads, with a model card. Nothing is written over."""

from __future__ import annotations

import shlex
from pathlib import Path

from nftctl.cli.console import Console
from nftctl.cli.inspect import locate
from nftctl.errors import UsageRefused

FORMS = ("lora", "merged", "diffusers")
WEIGHTS = ("policy", "old", "ema")


def export(target: str, out: Path, *, to: str, weights: str, base: str, json: bool) -> None:
    """Write the export, whole or not at all, and say how to load it."""
    from nftctl.model import card
    from nftctl.model import export as forms
    from nftctl.model.trained import open_trained
    from nftctl.run.outfolder import new_folder, refuse_taken

    _refuse_unknown("--to", to, FORMS)
    _refuse_unknown("--weights", weights, WEIGHTS)
    refuse_taken(out)
    console = Console(json=json)
    checkpoint = locate(target)
    # What cannot be had is refused before gigabytes are read.
    trained = open_trained(checkpoint, hashes=False)
    forms.refuse_unfit(trained, to, weights)
    name = forms.base_name(trained, base)
    card.loading(trained, to, name)
    if to != "lora":
        forms.refuse_no_pipeline(trained.base_place(base), to)
    console.say(f"hashing {checkpoint}")
    trained = open_trained(checkpoint)
    folder = trained.base(base, console.say) if to != "lora" else None
    with new_folder(out) as draft:
        console.say(f"writing {out}")
        if folder is None:
            count = forms.write_adapter(trained, weights, draft, name)
        elif to == "merged":
            count = forms.write_merged(trained, weights, folder, draft)
        else:
            count = forms.write_pipeline(trained, weights, folder, draft, name)
        card.write_card(trained, to, weights, name, draft)
        files = sorted(path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file())
        absent = forms.absent_parts(draft) if folder is not None else []
    if absent:
        console.warn(f"the base has no {', '.join(absent)}, so {out} has none either")
    console.say(f"{count} tensors of the {weights} at step {trained.manifest.step}; to load it:")
    for line in card.loading(trained, to, name).replace("FOLDER", str(out)).splitlines():
        console.say(f"  {line}".rstrip())
    console.data(str(out))
    console.result(
        "export",
        path=str(out),
        to=to,
        weights=weights,
        checkpoint=str(checkpoint),
        step=trained.manifest.step,
        base={"name": name, "fingerprint": trained.fingerprint},
        tensors=count,
        files=files,
        absent_parts=absent,
    )


def _refuse_unknown(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageRefused(f"{option} is one of {', '.join(known)}, got {shlex.quote(value)}")
