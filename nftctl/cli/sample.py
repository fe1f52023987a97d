"""`nftctl sample`: what base, old and policy of a checkpoint make of the same noise, as one grid and as single images.

Runs in this process alone. Everything that can be refused is refused before the model is loaded.
"""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nftctl.cli.console import Console
from nftctl.cli.inspect import locate
from nftctl.errors import CheckpointUnusable, ProfileRefused, UsageRefused

if TYPE_CHECKING:
    from nftctl.engine.sheet import Sheet
    from nftctl.model.family import Family
    from nftctl.model.trained import Trained
    from nftctl.profile.prompts import Prompt
    from nftctl.profile.schema import Profile
    from nftctl.profile.t2i import T2iProfile

DEVICES = ("auto", "cpu", "cuda")
MOST_PROMPTS = 64
"""Rows of one grid."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says; None is the run's own value."""

    prompts: list[str]
    prompt_file: Path | None
    weights: str | None
    seed: int | None
    steps: int | None
    guidance: float | None
    shift: float | None
    device: str
    base: str


def sample(target: str, wishes: Wishes, out: Path, images: Path | None, *, json: bool) -> None:
    """Write the grid, and each image on its own where `images` names a folder."""
    from nftctl.model.trained import open_trained
    from nftctl.run.outfolder import new_folder, refuse_taken

    if wishes.device not in DEVICES:
        raise UsageRefused(f"--device is one of {', '.join(DEVICES)}, got {shlex.quote(wishes.device)}")
    _refuse_bad_numbers(wishes)
    _refuse_bad_file(out)
    if images is not None:
        refuse_taken(images)
    console = Console(json=json)
    checkpoint = locate(target)
    # What cannot be had is refused before gigabytes are read.
    trained = open_trained(checkpoint, hashes=False)
    profile = _profile(trained)
    sheet = _sheet(trained, profile, wishes)
    _refuse_unknown_words(trained.base_place(wishes.base), trained.contract, profile, sheet, wishes)
    console.say(f"hashing {checkpoint}")
    trained = open_trained(checkpoint)
    base = trained.base(wishes.base, console.say)
    for part in ("vae", "tokenizer"):
        trained.part(part)

    from nftctl.engine import sheet as work
    from nftctl.engine.pictures import write_grid

    device = work.pick_device(wishes.device)
    family = work.load_base(trained, profile, base, device)
    console.say(f"{family.report.loaded} of {family.report.expected} base tensors loaded on {device}")
    _refuse_unreadable(family, sheet, wishes)
    drawn = work.draw(sheet, trained, family, profile, device, console.say)
    title = f"step {trained.manifest.step}, seed {sheet.seed}, {sheet.how.steps} steps, guidance {sheet.how.guidance:g}"
    write_grid(out, drawn, [prompt.reward_text for prompt in sheet.prompts], title, captions=sheet.columns)
    names = [[f"{row:03d}_{name}.png" for name in sheet.columns] for row in range(len(sheet.prompts))]
    if images is not None:
        from PIL import Image

        with new_folder(images) as draft:
            for row, line in enumerate(names):
                for column, name in enumerate(line):
                    Image.fromarray(drawn[row, column]).save(draft / name)
    console.data(str(out))
    console.result(
        "sample",
        path=str(out),
        images=None if images is None else str(images),
        checkpoint=str(checkpoint),
        step=trained.manifest.step,
        columns=list(sheet.columns),
        rows=[
            {"prompt": p.text, "shown": p.reward_text, "key": list(key), "images": line if images is not None else []}
            for p, key, line in zip(sheet.prompts, sheet.keys, names, strict=True)
        ],
        sampling={"steps": sheet.how.steps, "shift": sheet.how.shift, "guidance": sheet.how.guidance},
        device=str(device),
    )


def _refuse_bad_numbers(wishes: Wishes) -> None:
    """The option parser lets nan and inf through its bounds."""
    if wishes.guidance is not None and not (math.isfinite(wishes.guidance) and wishes.guidance >= 0):
        raise UsageRefused(f"--guidance is a finite number of 0 or more, got {wishes.guidance:g}")
    if wishes.shift is not None and not (math.isfinite(wishes.shift) and wishes.shift > 0):
        raise UsageRefused(f"--shift is a finite number above 0, got {wishes.shift:g}")


def _refuse_unknown_words(base: Path, contract: T2iProfile, profile: Profile, sheet: Sheet, wishes: Wishes) -> None:
    """Refuse a prompt by the files of the base's tokenizer alone, where they say which words there are."""
    from nftctl.profile.artifacts import known_words, local
    from nftctl.profile.vocabulary import known, lacking, no_words

    if not contract.embedded or not (wishes.prompts or wishes.prompt_file is not None):
        return
    given = profile.model.tokenizer
    folders = [local(given)] if given else [base / part for part in ("tokenizer", "text_tokenizer")]
    words = next(filter(None, map(known_words, folders)), ())
    unknown = {prompt.text: lacking(prompt.text, words) for prompt in sheet.prompts} if words else {}
    wrong = [f"the prompt {text!r}: {no_words(found)}" for text, found in unknown.items() if found]
    if wrong:
        raise UsageRefused("; ".join(wrong), hint=known(words))


def _refuse_unreadable(family: Family, sheet: Sheet, wishes: Wishes) -> None:
    """Refuse a prompt that the base's tokenizer refuses: the command line's fault where the prompt came from there."""
    try:
        for prompt in sheet.prompts:
            family.encoder.check(prompt.text)
    except ProfileRefused as refused:
        if wishes.prompts or wishes.prompt_file is not None:
            raise UsageRefused(refused.message) from None
        raise


def _refuse_bad_file(out: Path) -> None:
    if out.suffix.lower() != ".png":
        raise UsageRefused(f"the grid is a PNG file, and {shlex.quote(str(out))} does not end in .png")
    if os.path.lexists(out):
        raise UsageRefused(f"{out} is there already and is never overwritten", hint="add --out OTHER.png")
    folder = out.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageRefused(f"{out} cannot be written: {folder} is no folder that can be written to")


def _profile(trained: Trained) -> Profile:
    """The run's own profile; the environment and the working folder have no say."""
    from nftctl.profile.load import load_resolved

    if trained.run is None:
        raise CheckpointUnusable(
            f"{trained.folder} lies in no run, so nothing says how its model is built",
            hint="name a checkpoint inside its run folder: RUN/checkpoints/step_000100",
        )
    return load_resolved(trained.resolved, name=trained.run.name, text="", env={}).profile


def _sheet(trained: Trained, profile: Profile, wishes: Wishes) -> Sheet:
    from nftctl.engine.sheet import Sheet
    from nftctl.roles.trajectory import Sampling

    look, rl = profile.eval, profile.rl
    steps = look.steps if wishes.steps is None else wishes.steps
    guidance = look.guidance if wishes.guidance is None else wishes.guidance
    return Sheet(
        prompts=_prompts(profile, wishes),
        columns=_columns(trained, wishes.weights),
        seed=look.seed if wishes.seed is None else wishes.seed,
        how=Sampling(
            steps=rl.sample_steps if steps is None else steps,
            shift=rl.sampler_shift if wishes.shift is None else wishes.shift,
            guidance=rl.guidance if guidance is None else guidance,
        ),
    )


def _columns(trained: Trained, wanted: str | None) -> list[str]:
    from nftctl.engine.sheet import COLUMNS

    there = [name for name in COLUMNS if name == "base" or trained.has(name)]
    if wanted is None:
        return there
    names = [name.strip() for name in wanted.split(",")]
    unknown = [name for name in names if name not in there]
    if unknown or len(set(names)) < len(names):
        wrong = f"there is no {shlex.quote(unknown[0])}" if unknown else "each only once"
        raise UsageRefused(f"--weights is a list of {', '.join(there)}: {wrong}", hint="--weights base,policy")
    return names


def _prompts(profile: Profile, wishes: Wishes) -> list[Prompt]:
    """The prompts that are named, else those of the run's own grid."""
    from nftctl.profile.prompts import Prompt, read_prompts, resolve_prompt_file, spread

    if any(not text.strip() for text in wishes.prompts):
        raise UsageRefused("a --prompt is empty")
    prompts = [Prompt(text, text) for text in wishes.prompts]
    if wishes.prompt_file is not None:
        try:
            prompts += read_prompts(wishes.prompt_file)
        except ProfileRefused as refused:
            wrong = refused.findings[0]
            where = "" if wrong.line is None else f", line {wrong.line}"
            raise UsageRefused(
                f"--prompt-file {shlex.quote(str(wishes.prompt_file))}{where}: {wrong.message}"
            ) from None
    if not prompts:
        held_out = profile.eval.prompt_file
        path = (
            resolve_prompt_file(held_out, "test")
            if held_out
            else resolve_prompt_file(profile.data.prompt_file, "train")
        )
        prompts = spread(read_prompts(path), profile.samples.prompts)
    if len(prompts) > MOST_PROMPTS:
        raise UsageRefused(f"a grid has {MOST_PROMPTS} rows at most, and {len(prompts)} prompts were named")
    if not prompts:
        raise UsageRefused("the run drew no grids, so there is no prompt to take", hint="add --prompt TEXT")
    return prompts
