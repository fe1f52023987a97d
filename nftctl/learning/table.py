"""The tables of a comparison as rows of text, for a terminal and as Markdown.

Owns words and digits, and no number: those are the summary's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nftctl.learning.order import GUIDANCE
from nftctl.learning.summary import AXES
from nftctl.learning.trials import CONTROL

TITLES = {
    "nft": "DiffusionNFT",
    "flow-grpo": "Flow-GRPO",
    "best-of-group": "best-of-group SFT",
    CONTROL: "control: DiffusionNFT, advantages permuted",
}
NOTES = (
    "All are looked at with the deterministic sampler, Flow-GRPO too, which trains on its stochastic one. What no "
    "trial varies is the profile's own, whose author looked at DiffusionNFT. The KL-distance is the mean squared "
    "difference of the sampling velocity to the base's on own samples."
)
NONE = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below a head; the first column is text, the others are figures."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """The table as Markdown, its title in bold above."""
        line = ["---", *["---:"] * (len(self.head) - 1)]
        rows = "\n".join("| " + " | ".join(row) + " |" for row in (self.head, line, *self.rows))
        return f"**{self.title}**\n\n{rows}\n"


def tables(document: Mapping[str, Any]) -> list[Table]:
    """Equal seconds, equal samples, guidance, costs, and what was tried."""
    shown = [_equal(document, axis) for axis in AXES if document["summary"]["methods"]]
    if document["summary"]["guidance"]:
        shown.append(_guidance(document))
    if document["summary"]["methods"]:
        shown += [_costs(document), _trials(document)]
    return shown


def markdown(document: Mapping[str, Any]) -> str:
    """All tables, and how they were measured."""
    plan = document["plan"]
    prompts = {split: len(texts) for split, texts in plan["prompts"].items()}
    head = (
        f"`{document['profile']}`: mean (lowest to highest) over {len(plan['seeds'])} seeds, "
        f"{plan['trials']} trials for each method on {prompts['tuning']} tuning prompts, test on {prompts['test']} "
        f"others, neither of them among the {prompts['train']} that are trained on. {document['measured']} {NOTES}\n"
    )
    return "\n".join([head, *(table.markdown() for table in tables(document))])


def title(method: str) -> str:
    """A method's name in tables."""
    return TITLES.get(method, method)


def budget_words(axis: str, plan: Mapping[str, Any]) -> str:
    """`60 s of training` or `6,400 samples`."""
    return f"{plan['seconds']:g} s of training" if axis == "seconds" else f"{plan['samples']:,} samples"


def _equal(document: Mapping[str, Any], axis: str) -> Table:
    """Every method where it had used up one budget; plain guidance, which uses none, below."""
    summary, plan = document["summary"], document["plan"]
    other = "samples" if axis == "seconds" else "seconds"
    head = ("method", "test reward", "judge", "diversity", "KL-distance", other, "steps")
    rows = [("base", *_figures(summary["base"]), "0", "0")]
    for name, method in summary["methods"].items():
        at = method["at"][axis]
        failed = f" ({method['failed']} of {method['runs']} failed)" if method["failed"] else ""
        rows.append((title(name) + failed, *_figures(at), amount(at[other]), amount(at["steps"])))
    rows += [(f"base, guidance {g}", *_figures(figures), "0", "0") for g, figures in _best_guidance(document)]
    return Table(f"Equal {'wall-clock' if axis == 'seconds' else 'samples'}: {budget_words(axis, plan)}", head, rows)


def _best_guidance(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    chosen = document["chosen"].get(GUIDANCE)
    found = document["summary"]["guidance"]
    return [(g, found[g]) for g in found if chosen and g == f"{chosen['settings']['guidance']:g}"]


def _guidance(document: Mapping[str, Any]) -> Table:
    """Plain guidance on the base; then each method's last policy under the guidance that is best for the base."""
    head = ("sampled with", "test reward", "judge", "diversity", "KL-distance", "forwards a sample", "ms a sample")
    summary = document["summary"]
    rows = [
        (f"base, guidance {g}", *_figures(f), amount(f["forwards"]), amount(f["sample_ms"]))
        for g, f in summary["guidance"].items()
    ]
    for name, method in summary["methods"].items():
        for under in method["guided"]:
            rows.append((f"{title(name)}, last policy, guidance {under['guidance']:g}", *_figures(under), NONE, NONE))
    return Table("Guidance: no training, or on top of it", head, rows)


def _costs(document: Mapping[str, Any]) -> Table:
    head = ("method", "s a step", "CPU s a step", "forwards a sample", "backwards a sample", "peak RSS, MB")
    names = ("step_seconds", "step_cpu_seconds", "forwards_per_sample", "backwards_per_sample", "rss_peak_mb")
    rows = [
        (title(name), *(amount(method["cost"][cost]) for cost in names))
        for name, method in document["summary"]["methods"].items()
    ]
    return Table(f"Cost: steps of {_samples(document)} samples on one thread", head, rows)


def _samples(document: Mapping[str, Any]) -> int:
    return int(document["plan"]["rows_per_step"] * document["plan"]["group_size"])


def _trials(document: Mapping[str, Any]) -> Table:
    """What was tried and what it gave on the tuning split, the chosen trial marked."""
    rows = []
    for trial in document["trials"]:
        chosen = document["chosen"].get(trial["method"], {})
        if trial["method"] == GUIDANCE:
            picked = chosen["settings"]["guidance"]
            for look in trial["guided"]:
                rows.append(
                    ("guidance", f"{look['guidance']:g}", _mark(f"{look['reward']:.3f}", look["guidance"] == picked))
                )
            continue
        merit = "failed" if trial["merit"] is None else f"{trial['merit']:.3f}"
        settings = ", ".join(f"{name} {value:g}" for name, value in trial["settings"].items())
        rows.append((title(trial["method"]), settings, _mark(merit, trial["number"] == chosen.get("trial"))))
    rows.sort(key=lambda row: [*TITLES.values(), GUIDANCE].index(row[0]))
    return Table("Trials, on the tuning prompts", ("method", "settings", "tuning reward"), rows)


def _mark(text: str, chosen: bool) -> str:
    return f"{text} (chosen)" if chosen else text


def _figures(figures: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return (
        share(figures["reward"]),
        share(figures["judge"]),
        share(figures["diversity"]),
        NONE if figures["kl_distance"] is None else f"{figures['kl_distance']['mean']:.3f}",
    )


def share(band: Mapping[str, float] | None) -> str:
    """`0.812 (0.790 to 0.835)`."""
    if band is None:
        return NONE
    low, high = f"{band['low']:.3f}", f"{band['high']:.3f}"
    return f"{band['mean']:.3f}" + ("" if low == high else f" ({low} to {high})")


def amount(band: Mapping[str, float] | None) -> str:
    """A mean of anything, in about three digits."""
    if band is None:
        return NONE
    mean = band["mean"]
    return f"{mean:,.0f}" if abs(mean) >= 100 else f"{mean:.3g}"
