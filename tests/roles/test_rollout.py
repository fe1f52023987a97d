"""Sampling in one process: the same samples however they are cut, from the weights that are named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nftctl.algorithm import draws
from nftctl.algorithm.image_statistics import look_at
from nftctl.errors import TrainingFailed
from nftctl.model import adapters
from nftctl.profile.batches import rollout_rows
from nftctl.profile.schema import Profile
from nftctl.roles.trajectory import Sampling, Trajectory
from tests.roles.samples import PROMPTS, set_adapter, source_rows

Make = Callable[..., Profile]


def run(role: Any, count: int = 3, optimizer_steps: int = 0) -> tuple[list[Trajectory], torch.Tensor]:
    done = role.sample(source_rows(count), optimizer_steps, lambda part: None)
    return done, torch.stack([t.x0 for t in done])


def test_a_sample_carries_everything_that_later_roles_read(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile())
    done, x0 = run(role)
    assert [t.row.number for t in done] == [t.tick for t in done] == [0, 1, 2]
    assert x0.dtype == torch.float32
    assert x0.shape == (3, *family.latent_shape)
    assert not x0.requires_grad
    for sample in done:
        assert sample.image is not None
        assert (sample.image.dtype, sample.image.shape) == (torch.uint8, (1, 8, 8, 3))
        assert torch.equal(sample.image, family.decoder.decode(sample.x0[None])[0])
        assert sample.conditioning is family.encoder.encode([sample.row.prompt.text])[0]
        assert (sample.reward, sample.failures, sample.optimality) == (None, {}, 0.5)


def test_an_image_has_been_looked_at_before_it_is_handed_on(profile: Make, roles: Any) -> None:
    """What is handed on is let go of there; what was seen stays."""
    _, role, _ = roles(profile())
    seen = []

    def decoded(part: list[Trajectory]) -> None:
        for t in part:
            assert t.image is not None
            seen.append((t.look, look_at(t.image[0].numpy())))
            t.image = None

    done = role.sample(source_rows(2), 0, decoded)
    assert len(seen) == 2
    for trajectory, (look, wanted) in zip(done, seen, strict=True):
        assert trajectory.look is look
        assert look is not None
        assert (look.saturation, look.high_frequency) == (wanted.saturation, wanted.high_frequency)
        assert (look.thumbnail == wanted.thumbnail).all()
        assert look.high_frequency > 0


def test_micro_batches_give_the_same_samples(profile: Make, roles: Any) -> None:
    _, whole = run(roles(profile())[1])
    for size in (1, 2):
        _, cut = run(roles(profile(f"model.rollout_micro_batch={size}"))[1])
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)


def test_a_micro_batch_is_handed_on_before_the_next_is_sampled(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile("model.rollout_micro_batch=2"))
    seen: list[tuple[list[int], int]] = []
    done = role.sample(
        source_rows(5), 0, lambda part: seen.append(([t.row.number for t in part], family.denoiser.forwards))
    )
    assert seen == [([0, 1], 8), ([2, 3], 16), ([4], 20)]
    assert [t.row.number for t in done] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("guidance", "rows", "encoded"), [(0.0, 3 * 4, 4), (1.0, 3 * 4, 3), (3.0, 2 * 3 * 4, 4)])
def test_guidance_runs_one_branch_or_both(profile: Make, roles: Any, guidance: float, rows: int, encoded: int) -> None:
    family, role, _ = roles(profile(f"rl.guidance={guidance}"))
    run(role)
    assert family.denoiser.forwards == rows
    assert family.encoder.encoded == encoded  # three prompts, and the negative one where it is read


@pytest.mark.parametrize("home", ["resident", "offload", "per-step"])
def test_a_step_is_one_visit_of_the_encoder_before_anything_is_sampled(profile: Make, roles: Any, home: str) -> None:
    family, role, _ = roles(profile(f'model.prompt_encoder="{home}"', "model.rollout_micro_batch=1", "rl.guidance=3"))
    encoder = family.encoder
    encoder._remembered.limit = 1  # nothing but the newest prompt stays
    seen: list[tuple[int, int, bool]] = []

    def look(part: list[Trajectory]) -> None:
        there = not any(p.is_meta for p in encoder.tower.parameters())
        seen.append((encoder.visits, encoder.encoded, there))

    done = role.sample(source_rows(4), 0, look)
    assert seen == [(1, 5, home != "per-step")] * 4
    with encoder.visit():
        assert all(torch.equal(t.conditioning.keys, encoder.encode([t.row.prompt.text])[0].keys) for t in done)
    role.sample(source_rows(4), 0, look)
    assert seen[4:] == [(3, 5 + 4 + 5, home != "per-step")] * 4


def test_remembered_prompts_need_no_visit(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile('model.prompt_encoder="per-step"', "rl.guidance=3"))
    for _ in range(2):
        role.sample(source_rows(3), 0, lambda part: None)
        assert (family.encoder.visits, family.encoder.encoded) == (1, 4)
    role.sample(source_rows(2, first=3), 0, lambda part: None)
    assert (family.encoder.visits, family.encoder.encoded) == (2, 6)


def test_an_evaluation_is_one_visit_for_as_much_as_is_remembered(profile: Make, roles: Any) -> None:
    how, images = Sampling(1, 3.0, 1.0), {}
    colours, digits = ("red", "green", "blue", "black"), ("one", "two", "three", "four", "five", "six", "seven", "zero")
    prompts = [f"{article}{colour} {digit}" for article in ("", "a ") for colour in colours for digit in digits][:40]
    for kept, visits in ((40, 1), (28, 2), (0, 3)):  # three batches of 16
        family, role, _ = roles(profile('model.prompt_encoder="per-step"'))
        family.encoder._remembered.limit = kept * family.encoder.encode(["a red one"])[0].nbytes
        before = family.encoder.visits
        images[kept] = list(role.sample_fixed(prompts, [(1, "eval", n, 0) for n in range(40)], how, "policy"))
        assert family.encoder.visits - before == visits
        assert all(p.is_meta for p in family.encoder.tower.parameters())
    assert all(torch.equal(a, b) for other in (28, 0) for a, b in zip(images[40], images[other], strict=True))


def test_guidance_zero_ignores_the_prompt_and_three_goes_beyond_it(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile())
    noise = draws.normal(family.latent_shape, 0)[None].expand(2, -1, -1, -1, -1)
    at = {}
    for guidance in (0.0, 1.0, 3.0):
        how = Sampling(1, 3.0, guidance)
        at[guidance] = role.denoise(*role.encode(PROMPTS[:2], how), noise, how, "policy")[0]
    assert torch.equal(at[0.0][0], at[0.0][1])
    assert not torch.allclose(at[1.0][0], at[1.0][1], atol=1e-3)
    # One solver step is linear in the velocity, so guidance is too, up to the clamp to [-1, 1].
    wanted = at[0.0] + 3 * (at[1.0] - at[0.0])
    inside = (at[0.0].abs() < 1) & (at[1.0].abs() < 1) & (wanted.abs() < 1)
    assert int(inside.sum()) > 50
    torch.testing.assert_close(at[3.0][inside], wanted[inside], rtol=1e-3, atol=1e-4)


def test_the_final_latent_of_a_pixel_family_is_clamped(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile())
    _, clamped = run(role)
    family.clamp_x0 = False
    _, free = run(role)
    assert float(free.abs().max()) > 1.0
    assert torch.equal(clamped, free.clamp(-1, 1))


@pytest.mark.parametrize(
    ("sets", "mine", "other"), [((), "old", "policy"), (("rl.old.build_old=false",), "policy", "old")]
)
def test_samples_come_from_the_named_weights_alone(
    profile: Make, roles: Any, sets: tuple[str, ...], mine: str, other: str
) -> None:
    family, role, _ = roles(profile(*sets))
    assert role.weights == mine
    _, base = run(role)
    set_adapter(family, other, 1, scale=0.5)
    assert torch.equal(run(role)[1], base)
    set_adapter(family, mine, 2, scale=0.5)
    assert not torch.allclose(run(role)[1], base, atol=1e-3)


def test_evaluation_names_its_weights(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile())
    how, keys = Sampling(4, 3.0, 1.0), [(1, "eval", 0, 0), (1, "eval", 1, 0)]
    base = list(role.sample_fixed(PROMPTS[:2], keys, how, "reference"))
    set_adapter(family, "policy", 1, scale=0.5)
    set_adapter(family, "old", 2, scale=0.5)
    images = {w: list(role.sample_fixed(PROMPTS[:2], keys, how, w)) for w in ("policy", "old", "reference")}
    assert all(torch.equal(a, b) for a, b in zip(images["reference"], base, strict=True))
    assert not torch.equal(images["policy"][0], images["old"][0])
    assert not torch.equal(images["policy"][0], base[0])
    layer = next(iter(adapters.lora_layers(family.denoiser).values()))
    assert layer._active_adapter == ["policy"]


def test_fixed_samples_depend_on_their_key_and_prompt_alone(profile: Make, roles: Any) -> None:
    _, role, _ = roles(profile())
    how = Sampling(2, 3.0, 1.0)
    prompts = [PROMPTS[n % 5] for n in range(18)]  # more than one batch of 16
    keys = [(1, "eval", n, 0) for n in range(18)]
    images = list(role.sample_fixed(prompts, keys, how, "policy"))
    assert len(images) == 18
    alone = next(iter(role.sample_fixed(prompts[17:], keys[17:], how, "policy")))
    assert int((images[17].int() - alone.int()).abs().max()) <= 1
    other = next(iter(role.sample_fixed(prompts[17:], [(2, "eval", 17, 0)], how, "policy")))
    assert not torch.equal(other, alone)


@pytest.mark.parametrize(
    ("clock", "steps", "ticks"),
    [
        ("source_row", 0, [0, 1]),
        ("source_row", 9, [0, 1]),
        ("optimizer_step", 0, [0, 0]),
        ("optimizer_step", 9, [9, 9]),
    ],
)
def test_a_sample_starts_from_the_noise_of_its_tick(
    profile: Make, roles: Any, clock: str, steps: int, ticks: list[int]
) -> None:
    settings = profile(f'rl.rollout_seed_clock="{clock}"', "rl.seed=3")
    family, role, _ = roles(settings)
    done, x0 = run(role, 2, steps)
    assert [t.tick for t in done] == ticks
    how = Sampling(4, 3.0, 1.0)
    for sample, got in zip(done, x0, strict=True):
        noise = draws.normal(family.latent_shape, 3, "rollout", sample.tick, 0)[None]
        alone, _ = role.denoise([sample.conditioning], None, noise, how, "old")
        torch.testing.assert_close(got, alone[0], rtol=1e-4, atol=1e-5)


def test_a_number_that_is_not_finite_stops_before_scoring_and_names_the_rows(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile("rl.seed=5"))
    set_adapter(family, "old", 1, scale=float("nan"))
    handed_on: list[Trajectory] = []
    with pytest.raises(TrainingFailed, match="final latent of sample 0 is not finite") as caught:
        role.sample(source_rows(2, first=1), 0, handed_on.extend)
    assert caught.value.message.endswith("on rank 0 with seed 5; the samples are rows 1 (a black one), 2 (a red eight)")
    assert caught.value.hint
    assert handed_on == []


# ---- handing on beside the work, as on a GPU


def test_images_are_handed_on_in_order_while_the_device_goes_on(profile: Make, roles: Any) -> None:
    here, apart = (roles(profile("model.rollout_micro_batch=1"))[1] for _ in range(2))
    seen: list[list[int]] = []
    expected, _ = run(here)
    with ThreadPoolExecutor(1) as apart._thread:
        open_ = threading.Event()
        apart._thread.submit(open_.wait, 30)  # the first image takes its time
        done = apart.sample(source_rows(3), 0, lambda part: seen.append([t.row.number for t in part]))
        assert seen == []
        assert all(t.image is None for t in done)
        open_.set()
        apart.hand_over()
    assert seen == [[0], [1], [2]]
    for one, other in zip(done, expected, strict=True):
        assert torch.equal(one.x0, other.x0)
        assert one.image is not None
        assert torch.equal(one.image, other.image)
    apart.hand_over()
    assert len(seen) == 3


def test_a_number_that_is_not_finite_is_named_when_the_images_are_waited_for(profile: Make, roles: Any) -> None:
    family, role, _ = roles(profile("rl.seed=5"))
    set_adapter(family, "old", 1, scale=float("nan"))
    handed_on: list[Trajectory] = []
    with ThreadPoolExecutor(1) as role._thread:
        role.sample(source_rows(2, first=1), 0, handed_on.extend)
        with pytest.raises(TrainingFailed, match=r"sample 0 is not finite.*rows 1 \(a black one\), 2"):
            role.hand_over()
    assert handed_on == []


@pytest.mark.parametrize(("width", "guidance", "given", "size"), [
    (4096, 3, None, 8), (4096, 1, None, 16), (4096, 3, 5, 5), (1 << 22, 3, None, 1), (8, 3, None, 48), (8, 3, 64, 48),
])  # fmt: skip
def test_a_micro_batch_fills_a_gpu_and_no_more(
    profile: Make, width: int, guidance: float, given: int | None, size: int
) -> None:
    """By hand: 2^24 / (256 tokens x 4096 x 2 branches) = 8 rows, 16 where there is one branch."""
    cut = [] if given is None else [f"model.rollout_micro_batch={given}"]
    made = profile("data.rows_per_step=48", f"rl.guidance={guidance}", *cut)
    assert rollout_rows(made, 256, width) == size


def test_micro_batches_are_cut_evenly(profile: Make) -> None:
    assert rollout_rows(profile("data.rows_per_step=10", "rl.guidance=3"), 256, 4096) == 5
