"""Model families by name. A new family is one module and one line here.

Owns the table and the way from `rl.init_from` to a folder. Refuses family names that nobody registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model.family import Family
from nftctl.profile.artifacts import inspect_folder
from nftctl.profile.prompts import base_folder
from nftctl.profile.schema import Model

FAMILIES = {"cosmos3": "nftctl.model.cosmos3", "sd3": "nftctl.model.sd3"}
"""Family -> the module whose `load` makes it; imported when asked for, since each brings much of diffusers along."""


def load_family(
    model: Model,
    init_from: str,
    family: str,
    device: torch.device,
    skip_keys: Sequence[str] = (),
    seed: int = 0,
    unread: bool = False,
) -> Family:
    """Load the base named by `rl.init_from` ("embedded", a diffusers folder or a distributed checkpoint) as `family`.

    Everything is frozen. `unread` checks the denoiser's weights and reads none: `Family.stored` fills them once they
    are sharded, so that nobody ever holds the whole. Raises CheckpointUnusable, ProfileRefused, UsageRefused.
    """
    if family not in FAMILIES:
        raise UsageRefused(f"no model family {family!r}", hint=f"families: {', '.join(sorted(FAMILIES))}")
    base = base_folder(init_from)
    if not base.is_dir():
        raise CheckpointUnusable(f"the base {init_from!r} is not a folder", hint="set rl.init_from to a local folder")
    found = inspect_folder(base)
    if found.kind == "unreadable":
        raise CheckpointUnusable(f"{init_from!r} is no base: {found.reason}")
    loaded: Family = import_module(FAMILIES[family]).load(
        base, model, device, skip_keys=skip_keys, seed=seed, unread=unread
    )
    return loaded
