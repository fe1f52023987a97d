"""One process, the embedded model: what an optimizer step draws, runs, changes and reports."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nftctl.algorithm import draws, schedule
from nftctl.errors import TrainingFailed
from nftctl.model import adapters, shard
from nftctl.profile.schema import Profile
from nftctl.roles.trajectory import Trajectory
from nftctl.run.state import RunState
from tests.roles.samples import copies, set_adapter, source_rows

Make = Callable[..., Profile]
LAWS = {"copy": 0.0, "linear": 0.1, "delayed": 0.1875, "constant": 0.3}
"""Share of old kept at optimizer step 100: min(0.001 x 100, 0.5), min(0.0075 (100 - 75), 0.999), and as asked."""


def samples(rollout: Any, count: int = 2, first: int = 0) -> list[Trajectory]:
    """A real rollout whose optimality is spread over (0, 1)."""
    done: list[Trajectory] = rollout.sample(source_rows(count, first), 0, lambda part: None)
    for n, sample in enumerate(done):
        sample.optimality = (0.9, 0.2, 0.6)[n % 3]
    return done


def step(parts: Any, state: RunState | None = None, first: int = 0) -> tuple[dict[str, float], RunState]:
    """Sample, prepare and train once."""
    _, rollout, policy = parts
    before, state = samples(rollout, first=first), state or RunState()
    policy.prepare(before, state)
    row, state = policy.train(before, state)
    return row, state


def gradients(parts: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of a step, and the first moments: a tenth of the clipped gradient."""
    row, _ = step(parts)
    policy = parts[2]
    return row, {n: policy.optimizer.state[p]["exp_avg"].clone() for n, p in policy.parameters.items()}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the weights that forwards were run under."""
    used: list[str] = []
    original = adapters.weights

    def weights(denoiser: Any, which: Any) -> Any:
        used.append(which)
        return original(denoiser, which)

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "weights", weights)
        yield used


# ---- draws and forwards


def test_times_and_noise_are_the_keyed_draws_of_row_rank_and_update(profile: Make, roles: Any) -> None:
    settings = profile("rl.updates_per_rollout=2", "rl.old.update_every=2", "rl.seed=5")
    family, rollout, policy = roles(settings)
    policy.prepare(samples(rollout, first=7), RunState())
    grid = schedule.sigmas(4, 3.0)
    for update, pairs in enumerate(policy._prepared):
        assert pairs.t.shape == (4,)
        for i, (row, k) in enumerate([(7, 0), (7, 1), (8, 0), (8, 1)]):
            eps = draws.normal(family.latent_shape, 5, "train_eps", row, 0, 2 * update + k)
            assert torch.equal(pairs.eps[i], eps)
            assert float(pairs.t[i]) in grid[:-1]
            t = pairs.t[i]
            assert torch.equal(pairs.x_t[i], (1 - t) * pairs.x0[i] + t * eps)
        assert pairs.t[0] != pairs.t[1]  # without replacement within one sample and update
    first, second = policy._prepared
    assert not torch.equal(first.eps, second.eps)


def test_micro_batches_give_one_gradient_and_one_row(profile: Make, roles: Any) -> None:
    whole_row, whole = gradients(roles(profile("rl.kl_beta=0.5")))
    for size in (1, 3):
        row, parts = gradients(roles(profile("rl.kl_beta=0.5", f"model.train_micro_batch={size}")))
        assert row == pytest.approx(whole_row, rel=1e-5, abs=1e-9)
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-8)


def test_gradient_checkpointing_makes_the_same_step_to_the_bit(profile: Make, roles: Any) -> None:
    """A whole step, and every number that it reports: what the backward runs again is in no count."""
    sets = ("rl.kl_beta=0.5", "rl.updates_per_rollout=2", "rl.old.update_every=2", "model.train_micro_batch=3")
    want_row, want = gradients(roles(profile(*sets)))
    parts = roles(profile(*sets, "model.gradient_checkpointing=true"))
    assert parts[0].denoiser.gradient_checkpointing
    row, moments = gradients(parts)
    assert row == want_row
    assert row["forwards/executed"] == row["forwards/planned"]
    assert moments.keys() == want.keys()
    assert all(torch.equal(moments[name], value) for name, value in want.items())
    assert all(bool(value.any()) for name, value in want.items() if name.endswith("lora_B"))


@pytest.mark.parametrize(
    ("sets", "used", "executed", "skipped"),
    [
        # Rows of 2 samples x 2 times on top of a rollout of 2 x 4; old is a copy, so only the second update needs it.
        ((), {"old", "policy"}, 8 + 4, 8),
        (("rl.kl_beta=0.5",), {"old", "policy", "reference"}, 8 + 8, 4),
        (("rl.updates_per_rollout=2", "rl.old.update_every=2"), {"old", "policy"}, 8 + 8 + 4, 8 + 4),
        (("rl.old.build_old=false",), {"policy"}, 8 + 4, 8),
        (
            ("rl.old.build_old=false", "rl.updates_per_rollout=2", "rl.kl_beta=0.5"),
            {"policy", "reference"},
            8 + 8 + 8,
            4 + 4,
        ),
        (("rl.guidance=3.0",), {"old", "policy"}, 16 + 4, 8),
    ],
)
def test_only_the_planned_forwards_run(
    profile: Make,
    roles: Any,
    monkeypatch: pytest.MonkeyPatch,
    sets: tuple[str, ...],
    used: set[str],
    executed: int,
    skipped: int,
) -> None:
    with watched(monkeypatch) as names:
        row, _ = step(roles(profile('rl.old.decay="copy"', *sets)))
    assert set(names) == used
    assert row["forwards/executed"] == row["forwards/planned"] == executed
    assert row["forwards/skipped"] == skipped


def test_a_blended_old_needs_its_forward_from_the_second_step_on(profile: Make, roles: Any) -> None:
    parts = roles(profile('rl.old.decay="linear"'))
    first, state = step(parts)
    second, _ = step(parts, state, first=2)
    assert (first["forwards/executed"], second["forwards/executed"]) == (12, 16)
    assert first["train/old_gap"] == 0.0
    assert second["train/old_gap"] > 0.0


def test_evaluation_forwards_are_left_out_of_the_count(profile: Make, roles: Any) -> None:
    parts = family, rollout, policy = roles(profile())
    samples(rollout, 3)
    policy.skip_forwards()
    row, _ = step(parts)
    assert row["forwards/executed"] == row["forwards/planned"] == 12
    assert family.denoiser.forwards == 12 + 12


# ---- the penalty and the missing old policy


def test_no_penalty_is_exactly_zero_and_runs_no_reference(
    profile: Make, roles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = roles(profile())
    set_adapter(parts[0], "policy", 1)
    with watched(monkeypatch) as names:
        row, _ = step(parts)
    assert row["train/kl_loss"] == 0.0
    assert row["train/loss"] == row["train/policy_loss"]
    assert "reference" not in names


def test_the_penalty_is_the_squared_distance_to_the_base(profile: Make, roles: Any) -> None:
    settings = profile("rl.kl_beta=0.5")
    family, rollout, policy = roles(settings)
    set_adapter(family, "policy", 1)
    set_adapter(family, "old", 1)
    done = samples(rollout)
    policy.prepare(done, RunState())
    pairs = policy._prepared[0]
    batch = family.batch([t.conditioning for t in done for _ in range(2)])
    with torch.no_grad():
        with adapters.weights(family.denoiser, "policy"):
            v = family.denoiser(pairs.x_t, pairs.t, batch)
        with adapters.weights(family.denoiser, "reference"):
            v_ref = family.denoiser(pairs.x_t, pairs.t, batch)
    row, _ = policy.train(done, RunState())
    assert row["train/kl_loss"] == pytest.approx(0.5 * float((v - v_ref).double().square().mean()), rel=1e-5)
    assert row["train/loss"] == row["train/policy_loss"] + row["train/kl_loss"]


def test_without_an_old_policy_the_gap_is_exactly_zero_and_old_stays(profile: Make, roles: Any) -> None:
    parts = family, rollout, _ = roles(profile("rl.old.build_old=false", "rl.updates_per_rollout=2"))
    before = copies(adapters.old_parameters(family.denoiser))
    assert rollout.weights == "policy"
    state = RunState()
    for n in range(3):
        row, state = step(parts, state, first=2 * n)
        assert (row["train/old_gap"], row["old/refreshes"]) == (0.0, 0.0)
    assert (state.optimizer_steps, state.policy_version, state.old_version, state.old_refreshes) == (6, 6, 0, 0)
    assert all(torch.equal(p, before[n]) for n, p in adapters.old_parameters(family.denoiser).items())


def test_the_average_follows_every_optimizer_step_and_neither_samples_nor_is_trained(profile: Make, roles: Any) -> None:
    settings = ("rl.updates_per_rollout=2", "rl.old.update_every=2")
    plain, averaged = (roles(profile(*settings, f"rl.ema_decay={decay}")) for decay in (0, 0.3))
    family = averaged[0]
    start = copies(adapters.policy_parameters(family.denoiser))
    seen: list[dict[str, torch.Tensor]] = []
    stepped = averaged[2].copies.stepped

    def remember() -> None:
        stepped()
        seen.append(copies(adapters.policy_parameters(family.denoiser)))

    averaged[2].copies.stepped = remember
    rows = []
    for parts in (plain, averaged):
        row, _ = step(parts, RunState())
        rows.append(row)
    assert rows[0] == rows[1]
    assert len(seen) == 2
    average = adapters.parameters(family.denoiser, adapters.EMA)
    for name, value in average.items():
        # Shares kept: min(2/11, 0.3), then min(3/12, 0.3).
        first = 2 / 11 * start[name].double() + 9 / 11 * seen[0][name].double()
        expected = 0.25 * first + 0.75 * seen[1][name].double()
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-9)
        assert not value.requires_grad
    assert any(not torch.equal(value, seen[1][name]) for name, value in average.items())


# ---- the refresh


@pytest.mark.parametrize(("decay", "eta"), LAWS.items())
def test_each_law_of_the_refresh_moves_old_by_its_share(profile: Make, roles: Any, decay: str, eta: float) -> None:
    parts = family, _, policy = roles(profile(f'rl.old.decay="{decay}"', "rl.old.constant=0.3"))
    set_adapter(family, "policy", 1)
    set_adapter(family, "old", 2)
    before = copies(adapters.old_parameters(family.denoiser))
    row, state = step(parts, RunState(optimizer_steps=99, policy_version=99, old_version=98, old_refreshes=98))
    assert row["old/share"] == pytest.approx(eta, rel=1e-12)
    assert row["old/refreshes"] == 99.0
    assert (state.policy_version, state.old_version, state.old_blended, state.old_refreshes) == (
        100, 100, int(eta > 0), 99,
    )  # fmt: skip
    for name, old in adapters.old_parameters(family.denoiser).items():
        now = policy.parameters[name].detach()
        if eta == 0:
            assert torch.equal(old, now), name
        else:
            torch.testing.assert_close(old, eta * before[name] + (1 - eta) * now, rtol=1e-6, atol=1e-8)
            assert not torch.equal(old, now), name


def test_delayed_copies_until_step_75(profile: Make, roles: Any) -> None:
    row, state = step(roles(profile('rl.old.decay="delayed"')), RunState(optimizer_steps=73, policy_version=73))
    assert (row["old/share"], state.old_blended) == (0.0, 0)
    row, state = step(roles(profile('rl.old.decay="delayed"')), RunState(optimizer_steps=75, policy_version=75))
    assert (row["old/share"], state.old_blended) == (0.0075, 1)


def test_old_moves_only_when_the_cadence_is_due(profile: Make, roles: Any) -> None:
    parts = family, _, _ = roles(profile('rl.old.decay="copy"', "rl.old.update_every=3"))
    held = [copies(adapters.old_parameters(family.denoiser))]
    state, seen = RunState(), []
    for n in range(6):
        row, state = step(parts, state, first=2 * n)
        held.append(copies(adapters.old_parameters(family.denoiser)))
        seen.append((state.policy_version, state.old_version, state.old_refreshes, row["old/share"]))
    assert seen == [(1, 0, 0, 1.0), (2, 0, 0, 1.0), (3, 3, 1, 0.0), (4, 3, 1, 1.0), (5, 3, 1, 1.0), (6, 6, 2, 0.0)]
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(held)]
    assert moved == [False, False, True, False, False, True]


# ---- the optimizer step


def test_only_the_policy_adapter_is_trained(profile: Make, roles: Any) -> None:
    parts = family, _, policy = roles(profile("rl.old.update_every=2"))
    before = {n: p.detach().clone() for n, p in family.denoiser.named_parameters()}
    step(parts)
    trained = {id(p) for p in policy.parameters.values()}
    for name, parameter in family.denoiser.named_parameters():
        if id(parameter) not in trained:
            assert torch.equal(parameter, before[name]), name
            assert parameter.grad is None, name
    # A stays where it is in the first step, because B is zero.
    moved = [n for n, p in policy.parameters.items() if n.endswith("lora_B") and bool(p.any())]
    assert len(moved) == len(policy.parameters) / 2


def test_the_given_state_is_left_alone(profile: Make, roles: Any) -> None:
    given = RunState(step=4, cursor=8)
    _, state = step(roles(profile()), given)
    assert given == RunState(step=4, cursor=8)
    assert (state.step, state.cursor) == (4, 8)  # the cursor is the worker's, and moves when the step is complete
    assert (state.optimizer_steps, state.policy_version) == (1, 1)


def refused(parts: Any, done: list[Trajectory]) -> TrainingFailed:
    """The refusal of the seventh step, which has changed nothing."""
    family, _, policy = parts
    before = {n: p.detach().clone() for n, p in family.denoiser.named_parameters()}
    policy.prepare(done, RunState(step=6))
    with pytest.raises(TrainingFailed) as caught:
        policy.train(done, RunState(step=6))
    assert caught.value.rank == 0
    assert all(torch.equal(p, before[n]) for n, p in family.denoiser.named_parameters())
    assert not policy.optimizer.state
    return caught.value


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step_and_shows_its_terms(
    profile: Make, roles: Any, bad: float
) -> None:
    parts = roles(profile("optimizer.lr=0.25"))
    done = samples(parts[1])
    done[1].optimality = bad
    error = refused(parts, done)
    assert re.match(
        r"step 7: policy_loss of rank 0 is nan \(policy_loss nan, kl_loss 0, positive_error 0\.\d+, negative_error "
        rf"0\.\d+, old_gap 0; max \|x0\| 1, r from (0\.9|nan) to {bad}\) at learning rate 0\.25; this optimizer step",
        error.message,
    ), error.message


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_before_the_step(
    profile: Make, roles: Any, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    def reduce(parameters: Any, group: Any) -> None:
        parameters[3].grad.view(-1)[5] = bad

    parts = roles(profile("optimizer.lr=0.25"))
    monkeypatch.setattr(shard, "reduce_gradients", reduce)
    error = refused(parts, samples(parts[1]))
    assert re.match(r"step 7: the gradient norm is (nan|inf) at learning rate 0\.25", error.message)


@pytest.mark.parametrize(
    ("updates", "said"),
    [
        (1, ["backward", "optimizer"]),
        (2, ["backward 1 of 2", "optimizer 1 of 2", "backward 2 of 2", "optimizer 2 of 2"]),
    ],
)
def test_each_stage_is_in_the_log_as_it_begins(
    profile: Make, roles: Any, caplog: pytest.LogCaptureFixture, updates: int, said: list[str]
) -> None:
    parts = roles(profile(f"rl.updates_per_rollout={updates}", "rl.old.update_every=2"))
    with caplog.at_level("INFO", "nftctl.stage"):
        step(parts, RunState(step=6))
    assert [record.getMessage() for record in caplog.records] == [f"step 7: {stage}" for stage in said]


def test_the_learning_rate_warms_up_and_goes_on_after_a_resume(profile: Make, roles: Any) -> None:
    parts = roles(profile("optimizer.lr=0.001", "optimizer.warmup_steps=4"))
    state, rates = RunState(), []
    for n in range(6):
        row, state = step(parts, state, first=2 * n)
        rates.append(row["train/lr"])
    assert rates == pytest.approx([0.00025, 0.0005, 0.00075, 0.001, 0.001, 0.001], rel=1e-12)
    resumed, _ = step(roles(profile("optimizer.lr=0.001", "optimizer.warmup_steps=4")), RunState(optimizer_steps=2))
    assert resumed["train/lr"] == rates[2]


def test_the_reported_norm_is_the_one_before_the_clip(profile: Make, roles: Any) -> None:
    free, whole = gradients(roles(profile("optimizer.grad_clip=1000.0")))
    held, small = gradients(roles(profile("optimizer.grad_clip=0.001")))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole.values())) * 10  # exp_avg is 0.1 g
    assert held["train/grad_norm"] == free["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, value in whole.items():
        torch.testing.assert_close(small[name], value * 0.001 / norm, rtol=1e-3, atol=1e-10)


def test_the_distance_is_that_of_whole_matrices_to_the_adapted_weights(profile: Make, roles: Any) -> None:
    parts = family, *_ = roles(profile())
    state = RunState()
    for n in range(2):
        row, state = step(parts, state, first=2 * n)
        moved, base = 0.0, 0.0
        for layer in adapters.lora_layers(family.denoiser).values():
            a, b = (side["policy"].weight.detach().double() for side in (layer.lora_A, layer.lora_B))
            moved += float((2.0 * b @ a).square().sum())  # alpha 32 over rank 16
            base += float(layer.base_layer.weight.double().square().sum())
        assert row["policy/distance"] == pytest.approx(math.sqrt(moved / base), rel=1e-5)
        assert row["policy/distance"] > 0


def test_the_age_of_old_counts_optimizer_steps_since_its_refresh(profile: Make, roles: Any) -> None:
    parts, state, seen = roles(profile("rl.old.update_every=2")), RunState(), []
    for n in range(4):
        row, state = step(parts, state, first=2 * n)
        seen.append((row["old/version"], row["old/age"]))
    assert seen == [(0, 1), (2, 0), (2, 1), (4, 0)]
    row, _ = step(roles(profile("rl.old.build_old=false")))
    assert not {"old/version", "old/age"} & set(row)


# ---- dropped groups


def test_dropped_rows_leave_the_mean_of_the_others(profile: Make, roles: Any) -> None:
    settings = profile("data.rows_per_step=3")
    _, rollout, policy = roles(settings)
    three = samples(rollout, 3)
    policy.prepare(three, RunState())
    dropped, _ = policy.train([three[0], three[2]], RunState())
    alone = []
    for n in (0, 2):
        _, rollout, policy = roles(profile("data.rows_per_step=1"))
        one = samples(rollout, 3)[n]
        one.optimality = three[n].optimality
        policy.prepare([one], RunState())
        alone.append(policy.train([one], RunState())[0])
    for name in ("policy_loss", "loss", "positive_error", "negative_error"):
        mean = (alone[0][f"train/{name}"] + alone[1][f"train/{name}"]) / 2
        assert dropped[f"train/{name}"] == pytest.approx(mean, rel=1e-5), name
    # 3 rows were sampled, and had their policy forward before the scores came; the backward is of 2 of them.
    assert dropped["forwards/executed"] == dropped["forwards/planned"] == 3 * 4 + 3 * 2


def test_early_forwards_of_a_row_that_is_dropped_later_are_counted(profile: Make, roles: Any) -> None:
    _, rollout, policy = roles(profile("rl.kl_beta=0.5", "data.rows_per_step=3"))
    three = samples(rollout, 3)
    policy.prepare(three, RunState())
    row, _ = policy.train(three[1:], RunState())
    assert row["forwards/executed"] == row["forwards/planned"] == 3 * 4 + 3 * 2 + 3 * 2


def equivalents(parts: Any, work: Callable[[], Any]) -> int:
    """Rows that went forwards through the denoiser, and rows whose gradients came back, by hooks of torch's own."""
    denoiser, seen = parts[0].denoiser, []
    hooks = [
        denoiser.proj_in.register_forward_pre_hook(lambda _, given: seen.append(len(given[0]))),
        denoiser.proj_out.register_full_backward_hook(lambda _, back, out: seen.append(len(out[0]))),
    ]
    work()
    for hook in hooks:
        hook.remove()
    return sum(seen)


@pytest.mark.parametrize(
    ("sets", "floor"),
    [
        # A sample takes 4 sampler steps of m branches, then forwards and backwards at each of 2 timesteps.
        (("rl.guidance=3.0",), 4 * 2 + 2 * 2),
        (("rl.guidance=1.0",), 4 * 1 + 2 * 2),
        (("rl.guidance=3.0", "rl.kl_beta=0.5"), 4 * 2 + 2 * 2 + 2),
    ],
)
def test_a_sample_takes_no_more_forwards_than_the_objective_needs(
    profile: Make, roles: Any, sets: tuple[str, ...], floor: int
) -> None:
    parts = roles(profile('rl.old.decay="copy"', *sets))
    assert equivalents(parts, lambda: step(parts)) == 2 * floor


def test_an_old_policy_that_lags_behind_takes_one_more_forward_a_timestep(profile: Make, roles: Any) -> None:
    parts = roles(profile('rl.old.decay="linear"', "rl.guidance=3.0"))
    _, state = step(parts)
    assert equivalents(parts, lambda: step(parts, state, first=2)) == 2 * (4 * 2 + 2 * 2 + 2)
