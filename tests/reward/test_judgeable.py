"""What a packaged scorer would refuse in a run is refused before it, by the scorer's own reading of a prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nftctl.errors import Finding
from nftctl.profile.artifacts import EMBEDDED_SETS, bundled_profiles, scorer_names
from nftctl.profile.load import load_profile
from nftctl.profile.preflight import check
from nftctl.profile.prompts import read_prompts, resolve_prompt_file
from nftctl.reward.judgeable import MADE_FOR, RULE, SIDES
from nftctl.reward.scorers import load_scorer


def found(profile: str, *sets: str) -> list[Finding]:
    return check(load_profile(bundled_profiles()[profile], sets=sets, env={}), (RULE,))


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles_have_scorers_that_fit(name: str) -> None:
    assert found(name) == []


@pytest.mark.parametrize("scorer", MADE_FOR)
def test_a_scorer_judges_every_prompt_that_it_is_said_to_be_made_for(scorer: str) -> None:
    side = SIDES.get(scorer, 64)
    for split in ("train", "test"):
        prompts = read_prompts(resolve_prompt_file(f"embedded:{MADE_FOR[scorer]}", split))  # type: ignore[arg-type]
        texts = [prompt.reward_text for prompt in prompts]
        images = [np.full((side, side, 3), 255, np.uint8)] * len(texts)
        assert len(load_scorer(scorer).score(images, texts, [{}] * len(texts))) == len(texts)
    if scorer in SIDES:
        with pytest.raises(ValueError, match=rf"\({side}, {side}, 3\)"):
            load_scorer(scorer).score([np.zeros((side + 1, side, 3), np.uint8)], texts[:1], [{}])


@pytest.mark.parametrize(
    ("profile", "scorer", "count", "own"),
    [
        ("tiny_t2i_cpu", "scenes", (48, 12), "tiny_digits"),
        ("tiny_t2i_cpu", "colour_shape", (48, 12), "tiny_digits"),
        ("scenes_t2i_cpu", "tiny_digits", (320, 72), "scenes or colour_shape"),
        ("scenes_t2i_cpu", "ocr", (320, 72), "scenes or colour_shape"),
    ],
)
def test_a_scorer_of_other_prompts_is_told_once_a_file(
    profile: str, scorer: str, count: tuple[int, int], own: str
) -> None:
    train, test = found(profile, f"reward.providers.0.scorer={scorer}")
    key = "reward.providers.0.scorer"
    for finding, n, file in ((train, count[0], "data.prompt_file"), (test, count[1], "eval.prompt_file")):
        assert (finding.code, finding.key, finding.origin) == ("reward-scorer-unfit", key, f"--set {key}={scorer}")
        assert finding.message.startswith(f'{key} = "{scorer}" cannot judge {n} of the {n} prompts of {file}; line 1: ')
        assert finding.help == f"these are prompts for {own}"


def test_one_prompt_of_ones_own_is_found_on_its_line(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    rows = ["two red circles", "circles above red", "a black square"]
    mine.write_text("".join(f'{{"prompt": "a", "reward_prompt": "{row}"}}\n' for row in rows))
    sets = (f"data.prompt_file={mine}", "eval.prompt_file=")
    (finding,) = found("scenes_t2i_cpu", *sets)
    assert (finding.origin, finding.line) == (str(mine), 2)
    said = "cannot judge a reward_prompt of data.prompt_file; line 2: colour_shape cannot judge 'red' of the "
    assert f"{said}reward_prompt 'circles above red'" in finding.message
    mine.write_text("".join(f"{row}\n" for row in rows))
    (plain,) = found("scenes_t2i_cpu", f"data.prompt_file={mine.rename(tmp_path / 'mine.txt')}", "eval.prompt_file=")
    assert f"{said}prompt 'circles above red'" in plain.message.replace("a prompt of data", "a reward_prompt of data")
    assert finding.help == "another scorer, or other prompts"
    # A service knows for itself.
    service = '[{name="a", url="http://h", revision="r"}]'
    assert found("scenes_t2i_cpu", *sets, f"reward.providers={service}") == []
    assert found("scenes_t2i_cpu", *sets, "reward.providers.0.scorer=brightness") == []


def test_who_judges_evaluations_judges_held_out_prompts_alone() -> None:
    (finding,) = found("scenes_t2i_cpu", 'eval.providers=[{name="a", kind="embedded", scorer="tiny_digits"}]')
    assert (finding.key, "72 of the 72 prompts of eval.prompt_file" in finding.message) == (
        "eval.providers.0.scorer",
        True,
    )


def test_a_scorer_of_one_size_is_told_of_another() -> None:
    (finding,) = found("scenes_t2i_cpu", "model.height=64")
    assert finding.message == (
        'reward.providers.0.scorer = "scenes" judges images of 32x32 pixels, and this profile makes 32x64'
    )
    assert found("scenes_t2i_cpu", "model.height=64", "reward.providers.0.scorer=colour_shape") == []


def test_the_names_are_those_of_scorers_and_sets() -> None:
    assert {*MADE_FOR, *SIDES} <= set(scorer_names())
    assert set(MADE_FOR.values()) <= set(EMBEDDED_SETS)
