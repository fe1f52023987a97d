"""`sample` as a person meets it: the grid, the single images, the JSON object, and what it refuses before it loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nftctl.cli.main import run
from tests.model.trained_runs import make_trained
from tests.run.make import snapshot

from .program import nftctl, python

PROBE = """
import json, sys
from nftctl.cli.main import run
code = run(sys.argv[1].split())
print(json.dumps({"code": code, "found": sorted(set(sys.modules) & {"ray", "torch"})}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the trained run `first` in it. Read only."""
    folder = tmp_path_factory.mktemp("kept")
    make_trained(folder / "runs")
    return folder


@pytest.fixture
def place(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a copy of it."""
    shutil.copytree(kept / "runs", tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Sample = Callable[..., dict]


@pytest.fixture
def sample(place: Path, capsys: pytest.CaptureFixture[str]) -> Sample:
    """Sample in this process, which has torch already; the JSON object."""

    def command(*arguments: str) -> dict:
        code = run(["sample", "first", "--steps", "3", "--json", *arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        found: dict = json.loads(out)
        return found

    return command


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def test_rows_are_prompts_and_columns_are_weights(place: Path, sample: Sample) -> None:
    before = snapshot(place / "runs")
    document = sample("--prompt", "a red zero", "--prompt", "a blue two", "--images", "singles", "--seed", "4",
                      "--weights", "base,old,policy")  # fmt: skip
    assert list(document)[5:] == [
        "path", "images", "checkpoint", "step", "columns", "rows", "sampling", "device",
    ]  # fmt: skip
    assert (document["path"], document["images"], document["step"]) == ("sample.png", "singles", 3)
    assert document["columns"] == ["base", "old", "policy"]
    assert document["sampling"] == {"steps": 3, "shift": 3.0, "guidance": 1.0}
    names = [f"{row:03d}_{name}.png" for row in range(2) for name in ("base", "old", "policy")]
    assert [name for row in document["rows"] for name in row["images"]] == names
    assert sorted(path.name for path in Path("singles").iterdir()) == names
    assert [row["key"] for row in document["rows"]] == [[4, "grid", 0, 0], [4, "grid", 1, 0]]
    # Each single image, eight times as large, is in the grid; rows below one another, columns side by side.
    grid = pixels(Path("sample.png"))
    at = [find(grid, np.kron(pixels(Path("singles") / name), np.ones((8, 8, 1), np.uint8))) for name in names]
    assert at[0][0] == at[1][0] == at[2][0] < at[3][0] == at[4][0] == at[5][0]
    assert at[0][1] == at[3][1] < at[1][1] == at[4][1] < at[2][1] == at[5][1]
    assert snapshot(place / "runs") == before


def find(sheet: np.ndarray, tile: np.ndarray) -> tuple[int, int]:
    """Where a tile stands in a sheet."""
    height, width = tile.shape[:2]
    for top in range(sheet.shape[0] - height + 1):
        for left in range(sheet.shape[1] - width + 1):
            if (sheet[top, left] == tile[0, 0]).all() and (
                sheet[top : top + height, left : left + width] == tile
            ).all():
                return top, left
    raise AssertionError("the tile is not in the sheet")


def test_the_seed_moves_the_noise_and_nothing_else_does(place: Path, sample: Sample) -> None:
    look = ("--prompt", "a red zero", "--weights", "policy")
    for name, seed, more in (("a", "1", ()), ("b", "1", ("--prompt", "a blue two")), ("c", "2", ())):
        sample(*look, *more, "--seed", seed, "--out", f"{name}.png", "--images", name)
    first, beside, other = (pixels(Path(f"{name}/000_policy.png")) for name in "abc")
    assert np.abs(first.astype(int) - beside).max() <= 1
    assert (first != other).any()
    # The run's own evaluation seed is 1.
    sample(*look, "--out", "d.png", "--images", "d")
    assert (pixels(Path("d/000_policy.png")) == first).all()


def test_overrides_change_the_images(place: Path, sample: Sample) -> None:
    look = ("--prompt", "a red zero", "--weights", "policy")
    changes = ((), ("--guidance", "3"), ("--shift", "1"))
    made = []
    for i, more in enumerate(changes):
        document = sample(*look, *more, "--out", f"{i}.png", "--images", f"{i}")
        made.append(pixels(Path(f"{i}/000_policy.png")))
    assert document["sampling"] == {"steps": 3, "shift": 1.0, "guidance": 1.0}
    assert (made[0] != made[1]).any()
    assert (made[0] != made[2]).any()


def test_prompts_come_from_a_file_or_from_the_run_s_own_grid(place: Path, sample: Sample) -> None:
    Path("p.jsonl").write_text('{"prompt": "a red one", "reward_prompt": "shown"}\n{"prompt": "a red two"}\n')
    rows = sample("--prompt-file", "p.jsonl", "--weights", "policy")["rows"]
    assert [(row["prompt"], row["shown"]) for row in rows] == [("a red one", "shown"), ("a red two", "a red two")]
    document = sample("--out", "own.png")
    own = document["rows"]
    assert len(own) == 6
    assert document["columns"] == ["base", "old", "ema", "policy"]
    assert own[0]["prompt"] == "a red zero"


def test_neither_ray_nor_the_environment_has_a_part_in_it(place: Path) -> None:
    answer = python(
        PROBE, "sample first --prompt red --steps 1 --weights policy", cwd=place,
        env={"NFTCTL_RL__SAMPLE_STEPS": "7", "NFTCTL_MODEL__LORA__RANK": "2"},
    )  # fmt: skip
    assert json.loads(answer.stderr.splitlines()[-1]) == {"code": 0, "found": ["torch"]}
    assert answer.stdout == "sample.png\n"
    assert "91 of 91 base tensors loaded on cpu" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--out", "x.jpg"), 2, "does not end in .png"),
        (("--out", "here.png"), 2, "here.png is there already and is never overwritten"),
        (("--out", "no/where.png"), 2, "is no folder that can be written to"),
        (("--images", "runs"), 2, "runs is there already and is not empty"),
        (("--weights", "best"), 2, "is a list of base, old, ema, policy: there is no best"),
        (("--weights", "policy,policy"), 2, "each only once"),
        (("--device", "tpu"), 2, "--device is one of auto, cpu, cuda, got tpu"),
        (("--prompt", " "), 2, "a --prompt is empty"),
        (("--prompt-file", "nope.txt"), 2, "--prompt-file nope.txt: there is no such file"),
        (("--steps", "0"), 2, "--steps"),
        (("--guidance", "nan"), 2, "--guidance is a finite number of 0 or more, got nan"),
        (("--guidance", "inf"), 2, "--guidance is a finite number of 0 or more, got inf"),
        (("--guidance", "-1"), 2, "--guidance is a finite number of 0 or more, got -1"),
        (("--shift", "nan"), 2, "--shift is a finite number above 0, got nan"),
        (("--shift", "0"), 2, "--shift is a finite number above 0, got 0"),
        (("--base", "nowhere"), 5, "the base nowhere is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_refused_before_the_model_is_loaded(
    place: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    Path("here.png").write_bytes(b"mine")
    before = snapshot(place)
    answer = python(PROBE, " ".join(["sample", "first", *arguments]), cwd=place) if " " not in arguments else None
    if answer is None:
        assert run(["sample", "first", *arguments]) == code
    else:
        assert json.loads(answer.stderr.splitlines()[-1]) == {"code": code, "found": []}
        assert message in answer.stderr
    assert snapshot(place) == before


def test_a_word_that_the_base_does_not_know_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(place)
    assert run(["sample", "first", "--prompt", "a red one", "--prompt", "a red zebra", "--json"]) == 2
    out, err = capsys.readouterr()
    message = json.loads(out)["error"]["message"]
    assert message == """the prompt 'a red zebra': "zebra" is no word that the base's tokenizer knows"""
    assert json.loads(out)["error"]["hint"].startswith("its words are a, red, ")
    assert "hashing" not in err  # nor the base, nor the checkpoint, which may be gigabytes
    assert "bug" not in err
    assert "Traceback" not in err
    assert "sampling" not in err
    assert snapshot(place) == before


def test_a_step_folder_outside_its_run_is_refused(place: Path) -> None:
    shutil.move(place / "runs/first/checkpoints/step_000003", place / "moved")
    answer = nftctl("sample", "moved", cwd=place)
    assert answer.returncode == 5
    assert "nothing says how its model is built" in answer.stderr
