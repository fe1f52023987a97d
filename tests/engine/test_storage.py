"""What nodes have to share: each way in which it is not. The nodes themselves are in test_nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nftctl.engine.storage import (
    MARK,
    SKEW_S,
    Input,
    hashes,
    leave,
    look,
    refuse_other_files,
    refuse_unseen,
    refuse_unwritable,
    skew,
)
from nftctl.errors import EnvironmentUnfit
from nftctl.run.hashing import hash_file


def test_a_mark_is_seen_by_everybody_who_has_the_folder(tmp_path: Path) -> None:
    marks = {name: leave(tmp_path, name)["text"] for name in ("driver", "0", "2")}
    assert len(set(marks.values())) == 3
    assert look(tmp_path, marks, 0)["missing"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{MARK}0", f"{MARK}2", f"{MARK}driver"]
    (tmp_path / f"{MARK}2").write_text("another node's folder of the same name")
    assert look(tmp_path, marks, 0)["missing"] == ["2"]
    (tmp_path / f"{MARK}0").unlink()
    assert look(tmp_path, marks, 0)["missing"] == ["0", "2"]


def test_a_folder_that_cannot_be_written_to_is_refused_by_place(tmp_path: Path) -> None:
    answer = leave(tmp_path / "not-there", "0")
    with pytest.raises(EnvironmentUnfit) as caught:
        refuse_unwritable(tmp_path, [("this machine", {"text": "x"}), ("node 10.0.0.2 (b)", answer)])
    assert caught.value.message == (
        f"node 10.0.0.2 (b): the run folder {tmp_path} is not shared: cannot write there: No such file or directory"
    )
    assert int(caught.value.exit_code) == 8


def test_a_folder_that_is_not_the_same_everywhere_is_refused(tmp_path: Path) -> None:
    places = {"driver": "this machine (a)", "2": "node 10.0.0.2 (b)"}
    refuse_unseen(tmp_path, places, {"driver": {"missing": []}, "2": {"missing": []}})
    with pytest.raises(EnvironmentUnfit, match=r"node 10\.0\.0\.2 \(b\) does not see what this machine \(a\) wrote to"):
        refuse_unseen(tmp_path, places, {"driver": {"missing": []}, "2": {"missing": ["driver"]}})


def test_other_files_are_refused_with_the_node_and_both_hashes(tmp_path: Path) -> None:
    prompts, base = tmp_path / "prompts.txt", tmp_path / "base"
    prompts.write_text("a red one\n")
    inputs = [Input("prompt file", "file", prompts, hash_file(prompts)), Input("base", "base", base, "aa")]
    found = hashes(inputs)
    assert found == [inputs[0].hash, f"not readable: {base} is not a folder"]
    refuse_other_files("10.0.0.2 (b)", inputs[:1], found[:1])
    with pytest.raises(EnvironmentUnfit) as caught:
        refuse_other_files("10.0.0.2 (b)", inputs, found)
    assert caught.value.message == (
        f"node 10.0.0.2 (b) reads another base at {base}: not readable: {base} is not a folder there, aa here"
    )
    prompts.write_text("a blue one\n")
    with pytest.raises(EnvironmentUnfit, match=f"another prompt file at {prompts}: {hash_file(prompts)} there"):
        refuse_other_files("10.0.0.2 (b)", inputs, hashes(inputs))


@pytest.mark.parametrize(
    ("told", "off"),
    [(100.0, 0.0), (98.0 - SKEW_S, -2.0 - SKEW_S), (101.0 + SKEW_S, 0.0), (131.0, 30.0), (100.0 - SKEW_S, 0.0)],
)
def test_a_clock_is_off_only_as_far_as_that_is_certain(told: float, off: float) -> None:
    assert skew(100.0, told, 101.0) == off
