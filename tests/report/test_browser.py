"""The page in a real browser: keys, pointer, slider, theme, small screens; without an error and without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nftctl.report.write import write_report

from .folders import full_run, make_run
from .html_page import Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is on the path")

TOOLS = """
const found = {};
const area = (i) => document.querySelectorAll("[data-chart] .area")[i];
const legend = (i) => document.querySelectorAll("[data-chart]")[i].querySelector(".legend");
const values = (i) => [...legend(i).querySelectorAll(".value")].map((b) => b.textContent);
const at = (i) => legend(i).querySelector(".at").textContent;
const press = (target, key) =>
  target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const shown = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.offsetParent !== null);
addEventListener("securitypolicyviolation", (event) => { found.violation = event.violatedDirective; });
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
const end = () => {
  found.errors = errors;
  found.resources = performance.getEntriesByType("resource").map((entry) => entry.name.slice(0, 30));
  const out = document.createElement("pre");
  out.id = "found-by-test";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
};
"""

Drive = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A page of one run, and one of two."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = full_run(folder, "one"), make_run(folder, "two", steps=20, sets=["optimizer.lr=0.002"])
    written = {"one": write_report(one), "two": write_report(one, [two], folder / "two.html")}
    return {name: report.path.read_text(encoding="utf-8") for name, report in written.items()}


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    """Open a page, run a script behind its own, and return what the script found."""

    def run(source: str, script: str, *, width: int = 1280, theme: str = "light") -> dict[str, Any]:
        # Errors are listened for before the page's own script runs.
        begin, rest = source.split("<body>", 1)
        copy = f"{begin}<body><script>{TOOLS}</script>{rest}".replace(
            "</body>",
            f"<script>\n(async () => {{ {script} }})().catch((e) => errors.push(String(e))).then(end);</script></body>",
        )
        (tmp_path / "page.html").write_text(copy, encoding="utf-8")
        command = [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            f"--user-data-dir={tmp_path / 'browser'}", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--window-size={width},900", "--virtual-time-budget=4000", "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}",
            "--dump-dom", (tmp_path / "page.html").as_uri(),
        ]  # fmt: skip
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        match = re.search(r'<pre id="found-by-test">(.*?)</pre>', answer.stdout, re.DOTALL)
        assert match, answer.stderr[-2000:]
        found: dict[str, Any] = json.loads(
            match.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        )
        assert found["errors"] == []
        assert "violation" not in found
        assert all(name.startswith("data:") for name in found["resources"])
        assert "CONSOLE" not in answer.stderr
        return found

    return run


def test_arrow_keys_move_one_cursor_through_all_charts(pages: dict[str, str], drive: Drive) -> None:
    found = drive(
        pages["one"],
        """
        found.rest = [at(0), ...values(0)];
        area(0).focus();
        found.focused = document.activeElement === area(0);
        for (const key of ["Home", "ArrowRight", "ArrowRight"]) press(area(0), key);
        found.moved = [at(0), ...values(0)];
        found.other = at(1);
        found.live = document.getElementById("live").textContent;
        found.aria = ["valuenow", "valuetext"].map((name) => area(0).getAttribute(`aria-${name}`));
        found.cursor = area(0).querySelector(".cursor").style.left;
        press(area(0), "End");
        found.end = at(0);
        press(area(0), "PageDown");
        found.page = at(0);
        press(area(0), "Escape");
        found.after = [at(0), ...values(0)];
        found.hidden = area(0).querySelector(".cursor").hidden;
        """,
    )
    page = Page(pages["one"])
    raw, smooth, held_out = page.data["charts"][0]["lines"]
    assert found["focused"] is True
    assert (raw["x"][:2], held_out["x"]) == ([1, 2], [0, 20, 40])
    assert found["moved"] == ["2", f"{raw['y'][1]:.4g}", f"{smooth['y'][1]:.4g}", "–"]  # not looked at in step 2
    assert found["other"] != found["rest"][0]
    assert found["live"].startswith(f"Step 2: each step {raw['y'][1]:.4g}, mean of 10 steps")
    assert found["aria"] == ["2", "step 2"]
    assert found["cursor"] == "5%"
    assert (found["end"], found["page"]) == ("40", "36")
    assert found["after"] == found["rest"] == ["40", *found["rest"][1:]]
    assert found["hidden"] is True


def test_the_pointer_takes_the_nearest_step(pages: dict[str, str], drive: Drive) -> None:
    found = drive(
        pages["one"],
        """
        const box = area(0).getBoundingClientRect();
        const point = (share) => area(0).dispatchEvent(new PointerEvent("pointermove", {
          clientX: box.left + share * box.width, clientY: box.top + 5, pointerType: "mouse", bubbles: true}));
        point(0.5);
        found.middle = [at(0), ...values(0)];
        point(0.51);
        found.near = at(0);
        point(1);
        found.right = at(0);
        area(0).dispatchEvent(new PointerEvent("pointerleave", {pointerType: "mouse"}));
        found.hidden = area(0).querySelector(".cursor").hidden;
        """,
    )
    held_out = Page(pages["one"]).data["charts"][0]["lines"][2]
    assert found["middle"][0] == "20"
    assert found["middle"][3] == f"{held_out['y'][1]:.4g}" == "0.7"
    assert (found["near"], found["right"], found["hidden"]) == ("20", "40", True)


def test_the_slider_shows_one_grid_beside_the_first(pages: dict[str, str], drive: Drive) -> None:
    found = drive(
        pages["one"],
        """
        const slider = document.getElementById("grid");
        const seen = () => shown("#grids .grid").map((figure) => figure.querySelector("figcaption").textContent);
        found.first = [document.getElementById("grid-step").textContent, ...seen()];
        slider.value = 1;
        slider.dispatchEvent(new Event("input"));
        found.second = [document.getElementById("grid-step").textContent, ...seen()];
        found.text = slider.getAttribute("aria-valuetext");
        found.label = slider.labels[0].textContent.trim();
        await Promise.all([...document.images].map((image) => image.decode()));
        await new Promise((done) => setTimeout(done, 200));
        const canvases = [...document.querySelectorAll("#strips canvas")];
        found.names = canvases.map((canvas) => canvas.getAttribute("aria-label"));
        found.pixels = canvases.map((canvas) => [...canvas.getContext("2d").getImageData(8, 8, 1, 1).data].slice(0, 3));
        """,
    )
    assert found["first"] == ["40", "Before training", "After step 40"]
    assert found["second"] == ["20", "Before training", "After step 20"]
    assert (found["text"], found["label"]) == ("step 20", "Samples after step 20")
    assert found["names"] == [
        f"{prompt}, policy at step {step}" for prompt in ("a red zero", "a blue one") for step in (0, 20, 40)
    ]
    # Each cell of a grid has one colour: 40 times its row, 80 times its column, five times its step.
    assert found["pixels"] == [[40 * row, 160, 5 * step] for row in (0, 1) for step in (0, 20, 40)]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_the_systems_until_the_button_is_pressed(pages: dict[str, str], drive: Drive, theme: str) -> None:
    found = drive(
        pages["one"],
        """
        const button = document.getElementById("theme");
        const ground = () => getComputedStyle(document.body).backgroundColor;
        found.before = [button.getAttribute("aria-pressed"), ground()];
        button.click();
        found.once = [button.getAttribute("aria-pressed"), ground()];
        button.click();
        found.twice = [button.getAttribute("aria-pressed"), ground()];
        found.kept = [localStorage.length, sessionStorage.length, document.cookie];
        """,
        theme=theme,
    )
    light, dark = ["false", "rgb(251, 250, 247)"], ["true", "rgb(20, 23, 27)"]
    first, second = (dark, light) if theme == "dark" else (light, dark)
    assert (found["before"], found["once"], found["twice"]) == (first, second, first)
    assert found["kept"] == [0, 0, ""]


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(pages: dict[str, str], drive: Drive, name: str, width: int) -> None:
    # In a frame, since windows have a least width of their own.
    frame = f'<iframe id="f" style="width:{width}px;height:900px;border:0"></iframe>'
    outer = f'<!doctype html><html lang="en"><head><title>t</title></head><body>{frame}</body></html>'
    inner = json.dumps(pages[name]).replace("<", "\\u003c")
    found = drive(
        outer,
        f"""
        const frame = document.getElementById("f");
        await new Promise((done) => {{ frame.onload = done; frame.srcdoc = {inner}; }});
        const page = frame.contentDocument;
        for (const details of page.querySelectorAll("details")) details.open = true;
        found.width = frame.contentWindow.innerWidth;
        const root = page.documentElement;
        [found.client, found.scroll] = [root.clientWidth, root.scrollWidth];
        const beyond = (one) => !one.closest(".scroll, .strip ol, .unseen, .skip, svg")
          && one.getBoundingClientRect().right > root.clientWidth + 1;
        found.beyond = [...page.body.querySelectorAll("*")].filter(beyond).map((one) => one.outerHTML.slice(0, 80));
        found.charts = page.querySelectorAll("[data-chart]").length;
        """,
    )
    assert found["width"] == width
    assert width - 20 < found["client"] <= width  # less a scroll bar
    assert found["scroll"] == found["client"]
    assert found["beyond"] == []
    assert found["charts"] >= 5


def test_without_its_script_the_page_shows_everything(pages: dict[str, str], drive: Drive) -> None:
    begin, _, rest = pages["one"].rpartition("<script>\n")
    found = drive(
        begin + rest.partition("</script>")[2],
        """
        found.grids = shown("#grids .grid").length;
        found.buttons = shown("button").length;
        const lines = [...document.querySelectorAll("[data-chart] .area path.line")];
        found.lines = lines.filter((path) => path.getTotalLength() > 0).length;
        """,
    )
    assert found["grids"] == 3
    assert found["buttons"] == 0
    assert found["lines"] > 5


def test_focus_is_visible_and_the_first_stop_skips_to_the_report(pages: dict[str, str], drive: Drive) -> None:
    found = drive(
        pages["one"],
        """
        const stops = [...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")];
        found.first = stops[0].textContent;
        stops[0].focus({focusVisible: true});
        found.shown = stops[0].getBoundingClientRect().top >= 0;
        area(0).focus({focusVisible: true});
        found.outline = getComputedStyle(area(0)).outlineStyle + getComputedStyle(area(0)).outlineWidth;
        found.unnamed = stops.filter((s) => !(s.textContent.trim() || s.labels?.length || s.getAttribute("aria-label")
          || s.getAttribute("aria-labelledby"))).length;
        """,
    )
    assert found["first"] == "Skip to the report"
    assert found["shown"] is True
    assert found["outline"] == "solid3px"
    assert found["unnamed"] == 0
