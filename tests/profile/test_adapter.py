"""Names and sizes of an adapter that does not exist yet, and how many checkpoints lie on the disk at once."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from nftctl.profile.adapter import (
    adapted,
    adapter_numbers,
    checkpoint_bytes,
    denoiser_modules,
    most_checkpoints,
    selected,
)
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.profile.schema import Profile
from nftctl.profile.t2i import COSMOS3_LORA

SHAPES = {
    "layers.0.self_attn.add_q_proj.weight": (8, 6),
    "layers.1.self_attn.add_q_proj.weight": (8, 6),
    "layers.0.self_attn.to_q.weight": (8, 6),
    "layers.0.self_attn.norm_added_q.weight": (4,),
    "layers.0.mlp_moe_gen.up_proj.weight": (9, 6),
    "layers.0.mlp.up_proj.weight": (9, 6),
    "proj_in.weight": (6, 12),
    "proj_in.bias": (6,),
    "action_proj_in.weight": (6, 2),
}


def test_the_modules_of_the_denoiser_are_its_matrices() -> None:
    assert denoiser_modules(SHAPES, COSMOS3_LORA) == {
        "layers.0.self_attn.add_q_proj": (8, 6),
        "layers.1.self_attn.add_q_proj": (8, 6),
        "layers.0.mlp_moe_gen.up_proj": (9, 6),
        "proj_in": (6, 12),
    }


def test_a_target_is_a_suffix_at_a_dot() -> None:
    modules = denoiser_modules(SHAPES, COSMOS3_LORA)
    assert selected("add_q_proj", modules) == ["layers.0.self_attn.add_q_proj", "layers.1.self_attn.add_q_proj"]
    assert selected("layers.1.self_attn.add_q_proj", modules) == ["layers.1.self_attn.add_q_proj"]
    assert selected("q_proj", modules) == []
    assert selected(r"/layers\.1\..*/", modules) == ["layers.1.self_attn.add_q_proj"]
    assert list(adapted([r"/.*\.0\..*/", "proj_in"], modules)) == [
        "layers.0.self_attn.add_q_proj",
        "layers.0.mlp_moe_gen.up_proj",
        "proj_in",
    ]
    # A module that two targets name is adapted once.
    assert adapted(["proj_in", "up_proj", "layers.0.mlp_moe_gen.up_proj"], modules) == {
        "proj_in": (6, 12),
        "layers.0.mlp_moe_gen.up_proj": (9, 6),
    }


def test_numbers_and_bytes_by_hand() -> None:
    modules = {"a": (8, 6), "b": (9, 6)}
    # rank 2: A is 2 x 6 twice, B is 8 x 2 and 9 x 2
    assert adapter_numbers(modules, 2) == 2 * 6 * 2 + 8 * 2 + 9 * 2
    # four float32 copies; four tensors, each saved as policy, old, two moments and a step count
    tiny = bundled_profiles()["tiny_t2i_cpu"]
    plain, averaged = (load_profile(tiny, sets=[f"rl.ema_decay={decay}"], env={}).profile for decay in (0, 0.9))
    assert checkpoint_bytes(plain, 4, 58) == 4 * 4 * 58 + 4 * 5 * 512
    assert checkpoint_bytes(averaged, 4, 58) == 5 * 4 * 58 + 4 * 6 * 512


@example(32, 3, 1, 2)  # the last save is off the cadence, and would be kept by its number
@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 6), st.integers(0, 9))
def test_the_most_checkpoints_are_those_of_a_run(steps: int, every: int, last: int, multiple: int) -> None:
    """Against a run played step by step: save, count, then prune as the run does."""
    on_disk: list[int] = []
    most = 0
    for step in range(1, steps + 1):
        if step == steps or (every and step % every == 0):
            on_disk.append(step)
            most = max(most, len(on_disk))
            on_disk = [s for s in on_disk[:-last] if multiple and s % multiple == 0] + on_disk[-last:]
    keep = {"every": every, "keep_last": last, "keep_every": multiple}
    claimed = most_checkpoints(Profile.model_validate({"rl": {"max_steps": steps}, "checkpoint": keep}))
    # Checkpoints that are kept twice over, by age and by number, are counted twice: never too few, at most `last` over.
    assert most <= claimed <= most + last
