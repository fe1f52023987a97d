"""Draws are a function of their key and of nothing else; both seed clocks and the prompt order follow their tables."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nftctl.algorithm import draws

ROWS, RANKS, SHAPE = 4, 4, (2, 3)


def test_a_key_has_one_canonical_text() -> None:
    assert draws.encode_key((7, "rollout", -12)) == b"nftctl-draw/1:i1:7,s7:rollout,i3:-12,"
    assert draws.encode_key(("é",)) == b"nftctl-draw/1:s2:\xc3\xa9,"


def test_a_key_is_hashed_to_63_bits() -> None:
    digest = hashlib.sha256(b"nftctl-draw/1:i1:0,s7:rollout,i1:3,i1:1,").hexdigest()
    assert draws.key_bits(0, "rollout", 3, 1) == int(digest[:16], 16) // 2


@pytest.mark.parametrize(
    ("a", "b"), [((1,), ("1",)), (("a", "b"), ("ab",)), (("a,s1:b",), ("a", "b")), ((12, 3), (1, 23))]
)
def test_different_keys_never_share_a_text(a: tuple, b: tuple) -> None:
    assert draws.encode_key(a) != draws.encode_key(b)


@given(
    st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=4),
    st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_encoding_is_injective(a: list, b: list) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (draws.encode_key(a) == draws.encode_key(b)) is same


@pytest.mark.parametrize("part", [1.0, True, None, b"x"])
def test_other_key_parts_are_refused(part: object) -> None:
    with pytest.raises(TypeError, match="integers and text"):
        draws.normal((2,), 0, part)  # type: ignore[arg-type]


def test_all_63_bits_reach_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for bits in (5, 5 + (1 << 32), 5 + (1 << 62)):
        monkeypatch.setattr(draws, "key_bits", lambda *_, bits=bits: bits)
        seen.append(draws.normal((16,), 0))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_numbers_of_version_1_are_pinned() -> None:
    assert draws.GENERATOR_VERSION == 1
    torch.testing.assert_close(draws.normal((3,), 0, "rollout", 0, 0), torch.tensor(PINNED_NORMAL), rtol=0, atol=1e-7)
    torch.testing.assert_close(
        draws.uniform((2,), 0, "train_t", 0, 0, 0),
        torch.tensor(PINNED_UNIFORM, dtype=torch.float64),
        rtol=0,
        atol=1e-15,
    )


def test_version_agrees_with_the_seed_contract() -> None:
    from nftctl.run import identity

    assert draws.GENERATOR_VERSION == identity.GENERATOR_VERSION


def test_normals_and_uniforms_have_their_moments() -> None:
    z, u = draws.normal((200_000,), "moments"), draws.uniform((200_000,), "moments")
    assert z.dtype == torch.float32
    assert abs(z.mean().item()) < 0.01
    assert abs(z.std().item() - 1) < 0.01
    assert abs(z.pow(4).mean().item() - 3) < 0.1
    assert abs(u.mean().item() - 0.5) < 0.005
    assert u.min() >= 0
    assert u.max() < 1


def test_global_generators_are_neither_read_nor_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    before = draws.normal((8,), 3, "x"), draws.permutation(9, 3, "y")
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[union-attr]

    def poison(*_: object, **__: object) -> None:
        raise AssertionError("a global generator was consulted")

    for module, names in (
        (torch, ["randn", "rand", "randperm", "normal"]),
        (np.random, ["standard_normal", "rand"]),
        (random, ["random"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, poison)
    assert torch.equal(draws.normal((8,), 3, "x"), before[0])
    assert torch.equal(draws.permutation(9, 3, "y"), before[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # type: ignore[index]
    assert random.getstate() == states[2]


def _latents(clock: draws.SeedClock, step: int) -> dict[tuple[int, int], torch.Tensor]:
    """Initial latents of one step by (running row, rank); one optimizer step per rollout."""
    rows = range(step * ROWS, (step + 1) * ROWS)
    ticks = [draws.rollout_tick(clock, row, optimizer_steps=step) for row in rows]
    by_rank = [draws.rollout_noise(SHAPE, seed=0, ticks=ticks, rank=rank) for rank in range(RANKS)]
    return {(row, rank): by_rank[rank][i] for i, row in enumerate(rows) for rank in range(RANKS)}


def _distinct(latents: list[torch.Tensor]) -> int:
    return len({tuple(x.flatten().tolist()) for x in latents})


def test_source_row_clock_table() -> None:
    assert [draws.rollout_tick("source_row", row, 0) for row in range(4)] == [0, 1, 2, 3]
    assert [draws.rollout_tick("source_row", row, 1) for row in range(4, 8)] == [4, 5, 6, 7]
    steps = [*_latents("source_row", 0).values(), *_latents("source_row", 1).values()]
    assert _distinct(steps) == 32


def test_optimizer_step_clock_table() -> None:
    assert [draws.rollout_tick("optimizer_step", row, 0) for row in range(4)] == [0, 0, 0, 0]
    assert [draws.rollout_tick("optimizer_step", row, 1) for row in range(4, 8)] == [1, 1, 1, 1]
    first, second = _latents("optimizer_step", 0), _latents("optimizer_step", 1)
    assert _distinct([*first.values(), *second.values()]) == 8
    for rank in range(RANKS):
        assert all(torch.equal(first[row, rank], first[0, rank]) for row in range(ROWS))


def test_equal_ticks_give_equal_latents_under_both_clocks() -> None:
    by_row, by_step = _latents("source_row", 0), _latents("optimizer_step", 1)
    for rank in range(RANKS):
        assert torch.equal(by_row[1, rank], by_step[4, rank])
        assert torch.equal(by_row[1, rank], draws.normal(SHAPE, 0, "rollout", 1, rank))


def test_rollout_noise_does_not_depend_on_the_micro_batch() -> None:
    whole = draws.rollout_noise(SHAPE, seed=4, ticks=[8, 9, 10, 11], rank=2)
    parts = [draws.rollout_noise(SHAPE, seed=4, ticks=ticks, rank=2) for ticks in ([11], [8, 9], [10])]
    assert torch.equal(whole, torch.cat([parts[1], parts[2], parts[0]]))


def test_training_noise_is_keyed_by_row_rank_and_running_timestep() -> None:
    j = [draws.train_index(update, 3, k) for update in range(2) for k in range(3)]
    assert j == [0, 1, 2, 3, 4, 5]
    pairs = [(row, index) for row in (0, 1) for index in j]
    noise = [
        *draws.train_noise(SHAPE, seed=0, rank=0, pairs=pairs),
        *draws.train_noise(SHAPE, seed=0, rank=1, pairs=pairs),
    ]
    assert _distinct([*noise, *draws.rollout_noise(SHAPE, seed=0, ticks=[0, 1], rank=0)]) == 26
    assert torch.equal(noise[4], draws.normal(SHAPE, 0, "train_eps", 0, 0, 4))


def test_rows_wrap_in_file_order_without_shuffle() -> None:
    assert [draws.row_line(n, 5, shuffle=False, seed=0) for n in (0, 4, 5, 12)] == [0, 4, 0, 2]


def test_shuffle_permutes_each_epoch_anew() -> None:
    epochs = [[draws.row_line(n, 7, shuffle=True, seed=3) for n in range(e * 7, e * 7 + 7)] for e in range(3)]
    assert all(sorted(order) == list(range(7)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    assert epochs[1] == draws.permutation(7, 3, "shuffle", 1).tolist()
    assert [draws.row_line(n, 7, shuffle=True, seed=4) for n in range(7)] != epochs[0]


@pytest.mark.parametrize(("n", "lines"), [(-1, 3), (0, 0)])
def test_row_line_refuses_nonsense(n: int, lines: int) -> None:
    with pytest.raises(ValueError, match="at least one line"):
        draws.row_line(n, lines, shuffle=False, seed=0)


PINNED_NORMAL = [0.5749213099, -0.5787376761, 0.2567448914]
PINNED_UNIFORM = [0.7236283500220172, 0.10432023083913589]
