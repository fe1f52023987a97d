"""Weights to DCP and back, the same to the bit; and foreign checkpoints that would rather run a program."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model import convert
from nftctl.model.foreign_dcp import ForeignTensors, read_metadata
from nftctl.run.stored import StoredTensors
from nftctl.tensorfile import STEM, weight_files
from tests.run.make import snapshot

from .bases import build_transformer, write_pixel_base
from .sd3_bases import write_sd3_base


def tensors_of(component: Path) -> dict[str, bytes]:
    """Every tensor's bytes by name, with its dtype and shape in front."""
    stored = StoredTensors(weight_files(component))
    return {name: repr(form).encode() + b"".join(stored.chunks(name)) for name, form in stored.forms.items()}


def cosmos3(folder: Path) -> Path:
    return write_pixel_base(folder, build_transformer(dtype=torch.bfloat16))


@pytest.fixture(scope="module", params=[cosmos3, write_sd3_base], ids=["cosmos3", "sd3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(tmp_path_factory.mktemp("base"))
    return made


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cosmos3(tmp_path_factory.mktemp("pixels"))


def save_foreign(state: dict[str, Any], folder: Path, files: int = 2) -> Path:
    """A checkpoint as torch itself writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder), thread_count=files), no_dist=True)
    return folder


# -- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1 << 30, 40_000])
def test_diffusers_to_dcp_to_diffusers_is_the_same_to_the_bit(
    base: Path, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", limit)
    monkeypatch.setattr(convert, "FILE_BYTES", limit)
    forms = convert.write_dcp(base / "transformer", tmp_path / "dcp")
    shards = list((tmp_path / "dcp").glob("*.safetensors"))
    assert len(shards) == 1 if limit > 1 << 20 else len(shards) > 3
    assert not list((tmp_path / "dcp").rglob(".metadata"))
    place = convert.config_folder(tmp_path / "dcp", None, base)
    written, left_out = convert.write_diffusers(convert.open_dcp(tmp_path / "dcp"), place, base, "", tmp_path / "out")
    assert (written, left_out) == ({name: forms[name] for name in written}, [])
    assert tensors_of(tmp_path / "out/transformer") == tensors_of(base / "transformer")
    # Everything else of the base is there as it was.
    old, new = snapshot(base), snapshot(tmp_path / "out")
    assert all(new[name] == old[name] for name in old if not name.endswith((STEM, ".index.json")))
    if limit < 1 << 20:
        assert len(list((tmp_path / "out/transformer").glob("*.safetensors"))) > 3


def test_torch_s_own_reader_reads_what_was_written(pixels: Path, tmp_path: Path) -> None:
    convert.write_dcp(pixels / "transformer", tmp_path / "dcp")
    wanted = load_file(pixels / "transformer" / STEM)
    target = {name: torch.zeros_like(value) for name, value in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "dcp")), no_dist=True)
    assert all(torch.equal(target[name], value) for name, value in wanted.items())


def test_a_component_alone_comes_out_without_a_base(pixels: Path, tmp_path: Path) -> None:
    assert convert.component_of(pixels) == pixels / "transformer"
    assert convert.component_of(pixels / "transformer") == pixels / "transformer"
    assert convert.component_of(pixels / "tokenizer") is None
    convert.write_dcp(pixels / "transformer", tmp_path / "dcp")
    # The DCP folder carries the config along.
    place = convert.config_folder(tmp_path / "dcp", None, None)
    convert.write_diffusers(convert.open_dcp(tmp_path / "dcp"), place, None, "", tmp_path / "out")
    assert sorted(snapshot(tmp_path / "out")) == ["config.json", STEM]
    assert tensors_of(tmp_path / "out") == tensors_of(pixels / "transformer")


def test_only_one_piece_of_a_tensor_is_in_memory(pixels: Path, tmp_path: Path) -> None:
    convert.write_dcp(pixels / "transformer", tmp_path / "dcp")

    class Watched:
        def __init__(self) -> None:
            self.inner = convert.open_dcp(tmp_path / "dcp")
            self.forms = self.inner.forms
            self.order: list[str] = []

        def chunks(self, name: str) -> Any:
            self.order.append(name)
            yield from self.inner.chunks(name)
            self.order.append(f"end of {name}")

    source = Watched()
    convert.write_diffusers(source, pixels / "transformer", None, "", tmp_path / "out")
    assert len(source.order) == 2 * len(source.forms)
    assert all(f"end of {a}" == b for a, b in zip(source.order[::2], source.order[1::2], strict=True))


# -- foreign checkpoints --------------------------------------------------------------------------------------------


def test_a_foreign_checkpoint_comes_through_with_its_prefix_stripped(pixels: Path, tmp_path: Path) -> None:
    weights = load_file(pixels / "transformer" / STEM)
    state = {"model": {"net": weights}, "step": 7, "optim": {"lr": 0.1, "m": torch.ones(3)}}
    source = convert.open_dcp(save_foreign(state, tmp_path / "foreign"))
    assert isinstance(source, ForeignTensors)
    assert sorted(source.not_tensors) == ["optim.lr", "step"]
    _, left_out = convert.write_diffusers(source, pixels / "transformer", pixels, "model.net.", tmp_path / "out")
    assert left_out == ["optim.m"]
    assert tensors_of(tmp_path / "out/transformer") == tensors_of(pixels / "transformer")


def test_every_dtype_and_shape_comes_through(tmp_path: Path) -> None:
    state = {
        "bf16": torch.randn(3, 4).bfloat16(), "f16": torch.randn(2).half(), "f64": torch.randn(2, 2, 2).double(),
        "scalar": torch.tensor(3), "bool": torch.tensor([True, False]), "empty": torch.zeros(0, 3),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn), "turned": torch.randn(3, 5).t(),
    }  # fmt: skip
    source = ForeignTensors(save_foreign(state, tmp_path / "foreign"))
    assert source.forms.keys() == state.keys()
    for name, value in state.items():
        assert source.read(name).dtype == value.dtype
        assert torch.equal(source.read(name).double(), value.double())


def two_chunks(folder: Path, **changes: Any) -> torch.Tensor:
    """`w` [4, 3] in two chunks of two files, as two ranks write it, with torch's own classes."""
    whole = torch.arange(12.0).reshape(4, 3)
    folder.mkdir()
    chunks, storage = [], {}
    for rank, (first, rows) in enumerate(changes.get("rows", [(0, 1), (1, 3)])):
        part = whole[first : first + rows].clone()
        buffer = io.BytesIO()
        torch.save(changes.get("part", part), buffer)
        padding = b"x" * (7 * rank)
        (folder / f"__{rank}_0.distcp").write_bytes(padding + buffer.getvalue())
        place = _StorageInfo(
            changes.get("path", f"__{rank}_0.distcp"), changes.get("begin", len(padding)), len(buffer.getvalue()),
            changes.get("transform"),
        )  # fmt: skip
        chunks.append(ChunkStorageMetadata(offsets=torch.Size([first, 0]), sizes=torch.Size([rows, 3])))
        storage[MetadataIndex("w", torch.Size([first, 0]))] = place
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4, 3]), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={"w": entry}, storage_data=storage)))
    return whole


def test_chunks_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    whole = two_chunks(tmp_path / "foreign")
    source = ForeignTensors(tmp_path / "foreign")
    assert source.forms == {"w": ("F32", (4, 3))}
    assert b"".join(source.chunks("w")) == whole.numpy().tobytes()
    # The folder is one that torch itself reads.
    target = {"w": torch.zeros(4, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=dcp.FileSystemReader(str(tmp_path / "foreign")), no_dist=True)
    assert torch.equal(target["w"], whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [(0, 1), (2, 2)]}, "w: its 2 blocks do not cover"),
        ({"rows": [(0, 3), (1, 3)]}, "w: its 2 blocks do not cover"),
        ({"path": "../outside"}, "leads out of the folder"),
        ({"path": "/etc/passwd"}, "leads out of the folder"),
        ({"path": "nothing.distcp"}, "is missing or too short"),
        ({"begin": 10_000}, "is missing or too short"),
        ({"begin": -1}, "is no stretch of a file"),
        ({"transform": ["zstd"]}, "was transformed by"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_true_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    two_chunks(tmp_path / "foreign", **changes)
    with pytest.raises(CheckpointUnusable, match=message):
        ForeignTensors(tmp_path / "foreign")


@pytest.mark.parametrize("part", [{"a": torch.ones(3)}, [1, 2], torch.ones(2, 2), torch.ones(1, 3).double()], ids=str)
def test_a_shard_that_is_not_the_tensor_it_should_be_is_refused(tmp_path: Path, part: Any) -> None:
    two_chunks(tmp_path / "foreign", part=part)
    with pytest.raises(CheckpointUnusable, match=r"w in .*__0_0\.distcp is"):
        ForeignTensors(tmp_path / "foreign").read("w")


class Hostile:
    """An object whose unpickling runs a program."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def hostile_pickles(mark: str) -> dict[str, bytes]:
    """Pickles that would leave the file `mark` behind if anything in them ran."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    shell = Hostile(os.system, f"touch {mark}")
    build = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return {
        "bare": pickle.dumps(shell),
        "inside": pickle.dumps(Metadata({"w": BytesStorageMetadata()}, planner_data={"x": shell}, storage_data={})),
        "name": pickle.dumps(Metadata({"w": BytesStorageMetadata()}, storage_data={shell: 1})),
        "eval": pickle.dumps(Hostile(eval, f"open({mark!r}, 'w')")),
        "getattr": pickle.dumps(Hostile(getattr, "a", "upper")),
        "inst": f"(S'touch {mark}'\nios\nsystem\n.".encode(),
        "builtin exec": f"c__builtin__\nexec\n(S'open({mark!r}, \"w\")'\ntR.".encode(),
        "load": pickle.dumps(Hostile(torch.load, mark)),
        "hub": pickle.dumps(Hostile(torch.hub.load, "a/b", "c")),
        # A class is replaced by what a later object would call.
        "class": build + b"(NV__setstate__\n" + b"cos\nsystem\n" + b"tb.",
        "persistent": b"\x80\x04X\x01\x00\x00\x00xQ.",
        "extension": b"\x80\x04\x82\x01.",
        "dotted": b"\x80\x04\x8c\x05torch\x94\x8c\x0b_C._os.name\x94\x93.",
    }


@pytest.mark.parametrize("name", hostile_pickles(""))
def test_nothing_in_the_metadata_can_run(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "foreign"
    two_chunks(folder)
    (folder / ".metadata").write_bytes(hostile_pickles(str(tmp_path / "owned"))[name])
    with pytest.raises(CheckpointUnusable, match="is not the metadata of a distributed checkpoint"):
        convert.open_dcp(folder)
    assert not (tmp_path / "owned").exists()


def test_nothing_in_a_shard_can_run(tmp_path: Path) -> None:
    two_chunks(tmp_path / "foreign", part=Hostile(os.system, f"touch {tmp_path}/owned"))
    with pytest.raises(CheckpointUnusable, match="is not a plain tensor"):
        ForeignTensors(tmp_path / "foreign").read("w")
    assert not (tmp_path / "owned").exists()
    # The same bytes, loaded as anybody would, do run: the test can fail.
    torch.load(tmp_path / "foreign/__0_0.distcp", weights_only=False)
    assert (tmp_path / "owned").exists()


def test_what_is_no_tensor_is_never_opened(tmp_path: Path) -> None:
    folder = save_foreign({"w": torch.ones(3), "bad": Hostile(os.system, f"touch {tmp_path}/owned")}, tmp_path / "f", 1)
    source = ForeignTensors(folder)
    assert (list(source.forms), source.not_tensors) == (["w"], ["bad"])
    assert torch.equal(source.read("w"), torch.ones(3))
    assert not (tmp_path / "owned").exists()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_the_metadata_is_a_refusal_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "foreign"
    if not folder.exists():
        two_chunks(folder)
        (folder / "whole").write_bytes((folder / ".metadata").read_bytes())
    content = bytearray((folder / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / ".metadata").write_bytes(bytes(content))
    try:
        source = ForeignTensors(folder)
        for name in source.forms:
            source.read(name)
    except CheckpointUnusable:
        pass


def test_records_are_made_anew_for_each_file(tmp_path: Path) -> None:
    two_chunks(tmp_path / "foreign")
    first, second = (read_metadata(tmp_path / "foreign/.metadata") for _ in range(2))
    assert type(first) is not type(second)
    assert type(first).__name__ == "Metadata"
    assert not isinstance(first, Metadata)


# -- what does not fit ----------------------------------------------------------------------------------------------


def test_missing_unexpected_and_other_shapes_are_all_named(pixels: Path, tmp_path: Path) -> None:
    weights = load_file(pixels / "transformer" / STEM)
    del weights["proj_in.weight"]
    weights["stray"] = torch.ones(1)
    weights["proj_out.bias"] = torch.ones(5)
    source = convert.open_dcp(save_foreign(weights, tmp_path / "foreign"))
    with pytest.raises(CheckpointUnusable) as refused:
        convert.write_diffusers(source, pixels / "transformer", None, "", tmp_path / "out")
    for part in (
        "3 differences",
        "missing proj_in.weight",
        "unexpected stray",
        "proj_out.bias is [5], the config says",
    ):
        assert part in refused.value.message
    assert not (tmp_path / "out").exists()


def test_a_prefix_is_named_and_never_stripped_unasked(pixels: Path, tmp_path: Path) -> None:
    weights = load_file(pixels / "transformer" / STEM)
    source = convert.open_dcp(save_foreign({"model": {"net": weights}}, tmp_path / "foreign"))
    with pytest.raises(CheckpointUnusable) as refused:
        convert.write_diffusers(source, pixels / "transformer", None, "", tmp_path / "out")
    assert refused.value.hint == "they have a prefix: add --strip-prefix model.net."


def test_heads_that_no_image_passes_through_may_be_absent(pixels: Path, tmp_path: Path) -> None:
    weights = load_file(pixels / "transformer" / STEM)
    del weights["lm_head.weight"]
    source = convert.open_dcp(save_foreign(weights, tmp_path / "foreign"))
    forms, _ = convert.write_diffusers(source, pixels / "transformer", None, "", tmp_path / "out")
    assert forms.keys() == weights.keys()


def test_a_file_that_the_index_lists_and_is_gone_is_a_refusal(
    pixels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    convert.write_dcp(pixels / "transformer", tmp_path / "dcp")
    sorted((tmp_path / "dcp").glob("*.safetensors"))[-1].unlink()
    with pytest.raises(CheckpointUnusable, match=r"does not hold what its model\.safetensors\.index\.json lists"):
        convert.open_dcp(tmp_path / "dcp")


def test_a_config_is_never_guessed(pixels: Path, tmp_path: Path) -> None:
    save_foreign({"a": torch.ones(1)}, tmp_path / "foreign")
    with pytest.raises(UsageRefused, match="nothing says what model") as refused:
        convert.config_folder(tmp_path / "foreign", None, None)
    assert "--config FOLDER" in refused.value.hint
    for config, like in ((tmp_path / "foreign", None), (None, tmp_path / "foreign"), (pixels, pixels)):
        with pytest.raises(UsageRefused, match=r"has no config\.json"):
            convert.config_folder(tmp_path / "foreign", config, like)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(CheckpointUnusable, match="declares 'UNet2DConditionModel'"):
        convert.write_diffusers(convert.open_dcp(tmp_path / "foreign"), tmp_path, None, "", tmp_path / "out")
    with pytest.raises(UsageRefused, match="is no base"):
        convert.refuse_no_base(tmp_path)
    with pytest.raises(CheckpointUnusable, match="neither a diffusers folder nor a distributed checkpoint"):
        convert.open_dcp(pixels / "tokenizer")
