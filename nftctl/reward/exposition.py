"""What a server counted, as Prometheus reads it: counters, gauges and histograms in the text format 0.0.4.

Owns names, labels and escaping. Labels come from fixed sets (routes, statuses), so the number of series is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds in seconds: from an empty scorer on loopback to a step on a slow one."""

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number per set of labels that only grows."""

    kind = "counter"

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the series with these labels."""
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0) + amount

    def value(self, **labels: str) -> float:
        """Of the series with these labels; 0 before the first `add`."""
        return self._values.get(tuple(labels.items()), 0)

    def lines(self) -> Iterator[str]:
        """Its samples."""
        # A counter without labels exists from the start: an absent series and a zero are not the same to a query.
        for labels, value in (self._values or {(): 0}).items():
            yield f"{self.name}{_braces(labels)} {_number(value)}"


class Gauge:
    """A number that is read when somebody asks, with fixed labels."""

    kind = "gauge"

    def __init__(
        self, name: str, help: str, read: Callable[[], float], labels: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.help = name, help
        self._read = read
        self._labels: Labels = tuple((labels or {}).items())

    def lines(self) -> Iterator[str]:
        """Its one sample."""
        yield f"{self.name}{_braces(self._labels)} {_number(self._read())}"


class Histogram:
    """Durations in seconds per set of labels: cumulative buckets, sum and count."""

    kind = "histogram"

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self._series: dict[Labels, tuple[list[int], list[float]]] = {}

    def observe(self, seconds: float, **labels: str) -> None:
        """Count one duration."""
        counts, total = self._series.setdefault(tuple(labels.items()), ([0] * (len(BUCKETS) + 1), [0.0]))
        counts[bisect_left(BUCKETS, seconds)] += 1
        total[0] += seconds

    def lines(self) -> Iterator[str]:
        """Its samples."""
        for labels, (counts, total) in self._series.items():
            running = 0
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
                running += count
                yield f"{self.name}_bucket{_braces((*labels, ('le', bound)))} {running}"
            yield f"{self.name}_sum{_braces(labels)} {_number(total[0])}"
            yield f"{self.name}_count{_braces(labels)} {running}"


def exposition(*families: Counter | Gauge | Histogram) -> str:
    """The page that is scraped."""
    lines: list[str] = []
    for family in families:
        lines += [
            f"# HELP {family.name} {_escaped(family.help)}",
            f"# TYPE {family.name} {family.kind}",
            *family.lines(),
        ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    # Counts of bytes have more digits than the usual formats keep.
    return str(int(value)) if value == int(value) else repr(value)


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
