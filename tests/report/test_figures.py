"""Numbers as text, and the sums, against values worked out by hand and by the standard library."""

from __future__ import annotations

import statistics

import pytest

from nftctl.report.figures import running_mean, scatter, seconds, short, signed, size, tick_labels, ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (144.0, "144"), (0.47085, "0.4708"), (-0.5, "-0.5"), (7.0265e-8, "7.03e-8"), (-1.5e-17, "-1.5e-17"),
        (12345.6, "12346"), (1234567.0, "1.23e6"), (0.001, "0.001"), (1e-4, "0.0001"), (3e-5, "3e-5"),
    ],
)  # fmt: skip
def test_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0039, "3.9 ms"), (0.381, "381 ms"), (0.9996, "1.00 s"), (1.093, "1.09 s"), (26.4, "26 s"),
        (59.7, "1 min 00 s"), (163, "2 min 43 s"), (3600, "1 h 00 min"), (11100, "3 h 05 min"),
    ],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_sizes_and_signs() -> None:
    assert [size(n) for n in (1, 16_232, 12_345_678, 3_200_000_000)] == ["1 kB", "16 kB", "12.3 MB", "3.2 GB"]
    assert (signed(0.0891), signed(-0.25)) == ("+0.089", "−0.250")


def test_scatter_is_the_sample_standard_deviation() -> None:
    values = [0.3, 0.7, 0.1, 0.9, 0.4]
    assert scatter(values) == pytest.approx(statistics.stdev(values))
    assert scatter([0.5]) == 0


def test_running_mean_looks_back_only() -> None:
    assert running_mean([1, 2, 3, 4, 5], 3) == pytest.approx([1, 1.5, 2, 3, 4])


@pytest.mark.parametrize(
    ("low", "high", "expected", "labels"),
    [
        (0.36, 0.705, [0.4, 0.5, 0.6, 0.7], ["0.4", "0.5", "0.6", "0.7"]),
        (0, 60, [0, 20, 40, 60], ["0", "20", "40", "60"]),
        (0.99966, 0.99973, [0.99966, 0.99968, 0.9997, 0.99972], ["0.99966", "0.99968", "0.99970", "0.99972"]),
        (0, 7e-8, [0, 2e-8, 4e-8, 6e-8], ["0", "2e-8", "4e-8", "6e-8"]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1], ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        (3, 3, [3], ["3"]),
    ],
)
def test_ticks_are_round_within_the_range_and_told_apart(
    low: float, high: float, expected: list[float], labels: list[str]
) -> None:
    assert ticks(low, high, 4) == pytest.approx(expected, abs=1e-15)
    assert tick_labels(ticks(low, high, 4)) == labels
