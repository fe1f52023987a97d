"""Safetensors headers are distrusted, and a component is complete or refused."""

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
from nftctl.tensorfile import STEM, TensorInfo, safetensors_header, weight_files

from .run.make import raw_file, safetensors_bytes


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


def test_a_component_is_one_file_or_the_files_of_its_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match=STEM):
        weight_files(tmp_path)
    (tmp_path / STEM).touch()
    assert weight_files(tmp_path) == [tmp_path / STEM]
    index = tmp_path / f"{STEM}.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "two", "a": "one", "c": "two"}}))
    with pytest.raises(CheckpointUnusable, match="has not one, two"):
        weight_files(tmp_path)
    (tmp_path / "one").touch()
    (tmp_path / "two").touch()
    assert weight_files(tmp_path) == [tmp_path / "one", tmp_path / "two"]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', pytest.param("[" * 100_000, id="deep")],
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / f"{STEM}.index.json").write_text(text)
    with pytest.raises(CheckpointUnusable, match="not a safetensors index"):
        weight_files(tmp_path)
