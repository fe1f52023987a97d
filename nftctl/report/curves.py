"""Which curves a run has, by the keys of its rows: what belongs into one chart, under which heading.

A key nobody foresaw gets a chart of its own; one that never moves becomes a line of text; one that is not there is not
missed. Lines of very different size are given charts of their own. Long runs are thinned to means of equal stretches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from nftctl.report.facts import RunFacts, number
from nftctl.report.figures import mean, running_mean, short

POINTS = 600
"""Points of a line; longer ones are thinned."""
SMOOTH = 10
"""Steps of the running mean."""
NOTHING, SAME = 1e-12, 1e-9
"""What is smaller is a rounded zero; a range below this share of the largest value is a rounded constant."""
APART = 25.0
"""Lines whose largest values are further apart than this factor are not drawn in one chart."""

REWARD = "train/reward_mean"
HELD_OUT = "eval/reward"

Look = Literal["plain", "faint", "strong", "marks"]
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. `slot` chooses colour and dashes."""

    label: str
    points: list[Point]
    slot: int = 0
    look: Look = "plain"


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the steps, in one frame."""

    name: str
    title: str
    note: str
    lines: list[Line]
    section: str = "training"
    keys: tuple[str, ...] = ()
    """Names of the figures that it shows."""
    stretch: int = 1
    """Steps that one point is the mean of."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A chart that is drawn when a run has keys like these."""

    title: str
    keys: tuple[str, ...]
    note: str = ""
    section: str = "training"
    but: tuple[str, ...] = ()


PARTS_BUT = ("*/std", "*/group_std", "*/failures", "reward/std", "reward/group_std", "reward/*_groups")

SPECS = (
    Spec("Held-out scores", ("eval/*",), "Every score of the held-out images.", "reward",
         ("eval/reward", "eval/samples", "eval/std", "*distance*", "*kl*")),
    Spec("Scores in training", ("reward/*",), "Means over the samples of a step, before weights.", "reward", PARTS_BUT),
    Spec("Spread of rewards", ("reward/std", "reward/group_std", "eval/std"),
         "Within groups is what is learned from; at zero nothing is.", "reward"),
    Spec("Spread by provider", ("reward/*/std", "reward/*/group_std"), "", "reward"),
    Spec("Groups that teach nothing", ("reward/*_groups",), "All samples scored alike, or left out.", "reward"),
    Spec("Scores that failed", ("reward/*/failures",), "", "reward"),
    Spec("Loss", ("train/loss", "train/policy_loss", "train/kl_loss"),
         "Read it for its parts: a KL term that dominates holds the policy at the base. It need not fall."),
    Spec("Errors of the two branches", ("train/positive_error", "train/negative_error"),
         "Mean distance of each implicit prediction from the sample."),
    Spec("Distance from the base and the old policy", ("*distance*", "*_gap", "eval/kl*", "*drift*")),
    Spec("Advantages at the clamp", ("train/advantage_clamped_*",), "Shares; high ones mean the clamp does the work."),
    Spec("Advantage and optimality", ("train/advantage*", "train/optimality*")),
    Spec("Gradient norm", ("train/grad_norm*",), "Before clipping."),
    Spec("Learning rate", ("train/lr*",)),
    Spec("Old policy", ("old/*",), "The share of itself that it kept at a refresh, and refreshes so far."),
    Spec("Images", ("image/*", "images/*", "sample/*", "samples/*"), "Statistics of the samples of a step."),
    Spec("Seconds a step", ("timer/step", "timer/sample", "timer/prepare", "timer/reward_exposed", "timer/train"),
         "", "time"),
    Spec("Seconds of the slowest score", ("timer/reward/*",), "", "time"),
    Spec("Samples per second", ("timer/samples_per_second*",), "", "time"),
    Spec("Forwards", ("forwards/*",), "", "time"),
    Spec("Memory", ("system/*_gb", "system/*memory*"), "", "time"),
    Spec("Reward service", ("system/reward*",), "Counted since the attempt began.", "time"),
    Spec("Machine", ("timer/*", "system/*"), "", "time"),
)  # fmt: skip
"""In the order of the page; a key goes into the first that takes it."""


@dataclass(frozen=True, slots=True)
class Curves:
    """All charts, and what is not drawn."""

    charts: list[Chart]
    constant: dict[str, str] = field(default_factory=dict)
    """Key -> its one value, where every run has the same."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Key -> another key that has the same values throughout, and is drawn."""


def curves_of(runs: Sequence[RunFacts], names: Sequence[str]) -> Curves:
    """Charts of one run, or of several in one frame each; `names` label them."""
    series = [_series(run) for run in runs]
    keys = list(dict.fromkeys(key for one in series for key in one))
    charts = [*_reward_chart(series, names)]
    constant: dict[str, str] = {}
    repeated: dict[str, str] = {}
    drawn = [key for key in (REWARD, HELD_OUT) if key in keys]
    for spec, members in _sorted_into_specs([key for key in keys if key not in drawn]):
        moving = []
        for key in members:
            if (value := _only_value(key, series)) is not None:
                constant[key] = short(value)
            elif twin := next((other for other in drawn if all(one.get(key) == one.get(other) for one in series)), ""):
                repeated[key] = twin
            else:
                moving.append(key)
                drawn.append(key)
        charts += _charts(spec, moving, series, names)
    return Curves([replace(chart, name=f"chart-{i}") for i, chart in enumerate(charts)], constant, repeated)


def _series(run: RunFacts) -> dict[str, list[Point]]:
    """Key -> its points, over rows and evaluations."""
    found: dict[str, list[Point]] = {}
    for row in (*run.rows, *run.evaluations):
        for key in row:
            value = None if key in ("step", "eval/samples") else number(row, key)
            if value is not None:
                found.setdefault(key, []).append((row["step"], value))
    return found


def _sorted_into_specs(keys: Sequence[str]) -> Iterator[tuple[Spec, list[str]]]:
    left = list(keys)
    for spec in SPECS:
        # In the order in which the patterns stand, so that a whole comes before its parts.
        taken = [
            key
            for pattern in spec.keys
            for key in left
            if fnmatchcase(key, pattern) and not any(fnmatchcase(key, no) for no in spec.but)
        ]
        taken = list(dict.fromkeys(taken))
        left = [key for key in left if key not in taken]
        if taken:
            yield spec, taken
    for prefix in dict.fromkeys(key.partition("/")[0] for key in left):
        yield Spec(prefix, (), ""), [key for key in left if key.partition("/")[0] == prefix]


def _only_value(key: str, series: Sequence[Mapping[str, list[Point]]]) -> float | None:
    values = [value for one in series for _, value in one.get(key, ())]
    largest = max(map(abs, values))
    if largest < NOTHING:
        return 0.0
    return values[-1] if max(values) - min(values) <= SAME * largest else None


def _reward_chart(series: Sequence[Mapping[str, list[Point]]], names: Sequence[str]) -> Iterator[Chart]:
    lines: list[Line] = []
    several = len(series) > 1
    for slot, (one, name) in enumerate(zip(series, names, strict=True)):
        points = one.get(REWARD, [])
        smooth = running_mean([value for _, value in points], SMOOTH)
        strong = [(step, value) for (step, _), value in zip(points, smooth, strict=True)]
        of = f"{name}: " if several else ""
        if points and not several:
            lines.append(Line(f"{of}each step", points, slot, "faint"))
        if points:
            lines.append(Line(f"{of}mean of {SMOOTH} steps", strong, slot, "strong"))
        if one.get(HELD_OUT):
            lines.append(Line(f"{of}held out", one[HELD_OUT], slot if several else 1, "marks"))
    if lines:
        note = "Reward of the samples that were trained on, and of held-out prompts whenever they were scored."
        yield _thinned(Chart("", "Reward", note, lines, "reward", (REWARD, HELD_OUT)))


def _charts(
    spec: Spec, keys: Sequence[str], series: Sequence[Mapping[str, list[Point]]], names: Sequence[str]
) -> Iterator[Chart]:
    """Of one run a chart for all keys; of several a chart for each key, with a line for each run."""
    if len(series) > 1:
        for key in keys:
            lines = [
                Line(name, one[key], slot, _look(key))
                for slot, (one, name) in enumerate(zip(series, names, strict=True))
                if key in one
            ]
            yield _thinned(Chart("", key, spec.note if key == keys[0] else "", lines, spec.section, (key,)))
        return
    groups = _of_one_size(keys, series[0])
    for group in groups:
        lines = [Line(key, series[0][key], slot, _look(key)) for slot, key in enumerate(group)]
        title = f"{spec.title}: {group[0]}" if len(groups) > 1 and len(group) == 1 else spec.title
        yield _thinned(Chart("", title, spec.note if group is groups[0] else "", lines, spec.section, tuple(group)))


def _look(key: str) -> Look:
    return "marks" if key.startswith("eval/") else "plain"


def _of_one_size(keys: Sequence[str], points: Mapping[str, list[Point]]) -> list[list[str]]:
    """Keys that can share an axis; eight lines are as many as can be told apart."""
    groups: list[tuple[float, list[str]]] = []
    for key in keys:
        top = max(abs(value) for _, value in points[key])
        for size, members in groups:
            near = (top == 0 and size == 0) or (min(top, size) > 0 and max(top, size) / min(top, size) <= APART)
            if near and len(members) < 8:
                members.append(key)
                break
        else:
            groups.append((top, [key]))
    return [members for _, members in groups]


def _thinned(chart: Chart) -> Chart:
    longest = max(len(line.points) for line in chart.lines)
    stretch = -(-longest // POINTS)
    lines = [replace(line, points=thin(line.points, stretch)) for line in chart.lines]
    return replace(chart, lines=lines, stretch=stretch)


def thin(points: Sequence[Point], stretch: int) -> list[Point]:
    """Means of `stretch` points each, at the step of their last one. Marks are few and stay as they are."""
    if stretch <= 1 or len(points) <= POINTS:
        return list(points)
    parts = [points[i : i + stretch] for i in range(0, len(points), stretch)]
    return [(part[-1][0], mean([value for _, value in part])) for part in parts]


def document(chart: Chart) -> dict[str, Any]:
    """What the page's script needs of a chart."""
    return {
        "name": chart.name,
        "lines": [
            {"x": [step for step, _ in line.points], "y": [_rounded(value) for _, value in line.points]}
            for line in chart.lines
        ],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
