"""Model families by name. A new family is one module and one line here.

Owns the table and the way from `rl.init_from` to a folder. Refuses family names that nobody registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model import cosmos3
from nftctl.model.family import Family
from nftctl.profile.prompts import base_folder
from nftctl.profile.schema import Model

FAMILIES: dict[str, Callable[..., Family]] = {"cosmos3": cosmos3.load}


def load_family(
    model: Model,
    init_from: str,
    family: str,
    device: torch.device,
    skip_keys: Sequence[str] = (),
    seed: int = 0,
    denoiser_device: torch.device | None = None,
) -> Family:
    """Load the base named by `rl.init_from` ("embedded" or a local diffusers folder) as `family`.

    Everything is frozen. `denoiser_device` (default: `device`) is where the denoiser's weights are left: CPU before
    sharding over GPUs, so that no GPU ever holds the whole. Raises CheckpointUnusable, ProfileRefused, UsageRefused.
    """
    if family not in FAMILIES:
        raise UsageRefused(f"no model family {family!r}", hint=f"families: {', '.join(sorted(FAMILIES))}")
    base = base_folder(init_from)
    if not base.is_dir():
        raise CheckpointUnusable(f"the base {init_from!r} is not a folder", hint="set rl.init_from to a local folder")
    return FAMILIES[family](base, model, device, skip_keys=skip_keys, seed=seed, denoiser_device=denoiser_device)
