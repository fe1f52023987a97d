"""File hashes are plain sha256; folder hashes see content and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nftctl.errors import CheckpointUnusable
from nftctl.run.hashing import fingerprint_base, fingerprint_folder, hash_file


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match="nowhere"):
        hash_file(tmp_path / "nowhere")


def test_file_hash_is_plain_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert hash_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def base(folder: Path, *, split: bool = False, value: float = 1.0, name: str = "w") -> Path:
    """A two-component base whose transformer lies in one file or in two."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    a, b = {name: np.full((2, 2), value, np.float32)}, {"z": np.ones(3, np.float16)}
    if split:
        save_file(a, folder / "transformer/model-00001-of-00002.safetensors")
        save_file(b, folder / "transformer/model-00002-of-00002.safetensors")
        (folder / "transformer/model.safetensors.index.json").write_text("{}")
    else:
        save_file(a | b, folder / "transformer/model.safetensors")
    (folder / "transformer/config.json").write_text('{"layers": 2}')
    (folder / "scheduler/scheduler_config.json").write_text('{"flow_shift": 3.0}')
    return folder


def test_the_split_into_files_and_the_place_do_not_matter(tmp_path: Path) -> None:
    one, two = base(tmp_path / "one"), base(tmp_path / "somewhere/else", split=True)
    (two / "README.md").write_text("words")
    (two / ".cache").mkdir()
    (two / ".cache/x.json").write_text("{}")
    assert fingerprint_base(one) == fingerprint_base(two)


def test_content_names_and_configuration_matter(tmp_path: Path) -> None:
    hashes = {fingerprint_base(base(tmp_path / "a")), fingerprint_base(base(tmp_path / "b", value=1.5))}
    hashes.add(fingerprint_base(base(tmp_path / "c", name="v")))
    changed = base(tmp_path / "d")
    (changed / "scheduler/scheduler_config.json").write_text('{"flow_shift": 5.0}')
    hashes.add(fingerprint_base(changed))
    moved = base(tmp_path / "e")
    (moved / "transformer").rename(moved / "denoiser")
    hashes.add(fingerprint_base(moved))
    assert len(hashes) == 5


def test_a_folder_without_weights_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointUnusable, match=r"no \.safetensors file"):
        fingerprint_base(tmp_path)
    with pytest.raises(CheckpointUnusable, match="not a folder"):
        fingerprint_base(tmp_path / "nowhere")
    assert len(fingerprint_folder(tmp_path)) == 64
