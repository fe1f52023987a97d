"""The whole page: verdict, alarms, reward, samples, training, time, settings, record, in one file without a network.

Owns the order of sections and their headings, and the policy that lets the page load nothing. Style and script are
files beside this one, put into the page as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from nftctl import __version__
from nftctl.report import alarms, curves, gallery, histogram, plot, settings, stages
from nftctl.report.facts import RunFacts
from nftctl.report.figures import seconds
from nftctl.report.markup import Markup, script_data, table, tag
from nftctl.report.samples import Album
from nftctl.report.verdict import Change, Verdict

GENERATOR = "nftctl report"

BADGES = {
    "no-steps": "no steps",
    "too-short": "too short to say",
    "learned": "learned",
    "leaning": "probably learned",
    "unclear": "not shown to have learned",
    "fell": "got worse",
    "suspect": "look closer",
    "training-only": "training reward only",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A run with what was made of it; the first is the page's own, others are compared with it."""

    name: str
    facts: RunFacts
    verdict: Verdict
    times: stages.Times | None


def render(subjects: Sequence[Subject], album: Album) -> str:
    """The page's text."""
    own = subjects[0]
    found = curves.curves_of([s.facts for s in subjects], [s.name for s in subjects])
    sections = [(name, title, body) for name, title, body in _sections(subjects, album, found) if body]
    data = {"charts": [curves.document(chart) for chart in found.charts], "grids": gallery.document(album)}
    return Template(_asset("page.html")).substitute(
        generator=f"{GENERATOR} {__version__}",
        title=tag("title", f"{own.name}: nftctl report"),
        style=Markup(_asset("report.css")),
        script=Markup(_asset("report.js")),
        header=_header(own),
        contents=tag("ul", *(tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in sections)),
        sections=Markup.join_all(
            tag("section", tag("h2", title, id=f"{name}-title"), body, id=name, aria_labelledby=f"{name}-title")
            for name, title, body in sections
        ),
        data=script_data("data", data),
        footer=f"Written by nftctl {__version__}. This file loads nothing and sends nothing.",
    )


def _sections(subjects: Sequence[Subject], album: Album, found: curves.Curves) -> list[tuple[str, str, Markup | None]]:
    """Anchor, heading, and content; None where the run has nothing for it."""
    own, several = subjects[0], len(subjects) > 1
    facts = [subject.facts for subject in subjects]
    names = [subject.name for subject in subjects]
    times = [(subject.name, subject.times) for subject in subjects if subject.times]
    spread = histogram.histogram_of(own.facts.scores)
    timed = Markup.join_all([stages.section(times), _charts(found, "time") or ""]) if times else None
    return [
        ("comparison", "Comparison", _comparison(subjects) if several else None),
        ("alarms", "Alarms", alarms.section(own.facts.alarms) if own.facts.alarms else None),
        ("reward", "Reward", _charts(found, "reward")),
        ("spread", "Spread of single rewards", histogram.section(spread) if spread else None),
        ("samples", "Samples", gallery.section(album)),
        ("training", "Training", _training(found)),
        ("time", "Time", timed),
        ("profile", "Profile", settings.profile_section(own.facts)),
        ("differences", "Differences of the profiles", settings.comparison(facts, names) if several else None),
        ("record", "Identity and environment", settings.record_section(own.facts)),
    ]


def _charts(found: curves.Curves, section: str) -> Markup | None:
    chosen = [chart for chart in found.charts if chart.section == section]
    if not chosen:
        return None
    tall = {found.charts[0].name} if section == "reward" else set()
    return tag("div", *(plot.figure(chart, tall=chart.name in tall) for chart in chosen), class_="charts")


def _training(found: curves.Curves) -> Markup | None:
    parts = [_charts(found, "training") or Markup("")]
    for heading, between, figures in (
        ("Never moved", " ", found.constant),
        ("The same throughout as another", " = ", found.repeated),
    ):
        entries = [tag("li", tag("code", key), between, tag("b", value)) for key, value in figures.items()]
        parts += [tag("h3", heading), tag("ul", *entries, class_="still")] if entries else []
    return Markup.join_all(parts) if any(parts) else None


def _header(own: Subject) -> Markup:
    facts, verdict = own.facts, own.verdict
    badge = tag("span", BADGES[verdict.kind], class_=f"badge {verdict.kind}")
    figures = tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in _figures(own)))
    reasons = tag("ul", *(tag("li", text) for text in verdict.reasons), class_="reasons") if verdict.reasons else ""
    profile = facts.record.get("profile") or facts.value("rl.profile") or ""
    line = tag("p", "Training run", f" of profile {profile}" if profile else "", f", {facts.standing}", class_="above")
    card = tag("div", badge, tag("p", verdict.headline, class_="headline"), reasons, class_="verdict")
    return Markup.join_all([line, tag("h1", facts.name), card, figures])


def _figures(own: Subject) -> list[tuple[str, str]]:
    facts = own.facts
    done = f"{facts.step} of {facts.total}" if facts.total is not None else f"{facts.step}"
    rows = [("state", facts.ending.state), ("steps", done)]
    for name, change in (("held-out reward", own.verdict.held_out), ("training reward", own.verdict.training)):
        if change:
            rows.append((name, _arrow(change)))
    if own.times:
        rows += [("median step", seconds(own.times.step)), ("training time", seconds(own.times.total))]
    return [*rows, ("alarms", str(len(facts.alarms)))]


def _arrow(change: Change) -> str:
    return f"{change.before:.3f} → {change.after:.3f}"


def _comparison(subjects: Sequence[Subject]) -> Markup:
    head = ("run", "verdict", "steps", "held-out reward", "training reward", "median step", "alarms")
    rows = [
        (
            subject.name,
            BADGES[subject.verdict.kind],
            subject.facts.step,
            _arrow(subject.verdict.held_out) if subject.verdict.held_out else "",
            _arrow(subject.verdict.training) if subject.verdict.training else "",
            seconds(subject.times.step) if subject.times else "",
            len(subject.facts.alarms),
        )
        for subject in subjects
    ]
    said = "Held-out rewards can be compared where the held-out prompts, their noise and the scorer are the same."
    return Markup.join_all([table(head, rows, caption="The runs side by side"), tag("p", said, class_="note")])


def _asset(name: str) -> str:
    return files("nftctl.report").joinpath("assets", name).read_text(encoding="utf-8")
