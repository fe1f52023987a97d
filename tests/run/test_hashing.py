"""File hashes are plain sha256; folder hashes see content and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nftctl.errors import CheckpointUnusable
from nftctl.run import hashing
from nftctl.run.hashing import fingerprint_base, fingerprint_folder, hash_file
from nftctl.tensorfile import STEM


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match="nowhere"):
        hash_file(tmp_path / "nowhere")


def test_file_hash_is_plain_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert hash_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


INDEX = {"_class_name": "P", "transformer": ["diffusers", "T"], "scheduler": ["diffusers", "S"]}


def base(folder: Path, *, split: bool = False, value: float = 1.0, name: str = "w") -> Path:
    """A two-component base whose transformer lies in one file or in two."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    a, b = {name: np.full((2, 2), value, np.float32)}, {"z": np.ones(3, np.float16)}
    if split:
        parts = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        for part, tensors in zip(parts, (a, b), strict=True):
            save_file(tensors, folder / "transformer" / part)
        index = {"weight_map": {name: parts[0], "z": parts[1]}}
        (folder / f"transformer/{STEM}.index.json").write_text(json.dumps(index))
    else:
        save_file(a | b, folder / "transformer" / STEM)
    (folder / "transformer/config.json").write_text('{"layers": 2}')
    (folder / "scheduler/scheduler_config.json").write_text('{"flow_shift": 3.0}')
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    return folder


def test_the_split_into_files_and_the_place_do_not_matter(tmp_path: Path) -> None:
    one, two = base(tmp_path / "one"), base(tmp_path / "somewhere/else", split=True)
    # Nor do the order and the blanks of the index.
    (two / "model_index.json").write_text(json.dumps(dict(reversed(INDEX.items())), indent=3))
    assert fingerprint_base(one) == fingerprint_base(two)


def test_what_no_run_reads_does_not_matter(tmp_path: Path) -> None:
    whole = base(tmp_path / "base")
    before = fingerprint_base(whole)
    weights = (whole / "transformer" / STEM).read_bytes()
    for name, content in {
        "README.md": b"words", ".gitattributes": b"*", ".git/config": b"[core]", ".cache/x.json": b"{}",
        "preview.png": b"\x89PNG", "checkpoint.json": b"{}", "all_in_one.safetensors": weights,
        "other_part/config.json": b"{}", "other_part/model.safetensors": weights,
        "transformer/diffusion_pytorch_model.bin": b"\x80\x04.", "transformer/README.md": b"words",
        "transformer/diffusion_pytorch_model.fp16.safetensors": weights,
        "transformer/diffusion_pytorch_model.bin.index.json": b"{}",
        "transformer/diffusion_pytorch_model.safetensors.index.fp16.json": b"{}",
        "transformer/.huggingface/x.json": b"{}",
    }.items():  # fmt: skip
        (whole / name).parent.mkdir(exist_ok=True, parents=True)
        (whole / name).write_bytes(content)
        assert fingerprint_base(whole) == before, name


def test_content_names_and_configuration_matter(tmp_path: Path) -> None:
    hashes = {fingerprint_base(base(tmp_path / "a")), fingerprint_base(base(tmp_path / "b", value=1.5))}
    hashes.add(fingerprint_base(base(tmp_path / "c", name="v")))
    for number, (name, content) in enumerate([
        ("scheduler/scheduler_config.json", '{"flow_shift": 5.0}'), ("transformer/config.json", '{"layers": 3}'),
        ("model_index.json", json.dumps(INDEX | {"x": 1})), ("model_index.json", json.dumps(INDEX | {"vae": []})),
        ("tokenizer/vocab.txt", "a"), ("vae/config.json", "{}"), ("text_encoder_3/config.json", "{}"),
    ]):  # fmt: skip
        changed = base(tmp_path / f"d{number}")
        (changed / name).parent.mkdir(exist_ok=True)
        (changed / name).write_text(content)
        hashes.add(fingerprint_base(changed))
    named = base(tmp_path / "named")
    (named / "model_index.json").write_text(json.dumps(INDEX | {"judge": ["diffusers", "J"]}))
    hashes.add(fingerprint_base(named))
    (named / "judge").mkdir()
    (named / "judge/config.json").write_text("{}")
    hashes.add(fingerprint_base(named))
    assert len(hashes) == 12


def test_weights_are_those_that_the_part_s_library_reads(tmp_path: Path) -> None:
    """Where a single file lies beside an index, diffusers goes by the index and transformers takes the single file."""
    both = base(tmp_path / "base", split=True)
    before = fingerprint_base(both)
    save_file({"w": np.zeros((2, 2), np.float32)}, both / "transformer" / STEM)
    assert fingerprint_base(both) == before
    encoder = both / "text_encoder"
    encoder.mkdir()
    save_file({"e": np.zeros(2, np.float32)}, encoder / "model.safetensors")
    before = fingerprint_base(both)
    save_file({"e": np.ones(2, np.float32)}, encoder / "model-00001-of-00001.safetensors")
    (encoder / "model.safetensors.index.json").write_text('{"weight_map": {"e": "model-00001-of-00001.safetensors"}}')
    assert fingerprint_base(both) == before
    (encoder / "model.safetensors").unlink()
    assert fingerprint_base(both) != before


def test_names_in_the_index_lead_nowhere_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    whole = base(tmp_path / "base")
    (whole / "model_index.json").write_text(json.dumps(INDEX | {"../outside": ["a", "b"], "..": ["a", "b"]}))
    before = fingerprint_base(whole)
    (outside / "config.json").write_text("{}")
    assert fingerprint_base(whole) == before
    for content in ("[]", "{", '{"a": NaN}'):
        (whole / "model_index.json").write_text(content)
        with pytest.raises(CheckpointUnusable, match=r"model_index\.json is not"):
            fingerprint_base(whole)


def test_a_large_base_is_announced_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    whole = base(tmp_path / "base")
    fingerprint_base(whole, said.append)
    assert said == []
    monkeypatch.setattr(hashing, "LARGE", 21)  # 4 x 4 + 3 x 2 = 22 bytes
    assert fingerprint_base(whole, said.append) == fingerprint_base(whole)
    assert said == ["hashing 0.0 GB of base weights"]
    monkeypatch.setattr(hashing, "LARGE", 22)
    fingerprint_base(whole, said.append)
    assert len(said) == 1


def test_a_base_is_read_once_and_anew_each_time(tmp_path: Path) -> None:
    """A cache by name, size and time would take this file for the one before."""
    whole = base(tmp_path / "base")
    before = fingerprint_base(whole)
    file = whole / "transformer" / STEM
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    assert fingerprint_base(whole) != before


def test_a_folder_without_weights_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointUnusable, match=r"no \.safetensors file"):
        fingerprint_base(tmp_path)
    with pytest.raises(CheckpointUnusable, match="not a folder"):
        fingerprint_base(tmp_path / "nowhere")
    assert len(fingerprint_folder(tmp_path)) == 64
    whole = base(tmp_path / "base")
    (whole / "transformer" / STEM).unlink()
    with pytest.raises(CheckpointUnusable, match=f"has not {STEM}"):
        fingerprint_base(whole)
