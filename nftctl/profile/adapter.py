"""The adapter before it exists: which modules of the base it goes into, its size, and the size of its checkpoints.

Judged from safetensors headers, without torch. Knows names and shapes only; what is allowed is for the rules to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nftctl.profile.schema import Profile
from nftctl.profile.t2i import LoraScope
from nftctl.profile.targets import selects

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape, as a transformer's headers list them."""
Modules = Mapping[str, tuple[int, int]]
"""Name of a linear module -> (out, in)."""

CHECKPOINT_COPIES = 4
"""Policy, old, and the two moments of AdamW; float32 each. The average of the policy is one more."""

_SAVED_TENSORS = CHECKPOINT_COPIES + 1  # per trained tensor: the copies, and AdamW's step count
_ENTRY_BYTES = 512  # of a checkpoint, per tensor: its header and its line in the manifest


def denoiser_modules(shapes: Shapes, scope: LoraScope) -> dict[str, tuple[int, int]]:
    """Linear modules of the denoiser that exist in these headers: name -> (out, in)."""
    names = ((name.removesuffix(".weight"), shape) for name, shape in shapes.items() if name.endswith(".weight"))
    return {name: (shape[0], shape[1]) for name, shape in names if len(shape) == 2 and scope.in_denoiser(name)}


def selected(target: str, modules: Modules) -> list[str]:
    """The modules that a LoRA target selects."""
    return [name for name in modules if selects(target, name)]


def adapted(targets: Sequence[str], modules: Modules) -> dict[str, tuple[int, int]]:
    """The modules that any of the targets names."""
    names = {name for target in targets for name in selected(target, modules)}
    return {name: size for name, size in modules.items() if name in names}


def adapter_numbers(modules: Modules, rank: int) -> int:
    """Numbers in one adapter: A is [rank, in], B is [out, rank]."""
    return sum(rank * (out + into) for out, into in modules.values())


def checkpoint_bytes(profile: Profile, tensors: int, numbers: int) -> int:
    """Size of one checkpoint of a policy of so many tensors and numbers: its float32 copies, a header per tensor."""
    average = profile.rl.ema_decay > 0
    return (CHECKPOINT_COPIES + average) * 4 * numbers + (_SAVED_TENSORS + average) * tensors * _ENTRY_BYTES


def most_checkpoints(profile: Profile) -> int:
    """Checkpoints on the disk at once under the profile's retention, the one being written included."""
    total, keep = profile.rl.max_steps or 1, profile.checkpoint
    last_alone = 1 if not keep.every or total % keep.every else 0
    saves = (total // keep.every if keep.every else 0) + last_alone
    # The last one is the one being written.
    kept = (total - 1) // math.lcm(keep.every, keep.keep_every) if keep.every and keep.keep_every else 0
    return min(saves, keep.keep_last + kept + 1)
