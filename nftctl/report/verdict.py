"""Whether a run learned, in a sentence, from its rows alone.

Owns the yardstick: a change counts against what drawing the noise anew would move it by, never by its size alone.
Refuses to take a few steps, a reward that was trained on, or one with alarms beside it for a success.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nftctl.report.facts import number, numbers
from nftctl.report.figures import mean, scatter, signed
from nftctl.run.rows import Row

Kind = Literal["no-steps", "too-short", "learned", "leaning", "unclear", "fell", "suspect", "training-only"]

MIN_STEPS = 10
"""Below it nothing is said about learning."""
WINDOW = 10
"""Steps that stand for the beginning, and for the end."""
CLEAR, LEANING = 3.0, 2.0
"""Changes, in units of their noise, that count as plain, and as more likely than not."""
CHEATING = frozenset({"reward-hacking", "images-saturating", "images-noisy", "diversity-collapse"})
"""Alarms after which a reward that rose may have been earned by something else than the task."""
UNTOLD, NO_NOISE = "no more than noise would do", "and nothing says how much noise would do"
DOUBTFUL = "But there are signs against taking that at its word."
SHOWN = 3
"""Steps of one kind of alarm that a sentence names."""


@dataclass(frozen=True, slots=True)
class Change:
    """A figure before and after, and the noise that it is measured with."""

    before: float
    after: float
    noise: float
    """Standard deviation that the difference would have if nothing had changed; 0 where it cannot be known."""
    first_step: int
    last_step: int

    @property
    def difference(self) -> float:
        """After less before."""
        return self.after - self.before

    @property
    def ratio(self) -> float:
        """The difference in units of its noise."""
        return self.difference / self.noise if self.noise else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What can be said of a run."""

    kind: Kind
    headline: str
    """One sentence."""
    reasons: list[str] = field(default_factory=list)
    """Sentences on what it rests on."""
    held_out: Change | None = None
    training: Change | None = None

    def document(self) -> dict[str, Any]:
        """The verdict for JSON."""
        document = asdict(self)
        for key, change in (("held_out", self.held_out), ("training", self.training)):
            if change is not None:
                document[key] |= {"difference": change.difference, "ratio": change.ratio}
        return document


def judge(rows: Sequence[Row], evaluations: Sequence[Row], alarms: Sequence[Mapping[str, Any]] = ()) -> Verdict:
    """The verdict on a run of these rows; all of them by rising step."""
    training, held_out = _training(rows), _held_out(rows, evaluations)
    if not rows:
        return Verdict("no-steps", "No step has been taken, so there is nothing to judge.")
    if len(rows) < MIN_STEPS:
        return Verdict("too-short", _too_short(rows, held_out, training), [], held_out, training)
    if held_out is None:
        return _by_training(training, evaluations, alarms)
    doubts = _doubts(rows, evaluations, alarms)
    kind = _kind(held_out)
    headline = _headline(kind, held_out)
    if kind in ("learned", "leaning") and doubts:
        kind, headline = "suspect", f"{headline} {DOUBTFUL}"
    reasons = [_yardstick(held_out, evaluations), *_training_reason(training, held_out), *doubts]
    return Verdict(kind, headline, [*reasons, *_alarm_reason(alarms), _one_run(kind)], held_out, training)


def _kind(change: Change) -> Kind:
    if change.ratio >= CLEAR:
        return "learned"
    if change.ratio >= LEANING:
        return "leaning"
    return "fell" if change.ratio <= -LEANING else "unclear"


def _headline(kind: Kind, change: Change) -> str:
    moved = f"the held-out reward went from {change.before:.3f} to {change.after:.3f} {_when(change)}"
    return {
        "learned": f"It learned: {moved}.",
        "leaning": f"It probably learned: {moved}.",
        "fell": f"It got worse: {moved}.",
    }.get(kind, f"Not shown to have learned: {moved}, {UNTOLD if change.noise else NO_NOISE}.")


def _when(change: Change) -> str:
    return f"between step {change.first_step} and step {change.last_step}"


def _training(rows: Sequence[Row]) -> Change | None:
    """The mean reward of the first steps and of the last; windows never overlap."""
    known = [row for row in rows if number(row, "train/reward_mean") is not None]
    width = min(WINDOW, len(known) // 2)
    if width == 0:
        return None
    first, last = (numbers(part, "train/reward_mean") for part in (known[:width], known[-width:]))
    noise = math.hypot(scatter(first), scatter(last)) / math.sqrt(width)
    return Change(mean(first), mean(last), noise, int(known[0]["step"]), int(known[-1]["step"]))


def _held_out(rows: Sequence[Row], evaluations: Sequence[Row]) -> Change | None:
    """The first look and the last one, with the noise of two means over as many images drawn independently.

    Both looks draw from the same noise, so their true difference is known better than that.
    """
    looks = [row for row in evaluations if number(row, "eval/reward") is not None]
    if len(looks) < 2 or looks[0]["step"] == looks[-1]["step"]:
        return None
    before, after = looks[0], looks[-1]
    errors = [_error(before, rows[:WINDOW]), _error(after, rows[-WINDOW:])]
    return Change(
        number(before, "eval/reward") or 0.0,
        number(after, "eval/reward") or 0.0,
        math.hypot(*errors),
        int(before["step"]),
        int(after["step"]),
    )


def _error(look: Row, rows: Sequence[Row]) -> float:
    """Standard error of a held-out mean: by the spread of its rewards or, where the row does not say, of those of the
    steps beside it; else by how the means of those steps scatter."""
    own, images = number(look, "eval/std"), number(look, "eval/samples")
    spreads = numbers(rows, "reward/std") if own is None else [own]
    if spreads and images:
        return mean(spreads) / math.sqrt(images)
    return scatter(numbers(rows, "train/reward_mean"))


def _yardstick(change: Change, evaluations: Sequence[Row]) -> str:
    if not change.noise:
        return "The rewards have no spread at all, so there is no noise to compare the change with."
    images = number(evaluations[-1], "eval/samples")
    over = f"means over {images:.0f} images" if images else "such means"
    return (
        f"The change of {signed(change.difference)} is {_times(change)} its noise: two {over}, each from noise of its "
        f"own, would differ by about ±{change.noise:.3f}."
    )


def _times(change: Change) -> str:
    return f"{abs(change.ratio):.1f} times"


def _training_reason(training: Change | None, held_out: Change) -> list[str]:
    if training is None:
        return []
    text = f"The training reward, as the mean of the first and of the last steps, went from {_arrow(training)}"
    if training.ratio >= CLEAR and held_out.ratio < LEANING:
        return [f"{text}: what was gained there does not show on held-out prompts."]
    return [f"{text} ({_times(training)} its own noise)." if training.noise else f"{text}."]


def _arrow(change: Change) -> str:
    return f"{change.before:.3f} to {change.after:.3f}"


def _doubts(rows: Sequence[Row], evaluations: Sequence[Row], alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Signs that the reward is served and the task is not."""
    return [*_judges(rows, evaluations), *_cheating(alarms)]


def _judges(rows: Sequence[Row], evaluations: Sequence[Row]) -> list[str]:
    """Scores that are reported and never rewarded, and fell while the reward rose."""
    found = []
    for key in sorted(key for key in evaluations[-1] if key.startswith("eval/") and key.endswith("judge")):
        looks = numbers(evaluations, key)
        own = scatter(numbers(rows[-WINDOW:], f"reward/{key.removeprefix('eval/')}"))
        if len(looks) > 1 and looks[-1] < looks[0] - LEANING * own:
            found.append(
                f"{key}, which is never rewarded, fell from {looks[0]:.3f} to {looks[-1]:.3f}: "
                "what is rewarded may not be what is wanted."
            )
    return found


def _named(alarms: Sequence[Mapping[str, Any]]) -> str:
    """Kinds of alarms with their steps. Example: `clamp at step 12, images-noisy at steps 40, 71`."""
    steps: dict[str, list[int]] = {}
    for alarm in alarms:
        steps.setdefault(str(alarm["alarm"]), []).append(int(alarm["step"]))
    return ", ".join(f"{name} at step{'s' if len(at) > 1 else ''} {_listed(at)}" for name, at in steps.items())


def _listed(steps: Sequence[int]) -> str:
    return ", ".join([*map(str, steps[:SHOWN]), *(["…"] if len(steps) > SHOWN else [])])


def _cheating(alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Alarms that speak against the reward itself. An alarm is raised once while it stands, so its age excuses none."""
    found = [alarm for alarm in alarms if alarm["alarm"] in CHEATING]
    return (
        [f"Alarms speak against the reward: {_named(found)}. Look at the samples before you believe it."]
        if found
        else []
    )


def _alarm_reason(alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    others = [alarm for alarm in alarms if alarm["alarm"] not in CHEATING]
    return [f"Alarms were raised: {_named(others)}."] if others else []


def _one_run(kind: Kind) -> str:
    if kind in ("unclear", "leaning"):
        return "More steps, more held-out images or a second seed would tell."
    return "This is one run with one seed; a second seed shows how far it can be trusted."


def _by_training(training: Change | None, evaluations: Sequence[Row], alarms: Sequence[Mapping[str, Any]]) -> Verdict:
    why = "was scored once only" if evaluations else "was never scored"
    reasons = [f"Nothing held out can confirm it: the held-out set {why}. Set eval.prompt_file, or eval.every."]
    if training is None:
        return Verdict("unclear", "The run reports no training reward, so there is nothing to judge.", reasons)
    doubts = _cheating(alarms)
    reasons += [*doubts, *_alarm_reason(alarms)]
    moved = f"the training reward went from {_arrow(training)} {_when(training)}"
    if training.noise:
        reasons.insert(0, f"That is {_times(training)} the noise of such means (±{training.noise:.3f}).")
    if abs(training.ratio) < LEANING:
        headline = f"Not shown to have learned: {moved}, {UNTOLD if training.noise else NO_NOISE}."
        return Verdict("unclear", headline, reasons, None, training)
    if training.ratio < 0:
        return Verdict("fell", f"It got worse in training: {moved}.", reasons, None, training)
    headline = f"It rose in training: {moved}."
    if doubts:
        return Verdict("suspect", f"{headline} {DOUBTFUL}", reasons, None, training)
    return Verdict("training-only", headline, reasons, None, training)


def _too_short(rows: Sequence[Row], held_out: Change | None, training: Change | None) -> str:
    count = f"{len(rows)} step{'s' if len(rows) > 1 else ''}"
    text = f"Too short to say: {count} of at least {MIN_STEPS}"
    if held_out:
        return f"{text}; the held-out reward went from {_arrow(held_out)}."
    return f"{text}; the training reward went from {_arrow(training)}." if training else f"{text}."
