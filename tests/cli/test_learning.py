"""`bench learning` as a command: two words, what it leaves, and what it refuses before a process is started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nftctl.cli import learning
from nftctl.cli.console import Console
from nftctl.learning import crowd
from nftctl.learning.order import Order
from tests.learning.test_table import comparison

from .program import HEAVY, environment, nftctl, python, the_object
from .test_imports import modules

SMALL = ("rl.sample_steps=8", "data.rows_per_step=2", "rl.group_size=2", "eval.samples_per_prompt=1")


class HereAndNow:
    """A crowd whose runs are made in this process, one after another."""

    def __init__(self, jobs: int, logs: Path) -> None:
        assert (jobs, logs.is_dir()) == (2, True)

    def __enter__(self) -> HereAndNow:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def make(self, orders: Sequence[Order], finished: Callable[[Order, dict[str, Any]], None]) -> list[dict[str, Any]]:
        from nftctl.learning.race import run

        results = []
        for order in orders:
            # There and back, as a process would bring it.
            results.append(json.loads(json.dumps(run(Order.of(json.loads(json.dumps(asdict(order)))), lambda _: None))))
            finished(order, results[-1])
        return results


def test_a_small_comparison_leaves_tables_and_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(crowd, "Crowd", HereAndNow)
    wishes = learning.Wishes(1, 1, 0.01, 8, 2, "nft,control,guidance", Path("out"))
    learning.learning(Console(json=True), "tiny_t2i_cpu", SMALL, wishes)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert list(document)[-2:] == ["learning", "output"]
    assert (document["command"], document["ok"], document["output"]) == ("bench", True, "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "learning.json", "learning.md", "samples.png", "samples.svg", "seconds.png", "seconds.svg",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    found = json.loads((tmp_path / "out/learning.json").read_text())
    assert found == document["learning"]
    assert [(run["method"], run["seed"]) for run in found["runs"]] == [("nft", 0), ("control", 0), ("guidance", 0)]
    last, at = found["runs"][0]["curve"][-1], found["summary"]["methods"]["nft"]["at"]["samples"]
    assert (last["samples"], at["reward"]["mean"]) == (8, last["reward"])
    ET.parse(tmp_path / "out/samples.svg")
    assert Image.open(tmp_path / "out/seconds.png").size[0] > 500
    assert "| DiffusionNFT |" in (tmp_path / "out/learning.md").read_text()
    assert "[test 3/3] guidance seed 0" in printed.err
    assert "figures, tables and curves: out" in printed.err


def test_whoever_stops_it_is_told_that_nothing_was_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nftctl", "bench", "learning", "--profile", "tiny_t2i_cpu"]
    command += ["--seeds", "1", "--trials", "1", "--jobs", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), text=True, stderr=subprocess.PIPE)
    assert process.stderr
    while "tuning: " not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "come at the end of a comparison, so nothing was saved" in said
    assert "stays valid" not in said
    assert list(tmp_path.iterdir()) == []


def test_tables_go_to_stdout_and_talk_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    learning._print(Console(), comparison())
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "Equal wall-clock: 10 s of training"
    assert lines[1].split("  ")[0] == "method"
    assert lines[-1] == "So it was measured."
    assert printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--methods", "nft,ppo"), 2, "no method 'ppo'"),
        (("--methods", ""), 2, '--methods "" has no name in a place where one belongs'),
        (("--methods", "nft,"), 2, "a list, as nft,flow-grpo, of nft, flow-grpo, best-of-group, guidance, control;"),
        (("--methods", "nft,nft"), 2, "the method 'nft' is named twice"),
        (("--methods", "control"), 2, "control takes the settings of nft"),
        (("--trials", "13"), 2, "--trials"),
        (("--output", "taken"), 2, "taken is there already and is not empty"),
        (("--profile", "nothing"), 3, "no bundled profile and no file named"),
        (("--set", "rl.sample_steps=4"), 3, "more, and here are fewer"),
        (("--set", 'eval.prompt_file=""'), 3, "no held-out prompts to test with"),
        (("tiny_t2i_cpu",), 2, "tiny_t2i_cpu"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    answer = nftctl("bench", "learning", *arguments, "--json", cwd=tmp_path)
    assert answer.returncode == code, answer.stderr
    assert message in answer.stderr
    assert the_object(answer)["command"] == "bench"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_word_belongs_right_behind_bench(tmp_path: Path) -> None:
    answer = nftctl("bench", "--quiet", "learning", cwd=tmp_path)
    assert answer.returncode == 2
    assert "has to stand right behind `bench`" in answer.stderr
    assert "a profile of that name is ./learning" in answer.stderr


def test_a_profile_that_is_given_without_its_option_is_told_where_it_goes(tmp_path: Path) -> None:
    answer = nftctl("bench", "learning", "tiny_t2i_cpu", cwd=tmp_path)
    assert answer.returncode == 2
    assert "help: a profile is named by an option here: nftctl bench learning --profile PROFILE" in answer.stderr
    assert "--profile PROFILE" not in nftctl("watch", "a", "b", cwd=tmp_path).stderr


def test_bench_itself_still_takes_a_profile(tmp_path: Path) -> None:
    answer = nftctl("bench", "nothing.toml", cwd=tmp_path)
    assert answer.returncode == 3
    assert "nothing.toml" in answer.stderr
    assert "nftctl bench learning --help" in nftctl("bench", "--help", cwd=tmp_path).stdout


def test_a_refusal_loads_no_model(tmp_path: Path) -> None:
    for arguments in (("--methods", "ppo"), ("--set", 'model.train="full"'), ("--set", "rl.bata=1")):
        code, found = modules(tmp_path, "bench", "learning", *arguments)
        assert code in (2, 3)
        assert not found & {*HEAVY, "rich"}


@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        ("nftctl be", "bench", "bench learning"),
        ("nftctl bench le", "learning", ""),
        ("nftctl bench tin", "tiny_t2i_cpu", ""),
        ("nftctl bench learning --tri", "--trials", "--warm"),
        ("nftctl bench --wa", "--warm", "--trials"),
        ("nftctl bench learning --profile tin", "tiny_t2i_cpu", ""),
    ],
)
def test_completion_offers_one_word_at_a_time(tmp_path: Path, words: str, offered: str, not_offered: str) -> None:
    env = {
        "_NFTCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
    }  # fmt: skip
    answer = python(
        "import sys; sys.argv = ['nftctl']; from nftctl.cli.main import main; main()", cwd=tmp_path, env=env
    )
    lines = answer.stdout.split("\n")
    assert offered in lines, answer
    assert not not_offered or not_offered not in lines
