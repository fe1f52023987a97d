"""`export` as a person meets it: what it writes and says, what it refuses, and that an adapter needs no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nftctl.cli.main import run
from nftctl.run.directory import RunDirectory
from nftctl.tensorfile import read_header
from tests.model.trained_runs import make_trained
from tests.run.make import make_run, snapshot

from .program import HEAVY, nftctl, python, the_object

LIGHT = """
import json, sys
from nftctl.cli.main import run
code = run(sys.argv[1].split())
print(json.dumps({"code": code, "heavy": sorted(set(sys.modules) & set(sys.argv[2:]))}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the trained run `first` in it. Read only."""
    folder = tmp_path_factory.mktemp("kept")
    make_trained(folder / "runs")
    return folder


@pytest.fixture
def place(kept: Path, tmp_path: Path) -> Path:
    """A copy of it to write in."""
    shutil.copytree(kept / "runs", tmp_path / "runs", symlinks=True)
    return tmp_path


def test_the_adapter_alone(place: Path) -> None:
    before = snapshot(place / "runs")
    document = the_object(nftctl("export", "first", "--to", "lora", "out", "--json", cwd=place))
    assert list(document) == [
        "schema_version", "command", "ok", "exit_code", "diagnostics", "path", "to", "weights", "checkpoint", "step",
        "base", "tensors", "files", "absent_parts",
    ]  # fmt: skip
    assert (document["path"], document["to"], document["weights"], document["step"]) == ("out", "lora", "policy", 3)
    assert document["base"]["name"] == "nftctl's embedded tiny base"
    assert document["tensors"] == 32
    assert document["files"] == ["README.md", "pytorch_lora_weights.safetensors", "reward.svg"]
    assert sorted(snapshot(place / "out")) == document["files"]
    assert snapshot(place / "runs") == before
    assert sorted(path.name for path in place.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize("to", ["lora", "diffusers"])
def test_an_adapter_is_written_without_torch(place: Path, to: str) -> None:
    answer = python(LIGHT, f"export first --to {to} --weights old out", *HEAVY, "numpy", cwd=place)
    heard = json.loads(answer.stderr.splitlines()[-1])
    assert heard == {"code": 0, "heavy": []}
    assert answer.stdout == "out\n"
    assert "32 tensors of the old at step 3; to load it:" in answer.stderr
    folder = "out" if to == "lora" else "out/adapter"
    assert f'transformer.load_lora_adapter("{folder}", use_safetensors=True)' in answer.stderr


def test_a_step_folder_outside_its_run_gives_an_adapter_and_needs_a_base_for_more(place: Path) -> None:
    shutil.move(place / "runs/first/checkpoints/step_000003", place / "moved")
    answer = nftctl("export", "moved", "--to", "lora", "out", cwd=place)
    assert answer.returncode == 0, answer.stderr
    card = (place / "out/README.md").read_text()
    assert "the base with fingerprint f3a34ec8fbbd" in card
    assert "It was not evaluated on held-out prompts." in card
    refused = nftctl("export", "moved", "--to", "diffusers", "whole", cwd=place)
    assert refused.returncode == 5
    assert "nothing says where its base is" in refused.stderr
    assert "--base FOLDER" in refused.stderr
    assert not (place / "whole").exists()
    assert nftctl("export", "moved", "--to", "diffusers", "whole", "--base", "embedded", cwd=place).returncode == 0
    _, metadata = read_header(place / "whole/adapter/pytorch_lora_weights.safetensors")
    assert metadata["base_model"] == "nftctl's embedded tiny base"


@pytest.mark.parametrize("to", ["lora", "merged", "diffusers"])
def test_a_folder_that_holds_something_is_never_written_to(place: Path, to: str) -> None:
    (place / "out").mkdir()
    (place / "out/mine.txt").write_text("mine")
    before = snapshot(place)
    answer = nftctl("export", "first", "--to", to, "out", cwd=place)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "out is there already and is not empty" in answer.stderr
    assert snapshot(place) == before


def test_a_damaged_checkpoint_is_refused_with_its_fault(place: Path) -> None:
    shard = place / "runs/first/checkpoints/step_000003/state/shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    before = snapshot(place)
    answer = nftctl("export", "first", "--to", "lora", "out", cwd=place)
    assert (answer.returncode, answer.stdout) == (5, "")
    assert "shard-1.safetensors: altered (sha256 differs)" in answer.stderr
    assert snapshot(place) == before


def test_another_base_is_refused_before_anything_is_written(place: Path) -> None:
    other = place / "other"
    (other / "transformer").mkdir(parents=True)
    tiny = Path(__file__).parents[2] / "nftctl/model/tiny/base"
    shutil.copytree(tiny, other, dirs_exist_ok=True)
    (other / "tokenizer/tokenizer_config.json").write_text("{}")
    answer = nftctl("export", "first", "--to", "merged", "out", "--base", "other", cwd=place)
    assert (answer.returncode, answer.stdout) == (5, "")
    assert "other is not the base that runs/first/checkpoints/step_000003 was trained on" in answer.stderr
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "onnx"), "--to is one of lora, merged, diffusers, got onnx"),
        (("--to", "lora", "--weights", "best"), "--weights is one of policy, old, ema, got best"),
    ],
)
def test_unknown_words_are_refused_with_the_known_ones(place: Path, arguments: tuple[str, ...], message: str) -> None:
    answer = nftctl("export", "first", "out", *arguments, cwd=place)
    assert answer.returncode == 2
    assert message in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "first", "out", "--to", "merged", "--base", "nowhere"), "the base nowhere is not there"),
        (("sample", "first", "--weights", "best", "--out", "out.png"), "there is no best"),
        (("sample", "first", "--prompt", " ", "--out", "out.png"), "a --prompt is empty"),
        (("sample", "first", "--base", "nowhere", "--out", "out.png"), "the base nowhere is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_had_is_refused_before_anything_is_hashed(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(place)
    # One byte altered, which only hashing can tell.
    shard = place / "runs/first/checkpoints/step_000003/state/shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert run([*arguments]) in (2, 5)
    said = capsys.readouterr().err
    assert message in said
    assert "hashing" not in said
    assert not list(place.glob("out*"))


def test_a_contract_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", steps=(5,))
    answer = nftctl("export", "tiny", "--to", "diffusers", "out", cwd=tmp_path)
    assert answer.returncode == 5
    assert "its identity has no" in answer.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_the_folder_of_another_run_is_refused(place: Path) -> None:
    first = RunDirectory(place / "runs/first")
    record = json.loads(first.run_json.read_text()) | {"run_id": "ffff"}
    first.run_json.write_text(json.dumps(record))
    answer = nftctl("export", "first", "--to", "lora", "out", cwd=place)
    assert answer.returncode == 5
    assert "is not a checkpoint of the run whose folder it lies in" in answer.stderr
