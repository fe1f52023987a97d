"""How many samples of a step a rank denoises together. Torch-free, since the memory estimate asks too."""

from __future__ import annotations

from nftctl.profile.schema import Profile

FULL = 1 << 24
"""Tokens x width from which a batch fills a large GPU: more rows at once take more memory and no less time each, and
the first scores come later. Seen on H200s at 1024x1024 and a width of 4096."""


def rollout_rows(profile: Profile, tokens: int, width: int) -> int:
    """Samples per micro-batch of a rollout: `model.rollout_micro_batch`, or as many as fill a GPU, evenly cut.

    `tokens` are those of one image, `width` is the denoiser's.
    """
    rows = profile.data.rows_per_step
    if profile.model.rollout_micro_batch:
        return min(profile.model.rollout_micro_batch, rows)
    branches = 1 if profile.rl.guidance in (0, 1) else 2
    full = max(1, FULL // (tokens * width * branches))
    return -(-rows // -(-rows // full))
