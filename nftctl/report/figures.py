"""Numbers as people read them, and the few sums that the page needs of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def short(value: float) -> str:
    """Four significant digits. Example: `0.4709`, `144`, `7.03e-8`."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def signed(value: float) -> str:
    """Three digits with a sign that is always there."""
    return f"{value:+.3f}".replace("-", "−")


def seconds(value: float) -> str:
    """A time. Example: `9 ms`, `1.09 s`, `2 min 43 s`, `3 h 05 min`."""
    if value < 0.9995:
        return f"{1000 * value:.0f} ms" if value >= 0.00995 else f"{1000 * value:.1f} ms"
    if value < 59.5:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    minutes = round(value) // 60
    if minutes < 60:
        return f"{minutes} min {round(value) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int) -> str:
    """Bytes. Example: `16 kB`, `12.3 MB`."""
    if count < 1_000_000:
        return f"{max(1, round(count / 1000))} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def mean(values: Sequence[float]) -> float:
    """The mean of at least one number."""
    return math.fsum(values) / len(values)


def scatter(values: Sequence[float]) -> float:
    """Standard deviation about the mean, of a sample; 0 below two numbers."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """At each place the mean of the `width` values that end there, of fewer at the beginning."""
    return [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within [low, high], some `about` of them."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / max(1, about)
    power: float = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12 - math.floor(math.log10(step))) for n in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Round numbers of an axis, with as many decimals as tell them apart."""
    largest = max(map(abs, values), default=0.0)
    if len(values) < 2 or largest < 1e-4 or largest >= 1e6:
        return [short(value) for value in values]
    step = min(b - a for a, b in pairwise(values))
    decimals = min(8, max(0, -math.floor(math.log10(step) + 1e-9)))
    return [f"{value:.{decimals}f}" for value in values]
