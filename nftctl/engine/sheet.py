"""The same noise through base, old and policy of a checkpoint, in this one process: no Ray, no ranks, no sharding.

The samples are those of the run's own grids. Refuses a checkpoint whose tensors are not those that its profile trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nftctl.errors import CheckpointUnusable, EnvironmentUnfit
from nftctl.model.trained import Trained
from nftctl.profile.prompts import Prompt
from nftctl.profile.schema import Profile
from nftctl.roles.trajectory import Sampling, Weights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import nn

    from nftctl.model.family import Family

COLUMNS: dict[str, Weights] = {"base": "reference", "old": "old", "ema": "ema", "policy": "policy"}
"""Name of a column -> the weights that make it."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """What is to be sampled. Every column of a row has the same noise, that of `keys`' first sample of the row."""

    prompts: Sequence[Prompt]
    columns: Sequence[str]
    seed: int
    how: Sampling

    @property
    def keys(self) -> list[tuple[int | str, ...]]:
        """Noise keys: with the run's own prompts and `eval.seed`, those of the first column of its grids."""
        return [(self.seed, "grid", row, 0) for row in range(len(self.prompts))]


def pick_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one. Raises EnvironmentUnfit when one is asked for and there is none."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise EnvironmentUnfit(
            "--device cuda was asked for, and torch sees no GPU", hint="leave it out, or --device cpu"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_base(trained: Trained, profile: Profile, base: Path, device: torch.device) -> Family:
    """The base, frozen, on one device, with the checkpoint's adapters where it has some."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from nftctl.model import adapters
    from nftctl.model.registry import load_family

    family = load_family(
        profile.model,
        str(base),
        trained.contract.family,
        device,
        skip_keys=tuple(profile.rl.init_keys_to_skip_loading),
        seed=profile.rl.seed,
    )
    if trained.adapted("policy"):
        adapters.add_adapters(family.denoiser, profile.model.lora, seed=profile.rl.seed, ema=trained.has("ema"))
        for which in adapters.adapter_names(family.denoiser):
            _fill(trained, which, adapters.parameters(family.denoiser, which))
    family.denoiser.requires_grad_(False)
    return family


def draw(
    sheet: Sheet, trained: Trained, family: Family, profile: Profile, device: torch.device, note: Callable[[str], None]
) -> npt.NDArray[np.uint8]:
    """Images [prompts, columns, H, W, 3]. Whole trained weights take the base's place, so the base is drawn first."""
    import numpy as np

    from nftctl.roles.rollout import RolloutRole

    role = RolloutRole(family, profile, rank=0, device=device)
    texts = [prompt.text for prompt in sheet.prompts]
    drawn = {}
    for name in sorted(sheet.columns, key=lambda name: name != "base"):
        note(f"sampling {len(texts)} images of {name}")
        if name != "base" and not trained.adapted("policy"):
            _fill(trained, name, dict(family.denoiser.named_parameters()))
        images = role.sample_fixed(texts, sheet.keys, sheet.how, COLUMNS[name])
        drawn[name] = np.stack([image[0].numpy() for image in images])
    return np.stack([drawn[name] for name in sheet.columns], axis=1)


def _fill(trained: Trained, which: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Give the parameters a copy's values, tensor by tensor; every name and shape must be the checkpoint's."""
    import torch

    from nftctl.model.export import tensor_of

    stored = trained.stored(which)
    shapes = {name: trained.tensors.forms[own][1] for name, own in stored.items()}
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if shapes != wanted:
        odd = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
        raise CheckpointUnusable(f"{trained.folder}: {which} is not what its profile trains: {', '.join(odd)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensor_of(trained.tensors, stored[name]))
