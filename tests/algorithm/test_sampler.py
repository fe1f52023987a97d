"""The sampler is diffusers' UniPC and nothing else, fed float sigmas; guidance has one meaning."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from nftctl.algorithm.draws import normal
from nftctl.algorithm.sampler import guided_velocity, sample

NOISE = normal((3, 2, 1, 4, 5), "sampler")


def curved(x: Tensor, sigma: Tensor) -> Tensor:
    """A smooth velocity that mixes nothing across the batch."""
    return torch.sin(2 * x) * sigma.view(-1, 1, 1, 1, 1) + 0.3 * x


def by_hand(velocity, noise: Tensor, steps: int, shift: float, *, float_timesteps: bool = False) -> Tensor:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=2, solver_type="bh2"
    )
    scheduler.set_timesteps(steps)
    if float_timesteps:
        scheduler.timesteps = scheduler.sigmas[:-1] * 1000
    x = noise
    for i, timestep in enumerate(scheduler.timesteps):
        sigma = torch.full((noise.shape[0],), scheduler.sigmas[i].item())
        x = scheduler.step(velocity(x, sigma), timestep, x).prev_sample
    return x


@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (2, 5.0), (3, 1.0), (20, 5.0)])
def test_equals_the_upstream_solver_stepped_by_hand(steps: int, shift: float) -> None:
    got = sample(curved, NOISE, steps=steps, shift=shift)
    for float_timesteps in (False, True):
        theirs = by_hand(curved, NOISE, steps, shift, float_timesteps=float_timesteps)
        torch.testing.assert_close(got, theirs, rtol=2e-6, atol=2e-6)


def test_in_double_precision_it_is_the_upstream_solver_to_its_own_rounding() -> None:
    """Upstream computes its weights in float32, so that much is left whichever precision the latents have."""
    noise = NOISE.double()
    got = sample(curved, noise, steps=20, shift=5.0)
    torch.testing.assert_close(got, by_hand(curved, noise, 20, 5.0), rtol=1e-6, atol=1e-6)


def test_velocity_is_asked_at_float_sigmas() -> None:
    seen: list[Tensor] = []

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append(sigma)
        return curved(x, sigma)

    sample(velocity, NOISE, steps=20, shift=5.0)
    assert len(seen) == 20
    assert all(sigma.shape == (3,) and sigma.dtype == torch.float32 for sigma in seen)
    assert seen[1].tolist() == pytest.approx([0.98959] * 3, abs=5e-6)
    # The scheduler's own timestep there is 989, a sigma of 0.989.
    assert abs(seen[1][0].item() - 0.989) > 5e-4


def test_a_sample_alone_equals_the_same_sample_in_a_batch() -> None:
    together = sample(curved, NOISE, steps=8, shift=5.0)
    alone = torch.cat([sample(curved, NOISE[i : i + 1], steps=8, shift=5.0) for i in range(3)])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_an_exact_velocity_returns_x0(steps: int) -> None:
    x0 = normal(NOISE.shape, "x0")

    def exact(x: Tensor, sigma: Tensor) -> Tensor:
        return (x - x0) / sigma.view(-1, 1, 1, 1, 1)

    torch.testing.assert_close(sample(exact, NOISE, steps=steps, shift=5.0), x0, rtol=0, atol=1e-5)


def test_solves_a_linear_flow_to_its_closed_form() -> None:
    # dx/dt = x from t = 1 to 0 shrinks by e.
    got = sample(lambda x, _: x, NOISE, steps=40, shift=1.0)
    torch.testing.assert_close(got, NOISE * math.exp(-1), rtol=2e-3, atol=1e-4)


def test_clamp_acts_on_the_final_latent_only() -> None:
    free = sample(curved, 4 * NOISE, steps=4, shift=5.0)
    assert free.abs().max() > 0.5
    assert torch.equal(sample(curved, 4 * NOISE, steps=4, shift=5.0, clamp=(-0.5, 0.5)), free.clamp(-0.5, 0.5))


def test_runs_without_gradient_but_not_in_inference_mode() -> None:
    weight = torch.nn.Parameter(torch.tensor(0.5))
    modes: list[bool] = []

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return weight * x

    x0 = sample(velocity, NOISE, steps=2, shift=5.0)
    assert modes == [False, False]
    assert not x0.requires_grad
    assert not x0.is_inference()


def test_noise_is_left_as_it_was() -> None:
    noise = NOISE.clone()
    sample(curved, noise, steps=3, shift=5.0)
    assert torch.equal(noise, NOISE)


def test_latents_without_channels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[B, C, ...\]"):
        sample(curved, torch.zeros(3), steps=2, shift=5.0)


class Branches:
    """A denoiser whose velocity is its conditioning: one number per row. Counts calls and rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.merges = 0

    def __call__(self, x: Tensor, sigma: Tensor, conditioning: Tensor) -> Tensor:
        assert x.shape[0] == sigma.shape[0] == conditioning.shape[0]
        self.rows.append(x.shape[0])
        return conditioning.view(-1, 1, 1, 1, 1).expand_as(x)

    def merge(self, parts) -> Tensor:
        self.merges += 1
        return torch.cat(list(parts))


@pytest.mark.parametrize(("guidance", "value", "rows"), [(0.0, 2.0, 3), (1.0, 5.0, 3), (3.0, 11.0, 6), (0.5, 3.5, 6)])
def test_guidance_is_the_native_formula(guidance: float, value: float, rows: int) -> None:
    model = Branches()
    velocity = guided_velocity(model, torch.full((3,), 5.0), torch.full((3,), 2.0), guidance, merge=model.merge)
    v = velocity(NOISE, torch.full((3,), 0.7))
    assert torch.equal(v, torch.full_like(NOISE, value))
    assert model.rows == [rows]


def test_guided_rollout_makes_one_call_a_step_and_merges_once() -> None:
    model = Branches()
    velocity = guided_velocity(model, torch.full((3,), 5.0), torch.full((3,), 2.0), 3.0, merge=model.merge)
    sample(velocity, NOISE, steps=5, shift=5.0)
    assert model.rows == [6] * 5
    assert model.merges == 1


def test_rows_keep_their_own_conditioning_under_guidance() -> None:
    model = Branches()
    velocity = guided_velocity(model, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3), 2.0, merge=model.merge)
    assert velocity(NOISE, torch.full((3,), 0.7))[:, 0, 0, 0, 0].tolist() == [2.0, 4.0, 6.0]


def test_the_unconditional_branch_is_needed_unless_guidance_is_one() -> None:
    model = Branches()
    assert guided_velocity(model, torch.ones(3), None, 1.0, merge=model.merge) is not None
    for guidance in (0.0, 3.0):
        with pytest.raises(ValueError, match="unconditional branch"):
            guided_velocity(model, torch.ones(3), None, guidance, merge=model.merge)
