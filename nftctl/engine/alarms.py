"""What a run's own rows warn of: a hacked reward, a collapse, a step that teaches nothing, weights that do not move.

Owns the signs and their limits, which are fixed here and not in profiles: an alarm that everybody sets to taste says
nothing. Pure functions of metrics rows and evaluation rows, so a run that goes on knows again what it had said. Judges
only what the rows hold, and stays silent where they lack a figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nftctl.profile.schema import AlarmCode, Profile
from nftctl.run.rows import Row

WINDOW = 5
"""Rows whose mean is compared with the start: single rows of a few prompts differ by a third of the rewards' spread."""
RECENT = 21
"""Rows at the end of the history that steps are judged by: the newest, and 20 that a running median is taken of."""
QUIET_STEPS = 5
"""Judgements in a row without a sign after which an alarm is over, and may be raised again. Fewer would repeat one at
every crossing of its limit."""

CLAMP_SHARE = 0.5
"""Share of clamped advantages above which the bounds, and not the rewards, say what is learned."""
CLAMP_STEPS = 3
"""Steps in a row: with a few groups, one such step is chance."""
OLD_STEPS = 3
"""Steps in a row without any distance to old, not counting the first, which has none by construction."""
SATURATION_RISE = 0.15
"""Share of all channel values that may go to an end of their range since the start. Photographs have a few hundredths
there, and steps of few prompts differ by as much."""
DETAIL_FACTOR = 2.0
"""By which fine detail may grow or shrink: four times its energy. Prompts alone move a step's mean by less."""
DIVERSITY_SHARE = 0.5
"""Of the start's distance between images of a prompt. A policy that learns gives up a tenth or two."""
SHARP = 1.5
"""How much further an image figure may be from the very first row, which shows the base, but few prompts. A run that
breaks at its first update has broken rows at its start."""
LOSS_FACTOR = 5.0
"""By which the loss may exceed its running median; it is normalised, and steady to a few tenths."""
GRAD_FACTOR = 10.0
"""By which the gradient norm may: it is heavy-tailed, and is clipped besides."""
REWARD_FALL = 1.0
"""Spreads of the first rewards by which their mean may fall: beyond four standard errors of a window of few groups."""
FIRST_REWARDS = 3
"""Rows of which the best is where rewards started: the first update may already have broken the others."""
HACK_RISE = 0.25
"""Spreads by which the training reward has to have risen before a fall elsewhere counts."""
HACK_FALL = 0.25
"""Spreads by which the held-out reward may fall below its best: noise is fixed, so what moves it is the policy."""
KL_LIMIT = 0.5
"""Mean squared distance of the velocities to the reference's: half of what the noise in a velocity has."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What was found in the rows, with the figure and the limit that it passed."""

    message: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign that was not there before, and what to do about it."""

    code: AlarmCode
    message: str
    advice: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class History:
    """What steps are judged by.

    first, recent   the rows at both ends of the run so far, oldest first; they overlap in a short one
    groups          prompt rows of a step
    old_moves       whether old keeps a share of itself at every refresh, from the first on
    """

    first: Sequence[Row]
    recent: Sequence[Row]
    groups: int
    old_moves: bool

    @classmethod
    def of(cls, profile: Profile, rows: Sequence[Row], count: int) -> History:
        """The first `count` rows of a run."""
        old = profile.rl.old
        moves = old.build_old and (old.decay == "linear" or (old.decay == "constant" and old.constant > 0))
        recent = rows[max(0, count - RECENT) : count]
        return cls(rows[: min(WINDOW, count)], recent, profile.data.rows_per_step, moves)

    def last(self, key: str, count: int = 1) -> list[float]:
        """The newest `count` values, oldest first; none at all where one is lacking."""
        rows = self.recent[-count:]
        return [row[key] for row in rows] if len(rows) == count and all(key in row for row in rows) else []

    def kept(self, row: Row) -> float:
        """Groups of a step that were not dropped."""
        return float(self.groups - row["reward/dropped_groups"])

    def flat(self, row: Row) -> bool:
        """Whether a step had no group that could teach anything."""
        return bool(row["reward/zero_spread_groups"] >= self.kept(row))

    def levels(self, key: str) -> tuple[float, float, float] | None:
        """Mean of the newest window, mean of the first one, and the very first value; None before there are both."""
        now = self.last(key, WINDOW + 1)[1:]
        if not now or any(key not in row for row in self.first):
            return None
        start = [row[key] for row in self.first]
        return _mean(now), _mean(start), start[0]


def _clamp(history: History) -> Sign | None:
    low = history.last("train/advantage_clamped_low", CLAMP_STEPS)
    high = history.last("train/advantage_clamped_high", CLAMP_STEPS)
    shares = [a + b for a, b in zip(low, high, strict=True)]
    if not shares or min(shares) <= CLAMP_SHARE:
        return None
    text = f"{shares[-1]:.0%} of the advantages are at the clamp, more than half for {CLAMP_STEPS} steps"
    return Sign(text, shares[-1], CLAMP_SHARE)


def _zero_spread(history: History) -> Sign | None:
    row = history.recent[-1]
    if not history.flat(row):
        return None
    kept, text = history.kept(row), "every group has one reward for all its samples; nothing is learned from it"
    return Sign(text, row["reward/zero_spread_groups"], kept)


def _policy_frozen(history: History) -> Sign | None:
    row, now = history.recent[-1], history.last("policy/distance")
    if not now or row["train/lr"] == 0 or history.flat(row):
        return None
    # Before the first step of a run the policy is the reference; a run that goes on elsewhere begins with no row.
    before = history.last("policy/distance", 2)[:1] or ([0.0] if row["step"] == 1 else [])
    if now != before:
        return None
    text = f"an optimizer step left the policy where it was, at {now[0]:.3g} of the adapted weights from the reference"
    return Sign(text, now[0], before[0])


def _old_not_moving(history: History) -> Sign | None:
    gaps, rows = history.last("train/old_gap", OLD_STEPS), history.recent[-OLD_STEPS:]
    distances = [row.get("policy/distance") for row in rows]
    still = None not in distances and len(set(distances)) == 1
    if not history.old_moves or not gaps or any(gaps) or rows[0]["step"] == 1 or still:
        return None
    text = f"old keeps a share of itself at a refresh, and yet is the policy to the bit for {OLD_STEPS} steps"
    return Sign(text, 0.0, 0.0)


def _saturating(history: History) -> Sign | None:
    levels = history.levels("images/saturation")
    if levels is None:
        return None
    now, start, first = levels
    limit = min(start + SATURATION_RISE, first + SHARP * SATURATION_RISE)
    text = f"{now:.0%} of the images' values are at an end of their range, {start:.0%} in the first steps"
    text += f" and {first:.0%} in the very first"
    return Sign(text, now, limit) if now > limit else None


def _noisy(history: History) -> Sign | None:
    levels = history.levels("images/high_frequency")
    if levels is None:
        return None
    now, start, first = levels
    high = min(start * DETAIL_FACTOR, first * DETAIL_FACTOR * SHARP)
    low = max(start / DETAIL_FACTOR, first / DETAIL_FACTOR / SHARP)
    text = f"fine detail of {now:.3f}, {start:.3f} in the first steps and {first:.3f} in the very first"
    if now > high:
        return Sign(f"images grow noisy: {text}", now, high)
    return Sign(f"images grow smooth: {text}", now, low) if now < low else None


def _collapsing(history: History) -> Sign | None:
    levels = history.levels("images/diversity")
    if levels is None:
        return None
    now, start, first = levels
    limit = max(start * DIVERSITY_SHARE, first * DIVERSITY_SHARE / SHARP)
    text = f"images of one prompt grow alike: distance {now:.3f}, {start:.3f} in the first steps"
    text += f" and {first:.3f} in the very first"
    return Sign(text, now, limit) if now < limit else None


def _exploding(history: History, key: str, factor: float, name: str) -> Sign | None:
    # A step without a signal has next to no gradient, which is no measure of one that has.
    values = [abs(row[key]) for row in history.recent if key in row and not history.flat(row)]
    if len(values) < 2 or history.flat(history.recent[-1]):
        return None
    now, before = values[-1], values[:-1]
    # In a run's first rows the very first counts too: the others may be of a run that has broken already.
    normal = statistics.median(before) if len(before) >= RECENT - 1 else min(statistics.median(before), before[0])
    if now <= factor * normal:
        return None
    return Sign(f"{name} of {now:.3g}, {normal:.3g} in the steps before", now, factor * normal)


def _loss(history: History) -> Sign | None:
    return _exploding(history, "train/loss", LOSS_FACTOR, "a loss")


def _grad(history: History) -> Sign | None:
    return _exploding(history, "train/grad_norm", GRAD_FACTOR, "a gradient norm")


def _reward_collapse(history: History) -> Sign | None:
    levels = history.levels("train/reward_mean")
    if levels is None:
        return None
    first = history.first[:FIRST_REWARDS]
    start, spread = max(row["train/reward_mean"] for row in first), max(row["reward/std"] for row in first)
    now, limit = levels[0], start - REWARD_FALL * spread
    text = f"the training reward fell from {start:.3f} to {now:.3f}"
    return Sign(text, now, limit) if spread > 0 and now < limit else None


def _hacking(rows: Sequence[Row], evaluations: Sequence[Row]) -> Sign | None:
    """The newest evaluation against the best one before it, and its distance to the reference since the first."""
    if len(evaluations) < 2:
        return None
    last, best = evaluations[-1], max(evaluations[:-1], key=lambda row: row["eval/reward"])
    if (rise := _rise(rows, best, last)) is not None:
        said, spread = rise
        # Who scores evaluations may use another scale.
        now, limit = last["eval/reward"], best["eval/reward"] - HACK_FALL * best.get("eval/std", spread)
        if now < limit:
            return Sign(f"{said}, the held-out reward fell from {best['eval/reward']:.3f} to {now:.3f}", now, limit)
    before, now = (row.get("eval/kl_distance", 0.0) for row in evaluations[-2:])
    if now > max(KL_LIMIT, before) and (rise := _rise(rows, evaluations[0], last)) is not None:
        return Sign(f"{rise[0]}, the velocities moved to {now:.3f} from the reference's", now, KL_LIMIT)
    return None


def _rise(rows: Sequence[Row], since: Row, until: Row) -> tuple[str, float] | None:
    """How the training reward rose between two evaluations, in words, and its spread; None where it did not."""
    between = [row for row in rows if since["step"] < row["step"] <= until["step"]]
    if len(between) < 2:
        return None
    window = min(WINDOW, len(between) // 2)
    before, after = (_mean([row["train/reward_mean"] for row in p]) for p in (between[:window], between[-window:]))
    spread = _mean([row["reward/std"] for row in between])
    if after - before < HACK_RISE * spread:
        return None
    return f"while the training reward rose from {before:.3f} to {after:.3f} since step {since['step']}", spread


STEPS: Mapping[AlarmCode, Callable[[History], Sign | None]] = {
    "clamp": _clamp,
    "zero-spread": _zero_spread,
    "policy-frozen": _policy_frozen,
    "old-not-moving": _old_not_moving,
    "images-saturating": _saturating,
    "images-noisy": _noisy,
    "diversity-collapse": _collapsing,
    "loss-exploding": _loss,
    "grad-exploding": _grad,
    "reward-collapse": _reward_collapse,
}

ADVICE: Mapping[AlarmCode, str] = {
    "reward-hacking": "look at samples/; raise rl.kl_beta, lower optimizer.lr, or add a reward that sees what was lost",
    "clamp": "widen rl.advantage_low and rl.advantage_high",
    "zero-spread": "see that the scorer tells images apart; prompts that are always or never right teach nothing",
    "policy-frozen": "raise optimizer.lr; see that model.lora.targets are modules that the image passes through",
    "old-not-moving": "see rl.old.decay and rl.old.constant",
    "images-saturating": "look at samples/; raise rl.kl_beta or lower optimizer.lr",
    "images-noisy": "look at samples/; raise rl.kl_beta or lower optimizer.lr",
    "diversity-collapse": "look at samples/; raise rl.kl_beta or lower optimizer.lr",
    "loss-exploding": "lower optimizer.lr, and go on from a checkpoint before this step",
    "grad-exploding": "lower optimizer.lr or optimizer.grad_clip",
    "reward-collapse": "lower optimizer.lr, and begin again from a checkpoint before the fall",
}


@dataclass(slots=True)
class Watch:
    """Which alarms stand: by code, the judgements since their sign was last seen."""

    profile: Profile
    standing: dict[AlarmCode, int] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile, rows: Sequence[Row], evaluations: Sequence[Row]) -> Watch:
        """What stands in a run that has these rows behind it."""
        watch = cls(profile)
        left = [row for row in evaluations if row["step"] > 0]
        for count, row in enumerate(rows, 1):
            watch.stepped(rows, count)
            if left and left[0]["step"] == row["step"]:
                left.pop(0)
                watch.evaluated(rows[:count], evaluations[: len(evaluations) - len(left)])
        return watch

    def stepped(self, rows: Sequence[Row], count: int | None = None) -> list[Alarm]:
        """Alarms that the newest of `rows`, or of the first `count` of them, raises."""
        history = History.of(self.profile, rows, len(rows) if count is None else count)
        return self._judge({code: look(history) for code, look in STEPS.items()}, QUIET_STEPS)

    def evaluated(self, rows: Sequence[Row], evaluations: Sequence[Row]) -> list[Alarm]:
        """Alarms that the newest evaluation raises."""
        return self._judge({"reward-hacking": _hacking(rows, evaluations)}, 1)

    def _judge(self, signs: Mapping[AlarmCode, Sign | None], quiet: int) -> list[Alarm]:
        raised = []
        for code, sign in signs.items():
            if sign is None:
                if code in self.standing:
                    self.standing[code] += 1
                    if self.standing[code] >= quiet:
                        del self.standing[code]
                continue
            if code not in self.standing:
                raised.append(Alarm(code, sign.message, ADVICE[code], sign.value, sign.limit))
            self.standing[code] = 0
        return raised


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
