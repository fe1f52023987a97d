"""`nftctl report` through the installed command, and the report that a launch leaves behind."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nftctl.cli.console import Console
from nftctl.cli.job import closing_words
from nftctl.cli.report import left_behind
from tests.report.folders import draw_grid, full_run, make_run
from tests.report.html_page import Page
from tests.run.make import snapshot

from .program import HEAVY, nftctl, python, the_object


def test_a_run_by_name_becomes_a_page_whose_path_is_on_stdout(tmp_path: Path) -> None:
    full_run(tmp_path / "runs", "first")
    answer = nftctl("report", "first", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "runs/first/report.html\n"), answer.stderr
    assert "It learned: the held-out reward went from 0.500 to 0.900" in answer.stderr
    page = Page((tmp_path / "runs/first/report.html").read_text(encoding="utf-8"))
    assert "It learned" in page.visible


def test_json_has_the_facts_and_the_verdict(tmp_path: Path) -> None:
    full_run(tmp_path / "runs", "first")
    make_run(tmp_path / "elsewhere", "second", steps=5, total=50)
    answer = nftctl("report", "first", "--compare", "elsewhere/second", "--output", "two.html", "--json", cwd=tmp_path)
    document = the_object(answer)
    assert list(document) == [
        "schema_version", "command", "ok", "exit_code", "diagnostics", "report", "run", "compared", "samples",
    ]  # fmt: skip
    assert document["report"] == {"path": "two.html", "bytes": (tmp_path / "two.html").stat().st_size}
    run, (second,) = document["run"], document["compared"]
    keys = [
        "name",
        "path",
        "run_id",
        "profile",
        "state",
        "steps",
        "attempts",
        "checkpoints",
        "verdict",
        "times",
        "alarms",
    ]
    assert list(run) == list(second) == keys
    assert run["verdict"]["kind"] == "learned"
    assert run["verdict"]["held_out"]["difference"] == pytest.approx(0.4)
    assert second["verdict"]["kind"] == "too-short"
    assert (run["steps"], second["steps"]) == ({"done": 40, "total": 40}, {"done": 5, "total": 50})
    assert run["alarms"][0]["count"] == 2
    assert run["times"]["step_seconds"] == 1.0
    assert document["samples"] == {"embedded": [0, 20, 40], "left_out": []}


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "first")
    draw_grid(run, 20).write_bytes(b"no picture")
    answer = nftctl("report", "first", cwd=tmp_path)
    assert answer.returncode == 0
    assert "left out: step_000020.png is no whole PNG file" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("fist",), 5, "no run folder and no run named fist"),
        (("first", "--compare", "nowhere"), 5, "no run folder and no run named nowhere"),
        (("~nobody-here/x",), 5, "no run folder and no run named ~nobody-here/x"),
        (("x" * 300,), 5, "no run folder and no run named xxx"),
        (("first", "--output", "x" * 300), 5, "choose a shorter name"),
        (("bare",), 5, "is not a run folder"),
        (("runs/first/run.json",), 5, "is a file, not a run folder"),
        (("",), 2, "the name of the run is empty"),
        (("first", "--compare", " "), 2, "the name of the run is empty"),
        (("first", "--output", "notes.html"), 2, "is there already and is no report"),
        (("first", "--output", "missing/r.html"), 2, "there is no folder missing"),
        ((), 2, "RUN"),
    ],
    ids=str,
)
def test_refusals_say_why_and_write_nothing(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    make_run(tmp_path / "runs", "first")
    (tmp_path / "runs" / "bare").mkdir()
    (tmp_path / "notes.html").write_text("mine")
    before = snapshot(tmp_path)
    answer = nftctl("report", *arguments, "--json", cwd=tmp_path)
    assert answer.returncode == code, answer.stderr
    assert said in answer.stderr
    assert the_object(answer)["error"]["message"]
    assert snapshot(tmp_path) == before


def test_a_near_name_is_offered(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "first")
    assert "did you mean first?" in nftctl("report", "frist", cwd=tmp_path).stderr


@pytest.mark.parametrize("name", ["run.json", "profile.resolved.json"])
def test_a_damaged_run_is_refused(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "runs", "first")
    (run.path / name).write_text("{")
    answer = nftctl("report", "first", cwd=tmp_path)
    assert answer.returncode == 5
    assert f"{name} is not JSON" in answer.stderr
    assert not (run.path / "report.html").exists()


def test_it_imports_little(tmp_path: Path) -> None:
    full_run(tmp_path / "runs", "first")
    code = (
        "import sys; sys.argv = ['nftctl', 'report', 'first']\n"
        "from nftctl.cli.main import main\n"
        "assert main() == 0\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    answer = python(code, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    loaded = set(answer.stdout.splitlines()[-1].split())
    assert {"nftctl", "orjson"} <= loaded
    assert not loaded & {*HEAVY, "aiohttp", "rich", "filelock", "numpy", "tree_sitter", "asyncio", "PIL", "tensorboard"}


def test_the_report_that_a_run_leaves_is_never_what_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "first")
    assert left_behind(Console(), run.path) == str(run.path / "report.html")
    assert capsys.readouterr().err == ""
    run.run_json.write_text("{")
    assert left_behind(Console(), run.path) is None
    said = capsys.readouterr().err
    assert "no report was written" in said
    assert len(said.splitlines()) == 1
    assert left_behind(Console(), tmp_path / "nowhere") is None


def test_closing_words_name_the_report() -> None:
    summary: dict[str, Any] = {
        "run": "runs/x", "steps": {"from": 0, "to": 2, "total": 2}, "report": "runs/x/report.html",
    }  # fmt: skip
    assert "report      runs/x/report.html" in closing_words(summary)
    assert not any(line.startswith("report") for line in closing_words(summary | {"report": None}))
    # Commands are there to be typed.
    assert "            nftctl inspect-checkpoint 'my runs/x'" in closing_words(summary | {"run": "my runs/x"})


def test_the_wheel_takes_the_page_along() -> None:
    """Everything below the package goes into the wheel but what git ignores."""
    import nftctl.report

    folder = Path(str(nftctl.report.__file__)).parent / "assets"
    assert sorted(path.name for path in folder.iterdir()) == ["page.html", "report.css", "report.js"]
    ignored = subprocess.run(
        ["git", "check-ignore", *sorted(map(str, folder.iterdir()))],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ignored.stdout == ""


@pytest.mark.ray
def test_a_launch_ends_by_naming_its_report(finished: Any, tmp_path: Path) -> None:
    assert "report           runs/first/report.html" in finished.err
    assert finished.document["summary"]["report"] == "runs/first/report.html"
    page = Page((finished.run / "report.html").read_text(encoding="utf-8"))
    assert "Too short to say: 8 steps" in page.visible
    assert "finished after step 8 of 8" in page.visible
    assert len(page.all("img")) >= 2
    # Every step, its running mean, and the two evaluations.
    steps = list(range(1, 9))
    assert [line["x"] for line in page.data["charts"][0]["lines"]] == [steps, steps, [0, 8]]
    again = nftctl("report", str(finished.run), "--output", "again.html", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
