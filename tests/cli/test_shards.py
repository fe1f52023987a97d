"""What is taken away from a run whose base is a distributed checkpoint: a denoiser without a pipeline around it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nftctl.profile.artifacts import EMBEDDED_BASE
from nftctl.run.stored import StoredTensors
from tests.model.shards import cut
from tests.model.trained_runs import make_trained
from tests.run.make import snapshot

from .program import nftctl, the_object


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained runs with the same adapters: `whole` from the packaged base, `first` from its transformer, cut."""
    folder = tmp_path_factory.mktemp("kept")
    cut(EMBEDDED_BASE, folder / "dcp", 3)
    tokenizer = f'model.tokenizer="{EMBEDDED_BASE}/tokenizer"'
    make_trained(folder / "runs", sets=(f'rl.init_from="{folder}/dcp"', tokenizer))
    make_trained(folder / "runs", name="whole")
    return folder


@pytest.fixture
def place(kept: Path, tmp_path: Path) -> Path:
    """A place to write beside them."""
    (tmp_path / "runs").symlink_to(kept / "runs")
    return tmp_path


def test_the_adapter_needs_no_base(place: Path) -> None:
    assert the_object(nftctl("export", "first", "--to", "lora", "out", "--json", cwd=place))["tensors"] == 32


@pytest.mark.parametrize("to", ["merged", "diffusers"])
def test_a_pipeline_needs_one_and_takes_any_with_the_same_denoiser(place: Path, to: str) -> None:
    refused = nftctl("export", "first", "--to", to, "out", cwd=place)
    assert refused.returncode == 2
    assert f"a denoiser alone: there is no pipeline to write as {to}" in refused.stderr
    assert "name a base with the same denoiser: --base FOLDER" in refused.stderr
    assert not (place / "out").exists()
    for run in ("first", "whole"):
        answer = nftctl("export", run, "--to", to, run, "--base", "embedded", cwd=place)
        assert answer.returncode == 0, answer.stderr
    # The same adapters on the same weights: but for the card it is the same pipeline.
    own, theirs = snapshot(place / "first"), snapshot(place / "whole")
    assert own.keys() == theirs.keys()
    for name in own.keys() - {"README.md"}:
        if name.endswith(".safetensors"):
            old, new = (StoredTensors([place / run / name]) for run in ("first", "whole"))
            assert old.forms == new.forms
            assert all(list(old.chunks(key)) == list(new.chunks(key)) for key in old.forms), name
        else:
            assert own[name] == theirs[name], name


def test_a_base_with_another_denoiser_is_refused(place: Path) -> None:
    shutil.copytree(EMBEDDED_BASE, place / "other")
    file = place / "other/transformer/diffusion_pytorch_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused = nftctl("export", "first", "--to", "merged", "out", "--base", "other", cwd=place)
    assert refused.returncode == 5
    assert "other is not the base that" in refused.stderr


def test_it_samples_what_the_run_from_the_whole_base_samples(place: Path) -> None:
    look = ("--prompt", "a red zero", "--steps", "3")
    for run in ("first", "whole"):
        answer = nftctl("sample", run, *look, "--out", f"{run}.png", "--images", run, cwd=place)
        assert answer.returncode == 0, answer.stderr
        assert "91 of 91 base tensors loaded on cpu" in answer.stderr
    assert snapshot(place / "first") == snapshot(place / "whole")
    assert len(snapshot(place / "first")) == 4
