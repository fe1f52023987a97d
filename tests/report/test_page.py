"""The page as a whole: well formed, closed to the network, safe against what runs hold, readable in both themes."""

from __future__ import annotations

import json
import os
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.report.facts import read_run
from nftctl.report.write import write_report
from nftctl.run.directory import RunDirectory
from tests.run.make import write_checkpoint

from .folders import alarm, draw_grid, full_run, make_run, write_rows
from .html_page import Page

NASTY = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=2'>\u2028\"&amp;<!--"


def page_of(run: RunDirectory, *others: RunDirectory) -> Page:
    return Page(write_report(run, others).path.read_text(encoding="utf-8"))


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return page_of(full_run(tmp_path))


def test_everything_is_there_under_ordered_headings(page: Page) -> None:
    titles = [text for tag, text in page.texts if tag == "h2"]
    assert titles == [
        "Alarms", "Reward", "Spread of single rewards", "Samples", "Training", "Time", "Profile",
        "Identity and environment",
    ]  # fmt: skip
    levels = page.headings
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(page.all(landmark)) == 1
    assert "It learned: the held-out reward went from 0.500 to 0.900" in page.visible


def test_every_reference_leads_somewhere(page: Page) -> None:
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            if attributes.get(name):
                assert attributes[name] in page.ids
    links = [a["href"] for a in page.all("a")]
    assert len(links) == 9  # eight sections, and the one that skips to them
    assert all(link and link[0] == "#" and link[1:] in page.ids for link in links)
    assert {chart["name"] for chart in page.data["charts"]} == {
        a["data-chart"] for a in page.all("figure") if "data-chart" in a
    }


def test_every_drawing_is_xml(page: Page) -> None:
    assert len(page.svgs()) > 10
    for source in page.svgs():
        ElementTree.fromstring(source)


def test_pictures_are_in_the_page_and_described(page: Page) -> None:
    pictures = page.all("img")
    assert len(pictures) == 4
    assert all(str(p["src"]).startswith("data:image/png;base64,") and p["alt"] for p in pictures)
    assert pictures[0]["alt"] == "Samples at step 0. Rows: a red zero; a blue one. Columns: base, old, policy."
    (slider,) = page.all("input")
    assert (slider["type"], slider["min"], slider["max"]) == ("range", "0", "2")
    assert [grid["step"] for grid in page.data["grids"]] == [0, 20, 40]


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert not page.all("link")
    assert not page.all("iframe")
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            assert str(attributes.get(name, "#")).startswith(("#", "data:image/png")), attributes
    outside = set(re.findall(r"\bhttps?://[^\s\"'<)]+", page.source)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert "url(" not in page.source
    assert "@import" not in page.source


def test_what_a_run_holds_cannot_get_out_of_its_place(tmp_path: Path) -> None:
    name = "<b>run\"'&"
    run = make_run(
        tmp_path, name, sets=[f"rl.negative_prompt={json.dumps(NASTY)}"], argv=["nftctl", NASTY],
        alarms=[alarm(3, NASTY, NASTY, NASTY)],
    )  # fmt: skip
    draw_grid(run, 0, prompts=[NASTY, "a"])
    draw_grid(run, 20, prompts=[NASTY, "a"])
    other = make_run(tmp_path, NASTY.replace("/", "_"))
    rows = [{"step": n, f"reward/{NASTY}": 0.1 * n, f"still/{NASTY}": 1.0} for n in range(1, 15)]
    run.metrics.unlink()
    write_rows(run.metrics, rows)
    page = page_of(run, other)
    assert len(page.all("script")) == 2
    assert not [a for _, a in page.elements if any(key.startswith("on") for key in a)]
    assert all(str(p["src"]).startswith("data:") for p in page.all("img"))
    assert page.data["grids"][0]["prompts"][0] == NASTY
    assert [text for tag, text in page.texts if tag == "h1"] == [name]
    assert NASTY in page.visible
    for source in page.svgs():
        ElementTree.fromstring(source)


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, steps=0, total=20, looks=()))
    assert "No step has been taken" in page.visible
    assert "0 of 20" in page.visible
    assert page.data == {"charts": [], "grids": []}
    assert [text for tag, text in page.texts if tag == "h2"] == ["Samples", "Profile", "Identity and environment"]


def test_one_step_is_enough_for_a_page(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, steps=1, total=20))
    assert "Too short to say: 1 step of" in page.visible
    assert "1 of 20" in page.visible


def test_a_last_line_cut_off_is_passed_over_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=20)
    with run.metrics.open("ab") as stream:
        stream.write(b'{"step": 21, "train/reward_mean": 0.')
    with (run.path / "evaluations.jsonl").open("ab") as stream:
        stream.write(b'{"step": 20, "eval/reward": 0.8, "eval/samples": 144}\n')
    facts = read_run(run)
    assert facts.step == 20
    assert [row["step"] for row in facts.evaluations] == [0, 20]
    assert facts.evaluations[-1]["eval/reward"] == 0.8  # a step's later row is the one that counts
    assert "It learned" in page_of(run).visible
    with (run.path / "evaluations.jsonl").open("ab") as stream:
        stream.write(b'{"no": "step"}\n')
    with pytest.raises(CheckpointUnusable, match=r"evaluations\.jsonl:4: this line is no row"):
        write_report(run)


def test_a_running_run_is_said_to_be_running(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=20, total=50)
    with run.lock():
        assert "running, after step 20 of 50" in page_of(run).visible
    assert "running" not in page_of(run).visible.partition("Reward")[0]


def test_a_resumed_run_counts_its_attempts_and_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.new_attempt()
    write_checkpoint(run.checkpoints, 10)
    write_checkpoint(run.checkpoints, 20, done=False)
    page = page_of(run)
    assert "2 (resumed)" in page.visible
    cells = [text for tag, text in page.texts if tag in ("td", "code")]
    size = sum(path.stat().st_size for path in (run.checkpoints / "step_000010").rglob("*") if path.is_file())
    assert cells[cells.index("step_000010") :][:3] == ["step_000010", f"{size / 1000:.0f} kB", "complete"]
    assert cells[cells.index("step_000020.partial") + 2] == "cut off"


def test_a_run_that_went_on_by_itself_says_how_often_and_why(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "restarts by itself" not in page_of(run).visible
    entries = [{"step": 0, "reason": "rank 1 died"}, {"step": 40, "reason": "node <b> is gone"}]
    run.run_json.write_text(json.dumps(run.read_record() | {"restarts": entries}))
    assert "2, the last from step 40: node <b> is gone" in page_of(run).visible


def test_compared_runs_share_their_charts_and_show_what_differs(tmp_path: Path) -> None:
    one = full_run(tmp_path, "one")
    two = make_run(tmp_path, "two", sets=["optimizer.lr=0.002"])
    page = page_of(one, two)
    assert {"comparison", "differences"} <= page.ids
    assert "one: held out" in page.visible
    assert "two: held out" in page.visible
    assert "optimizer.lr" in [text for tag, text in page.texts if tag == "code"]
    same = make_run(tmp_path / "elsewhere", "one")
    assert f"{same.path}: held out" in page_of(one, same).visible


def test_the_file_is_replaced_in_one_step_and_only_where_it_is_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = write_report(run)
    assert first.path == run.path / "report.html"
    assert first.bytes == first.path.stat().st_size
    write_report(run)
    assert not list(run.path.glob(".report*"))
    other = tmp_path / "notes.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(UsageRefused, match="is no report"):
        write_report(run, output=other)
    assert other.read_text() == "<p>mine</p>"
    with pytest.raises(UsageRefused, match="is a folder"):
        write_report(run, output=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", Path("/dev/null"), Path("-")):
        with pytest.raises(UsageRefused, match="is no file that could be replaced"):
            write_report(run, output=odd)
    with pytest.raises(UsageRefused, match="there is no folder"):
        write_report(run, output=tmp_path / "missing" / "r.html")
    with pytest.raises(UsageRefused, match="cannot be told apart"):
        write_report(run, [run] * 8)


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=5000)
    assert write_report(run).bytes < 1_500_000


# -- colours --------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Of an sRGB colour, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out(theme: int) -> None:
    style = files("nftctl.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    colours = {
        name: pair[theme]
        for name, *pair in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", style)
    }  # fmt: skip
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for name in ("ink", "soft", "link", "good", "warn", "bad"):
        for ground in ("page", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for slot in range(8):
        assert contrast(colours[f"c{slot}"], colours["card"]) >= 3
