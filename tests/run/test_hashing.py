"""Safetensors headers are distrusted; folder hashes see content and nothing else."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from nftctl.errors import CheckpointUnusable
from nftctl.run.hashing import TensorInfo, fingerprint_base, fingerprint_folder, hash_file, safetensors_header

from .make import raw_file, safetensors_bytes


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one(name: str = "a", **kwargs: object) -> bytes:
    return json.dumps({name: entry(**kwargs)}).encode()


def test_a_file_written_by_the_library_is_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"b": np.zeros((2, 3), np.float32), "a": np.arange(4, dtype=np.int64)}, path, {"note": "x"})
    found = safetensors_header(path)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "a": ("I64", (4,)),
        "b": ("F32", (2, 3)),
    }
    content = path.read_bytes()
    info = found["a"]
    assert np.frombuffer(content[info.begin : info.end], np.int64).tolist() == [0, 1, 2, 3]


def test_offsets_are_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = one()
    path.write_bytes(raw_file(header, bytes(8)))
    assert safetensors_header(path) == {"a": TensorInfo("F32", (2,), 8 + len(header), 16 + len(header))}


HOSTILE = {
    "empty file": b"",
    "cut in the length": b"\x01\x02",
    "length beyond the file": struct.pack("<Q", 1 << 40) + b"{}",
    "length beyond the limit": struct.pack("<Q", 2**64 - 1),
    "not an object": raw_file(b"[]"),
    "not JSON": raw_file(b"{nonsense}"),
    "not UTF-8": raw_file(b'{"\xff\xfe": 1}'),
    "a pickle": raw_file(b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."),
    "nested too deeply": raw_file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "huge number": raw_file(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', bytes(8)),
    "NaN": raw_file(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
    "name twice": raw_file(b'{"a":' + one()[6:-1] + b',"a":' + one()[6:-1] + b"}", bytes(8)),
    "entry is a list": raw_file(b'{"a":[1]}'),
    "entry lacks a key": raw_file(b'{"a":{"dtype":"F32","shape":[2]}}', bytes(8)),
    "unknown dtype": raw_file(one(dtype="object"), bytes(8)),
    "dtype is no text": raw_file(one(dtype=["F32"]), bytes(8)),
    "negative size": raw_file(one(shape=[-2]), bytes(8)),
    "boolean size": raw_file(one(shape=[True, 2]), bytes(8)),
    "fractional size": raw_file(one(shape=[2.0]), bytes(8)),
    "thousands of dimensions": raw_file(one(shape=[2**60] * 5000), bytes(8)),
    "size against shape": raw_file(one(shape=[3]), bytes(8)),
    "backward offsets": raw_file(one(shape=[2], offsets=[8, 0]), bytes(8)),
    "hole": raw_file(one(offsets=[8, 16]), bytes(16)),
    "trailing bytes": raw_file(one(), bytes(9)),
    "truncated data": raw_file(one(), bytes(7)),
    "overlap": raw_file(json.dumps({"a": entry(), "b": entry()}).encode(), bytes(8)),
    "metadata is no map": raw_file(b'{"__metadata__":[]}'),
    "metadata holds numbers": raw_file(b'{"__metadata__":{"a":1}}'),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_malformed_headers_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointUnusable, match=r"bad\.safetensors") as caught:
        safetensors_header(path)
    assert len(caught.value.message) < 400


@settings(max_examples=200)
@given(st.data())
def test_any_flipped_byte_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    good = safetensors_bytes({"a": ("F32", [2], bytes(8)), "b": ("BF16", [1, 3], bytes(6))}, {"k": "v"})
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    path = tmp_path_factory.mktemp("flip") / "x.safetensors"
    path.write_bytes(bad)
    try:
        found = safetensors_header(path)
    except CheckpointUnusable:
        return
    assert all(0 <= info.begin <= info.end <= len(bad) for info in found.values())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match=r"nowhere\.safetensors"):
        safetensors_header(tmp_path / "nowhere.safetensors")
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
