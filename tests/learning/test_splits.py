"""Prompts of training, tuning and test have nothing in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from nftctl.errors import ProfileRefused
from nftctl.learning.splits import split_prompts
from nftctl.profile.artifacts import embedded_set
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.profile.prompts import read_prompts, resolve_prompt_file

SPLITS: tuple[Literal["train", "test"], ...] = ("train", "test")


def write(folder: Path, name: str, lines: list[str]) -> str:
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def test_the_digits_are_cut_into_forty_eight_and_twelve(profile: Any) -> None:
    splits = split_prompts(profile())
    assert [len(part) for part in (splits.train, splits.tuning, splits.test)] == [40, 8, 12]
    texts = [{p.text for p in part} for part in (splits.train, splits.tuning, splits.test)]
    assert len(set.union(*texts)) == 60
    assert splits.held_out("tuning") is splits.tuning
    assert splits.held_out("test") is splits.test
    # More than one colour and more than one number, or settings would be tuned to one of them.
    assert len({text.split()[1] for text in texts[1]}) >= 3
    assert len({text.split()[2] for text in texts[1]}) >= 3


def test_a_prompt_that_is_there_twice_is_on_one_side_alone(profile: Any, tmp_path: Path) -> None:
    train = write(tmp_path, "train.txt", [f"prompt {i % 6}" for i in range(18)])
    test = write(tmp_path, "test.txt", ["another"])
    splits = split_prompts(profile(f'data.prompt_file="{train}"', f'eval.prompt_file="{test}"'))
    tuned, trained = [p.text for p in splits.tuning], [p.text for p in splits.train]
    assert len(set(tuned)) == len(tuned)
    assert not set(tuned) & set(trained)
    assert len(trained) == 18 - 3 * len(tuned)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([f"p{i}" for i in range(12)], ["p3", "q"], "1 held-out prompts are trained on as well, 'p3' for one"),
        ([f"p{i}" for i in range(5)], ["q"], "5 prompts are too few: one of 6 is kept for tuning"),
    ],
)
def test_files_that_overlap_or_are_short_are_refused(
    profile: Any, tmp_path: Path, train: list[str], test: list[str], message: str
) -> None:
    sets = (
        f'data.prompt_file="{write(tmp_path, "train.txt", train)}"',
        f'eval.prompt_file="{write(tmp_path, "test.txt", test)}"',
    )
    with pytest.raises(ProfileRefused) as refused:
        split_prompts(profile(*sets))
    assert [f.message for f in refused.value.findings] == [message]


def test_without_held_out_prompts_there_is_nothing_to_test_with(profile: Any) -> None:
    with pytest.raises(ProfileRefused) as refused:
        split_prompts(profile('eval.prompt_file=""'))
    assert refused.value.findings[0].key == "eval.prompt_file"


def test_a_packaged_tuning_split_is_taken_as_it_is() -> None:
    scenes = load_profile(bundled_profiles()["scenes_t2i_cpu"], env={}).profile
    splits = split_prompts(scenes)
    folder = embedded_set("embedded:scenes")
    assert folder is not None
    lines = {name: (folder / f"prompts_{name}.txt").read_text().splitlines() for name in ("train", "tuning", "test")}
    assert {name: [p.text for p in getattr(splits, name)] for name in lines} == lines


def test_a_packaged_tuning_split_shares_nothing_either(
    profile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nftctl.learning.splits.embedded_set", lambda _: tmp_path)
    trained, tested = (read_prompts(resolve_prompt_file("embedded", split))[0].text for split in SPLITS)
    for shared, where in ((trained, "trained on"), (tested, "tested")):
        write(tmp_path, "prompts_tuning.txt", ["a new one", shared])
        with pytest.raises(ProfileRefused) as refused:
            split_prompts(profile())
        assert refused.value.findings[0].message.startswith(f"1 prompts of prompts_tuning.txt are {where} as well")
