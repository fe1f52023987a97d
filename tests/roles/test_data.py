"""Which prompts a step uses is a function of the cursor alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nftctl.profile.prompts import Prompt
from nftctl.roles.data import DataRole

PROMPTS = [Prompt(text, text) for text in ("zero", "one", "two", "three", "four")]


def role(rows: int = 2, *, shuffle: bool = False, seed: int = 0) -> DataRole:
    return DataRole(PROMPTS, rows_per_step=rows, shuffle=shuffle, seed=seed)


def test_file_order_again_and_again() -> None:
    data = role(2)
    steps = [[(row.number, row.line, row.prompt.text) for row in data.next(cursor)] for cursor in (0, 2, 4)]
    assert steps == [
        [(0, 0, "zero"), (1, 1, "one")],
        [(2, 2, "two"), (3, 3, "three")],
        [(4, 4, "four"), (5, 0, "zero")],
    ]


def test_the_running_number_never_wraps() -> None:
    assert [(row.number, row.line) for row in role(3).next(1_000_004)] == [
        (1_000_004, 4), (1_000_005, 0), (1_000_006, 1),
    ]  # fmt: skip


def test_the_same_cursor_gives_the_same_rows_however_often_it_is_asked() -> None:
    data = role(2, shuffle=True)
    first = data.next(6)
    data.next(0)
    assert data.next(6) == first


@given(seed=st.integers(0, 2**62), epoch=st.integers(0, 50), start=st.integers(0, 4), rows=st.integers(1, 5))
def test_a_shuffled_epoch_has_every_line_once_wherever_steps_cut_it(
    seed: int, epoch: int, start: int, rows: int
) -> None:
    whole = [row.line for row in role(5, shuffle=True, seed=seed).next(5 * epoch)]
    assert sorted(whole) == [0, 1, 2, 3, 4]
    cursor = 5 * epoch + start
    part = [row.line for row in role(rows, shuffle=True, seed=seed).next(cursor)]
    following = [row.line for row in role(5, shuffle=True, seed=seed).next(5 * (epoch + 1))]
    assert part == (whole + following)[start : start + rows]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        data = role(5, shuffle=True, seed=seed)
        return [tuple(row.line for row in data.next(5 * epoch)) for epoch in range(20)]

    assert len(set(orders(0))) > 10
    assert orders(0) == orders(0)
    assert orders(0) != orders(1)
