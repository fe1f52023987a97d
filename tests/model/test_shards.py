"""A base that is a distributed checkpoint of a transformer: it loads as the folder it came from, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nftctl.errors import CheckpointUnusable, ProfileRefused
from nftctl.model import convert
from nftctl.model.registry import load_family
from nftctl.model.weights import Tensors
from nftctl.profile.artifacts import inspect_folder
from nftctl.profile.schema import Model
from nftctl.run.hashing import fingerprint_base, fingerprint_denoiser
from nftctl.tensorblocks import SHARD_INDEX, shard_files
from nftctl.tensorfile import STEM

from .bases import build_transformer, write_pixel_base
from .sd3_bases import write_sd3_base
from .shards import cut, shard_name

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pixel_base(tmp_path_factory.mktemp("pixels"), build_transformer(dtype=torch.bfloat16))


@pytest.fixture
def shards(pixels: Path, tmp_path: Path) -> Path:
    """The same in three files, every tensor cut."""
    return cut(pixels, tmp_path / "shards", 3)


def load(folder: Path, pixels: Path, **options: Any) -> Any:
    model = Model(
        height=8, width=8, system_prompt=False, resolution_template=False, tokenizer=str(pixels / "tokenizer")
    )
    return load_family(model, str(folder), "cosmos3", CPU, **options)


def values(family: Any) -> dict[str, torch.Tensor]:
    return {**family.denoiser.state_dict(), **{f"tower.{n}": v for n, v in family.encoder.tower.state_dict().items()}}


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("skip", [(), ("layers.1.mlp_moe_gen",)])
def test_it_loads_as_the_folder_that_it_came_from(pixels: Path, shards: Path, skip: tuple[str], unread: bool) -> None:
    one, other = (load(place, pixels, skip_keys=skip, seed=4, unread=unread) for place in (pixels, shards))
    for family in (one, other):
        if unread:
            assert all(p.is_meta for p in family.denoiser.parameters())
            family.stored.fill(family.denoiser, CPU)
    assert one.report == other.report
    assert one.report.loaded == one.report.expected - (3 if skip else 0)
    assert (one.clamp_x0, one.latent_shape) == (other.clamp_x0, other.latent_shape) == (True, (3, 1, 8, 8))
    old, new = values(one), values(other)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_any_rows_of_a_cut_tensor_are_its_rows(pixels: Path, shards: Path) -> None:
    whole = load_file(pixels / "transformer" / STEM)
    with ExitStack() as stack:
        tensors = Tensors(shard_files(shards), stack)
        for name, value in whole.items():
            for rows in (None, slice(None), slice(0, 1), slice(3, 12), slice(9, 11), slice(5, 5), slice(11, 99)):
                wanted = value if rows is None else value[rows]
                found = tensors.read(name, rows)
                assert found.dtype == value.dtype, name
                assert torch.equal(found, wanted), (name, rows)


def test_what_convert_writes_is_a_base_with_its_config_in_the_part_or_beside(pixels: Path, tmp_path: Path) -> None:
    convert.write_dcp(pixels / "transformer", tmp_path / "dcp")
    first = values(load(tmp_path / "dcp", pixels))
    shutil.move(tmp_path / "dcp/transformer/config.json", tmp_path / "dcp/config.json")
    second = values(load(tmp_path / "dcp", pixels))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["proj_in.weight"], load_file(pixels / "transformer" / STEM)["proj_in.weight"])


# -- the fingerprint ------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_denoiser_however_it_is_cut(pixels: Path, shards: Path, tmp_path: Path) -> None:
    convert.write_dcp(pixels / "transformer", tmp_path / "dcp")
    found = {fingerprint_base(place) for place in (shards, tmp_path / "dcp", cut(pixels, tmp_path / "five", 5))}
    shutil.move(tmp_path / "dcp/transformer/config.json", tmp_path / "dcp/config.json")
    assert found == {fingerprint_denoiser(pixels), fingerprint_base(tmp_path / "dcp")}
    # A pipeline folder is more than its denoiser, and that counts.
    assert fingerprint_base(pixels) not in found


@pytest.mark.parametrize("what", ["number", "name", "config", "dtype"])
def test_another_denoiser_has_another_fingerprint(shards: Path, what: str) -> None:
    before = fingerprint_base(shards)
    file = shards / shard_name(2)
    if what == "config":
        (shards / "transformer/config.json").write_text("{}")
    else:
        data = bytearray(file.read_bytes())
        if what == "number":
            data[-1] ^= 1
        elif what == "name":
            data = data.replace(b'"norm_moe_gen.weight"', b'"norm_moe_gem.weight"')
        file.write_bytes(data)
    if what == "dtype":
        for rank in (1, 2, 3):
            path = shards / shard_name(rank)
            path.write_bytes(path.read_bytes().replace(b'"dtype":"BF16"', b'"dtype":"F16" '))
    if what == "name":
        with pytest.raises(CheckpointUnusable, match=r"norm_moe_gen\.weight: its 2 blocks do not cover"):
            fingerprint_base(shards)
    else:
        assert fingerprint_base(shards) != before


# -- what is refused ------------------------------------------------------------------------------------------------


def lose_the_middle(folder: Path) -> None:
    (folder / shard_name(2)).unlink()


def lose_the_last(folder: Path) -> None:
    (folder / shard_name(3)).unlink()


def repeat_one(folder: Path) -> None:
    shutil.copy(folder / shard_name(2), folder / "again.safetensors")


def add_a_tensor(folder: Path) -> None:
    save_file({"stray": torch.ones(2)}, folder / "stray.safetensors")


def cut_one_off(folder: Path) -> None:
    (folder / shard_name(2)).write_bytes((folder / shard_name(2)).read_bytes()[:-1])


def lose_the_config(folder: Path) -> None:
    (folder / "transformer/config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_the_middle, r"shards: tensor time_embedder\.linear_1\.bias: its 2 blocks do not cover the shape \[30\]"),
        (lose_the_last, r"proj_in\.weight is \[20, 12\], the config says \[30, 12\]"),
        (repeat_one, r"tensor embed_tokens\.weight: its 4 blocks do not cover the shape \[300, 30\] exactly once"),
        (add_a_tensor, r"unexpected stray"),
        (cut_one_off, r"shard-00002-model-00001-of-00001\.safetensors is not a sound safetensors file"),
        (lose_the_config, r"config\.json cannot be read"),
    ],
)
def test_a_damaged_one_is_refused_by_name(
    pixels: Path, shards: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(shards)
    with pytest.raises(CheckpointUnusable, match=said) as refused:
        load(shards, pixels)
    assert len(refused.value.message) < 9000


def test_files_are_those_of_the_index(pixels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    convert.write_dcp(pixels / "transformer", tmp_path / "dcp")
    files = shard_files(tmp_path / "dcp")
    assert len(files) > 3
    save_file({"stray": torch.ones(2)}, tmp_path / "dcp/stray.safetensors")
    files[1].unlink()
    with pytest.raises(CheckpointUnusable, match="does not hold what") as refused:
        load(tmp_path / "dcp", pixels)
    assert refused.value.message.endswith(f"lists: {files[1].name} is missing, stray.safetensors was added")
    (tmp_path / "dcp" / SHARD_INDEX).write_text("[]")
    with pytest.raises(CheckpointUnusable, match="is not a safetensors index"):
        load(tmp_path / "dcp", pixels)


def test_a_prefix_is_refused_with_the_command_that_strips_it(pixels: Path, tmp_path: Path) -> None:
    weights = load_file(pixels / "transformer" / STEM)
    (tmp_path / "my dcp/transformer").mkdir(parents=True)
    save_file({f"model.net.{name}": value for name, value in weights.items()}, tmp_path / "my dcp/model.safetensors")
    shutil.copy(pixels / "transformer/config.json", tmp_path / "my dcp/transformer")
    with pytest.raises(CheckpointUnusable, match=r"unexpected model\.net\.proj_in\.weight") as refused:
        load(tmp_path / "my dcp", pixels)
    assert refused.value.hint == (
        f"they have a prefix: nftctl convert '{tmp_path}/my dcp' NEW --like BASE --strip-prefix model.net."
    )


def test_what_a_folder_is_is_told_from_its_files(pixels: Path, shards: Path, tmp_path: Path) -> None:
    assert inspect_folder(pixels).kind == "diffusers"
    assert inspect_folder(shards).kind == "dcp"
    assert not inspect_folder(shards).is_pickled
    part = inspect_folder(pixels / "transformer")
    assert (part.kind, "one part of a base" in part.reason) == ("unreadable", True)
    # An index makes it a pipeline folder that lacks something, whatever lies beside it.
    (shards / "model_index.json").write_text(json.dumps({"vae": [None, None]}))
    shutil.rmtree(shards / "transformer")
    assert inspect_folder(shards).reason == f"{shards} has no transformer/config.json"
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/.metadata").write_bytes(b"\x80")
    assert inspect_folder(tmp_path / "pickled").is_pickled


def test_latents_of_a_checkpoint_with_more_channels_need_a_vae(vae_base: Path, tmp_path: Path) -> None:
    shards = cut(vae_base, tmp_path / "shards", 2)
    options: dict[str, Any] = {"height": 16, "width": 16, "dtype": "float32"}
    parts = {"vae": str(vae_base / "vae"), "tokenizer": str(vae_base / "text_tokenizer")}
    family = load_family(Model(**options, **parts), str(shards), "cosmos3", CPU)
    assert (family.clamp_x0, family.latent_shape) == (False, (16, 1, 2, 2))
    with pytest.raises(ProfileRefused) as refused:
        load_family(Model(**options, tokenizer=parts["tokenizer"]), str(shards), "cosmos3", CPU)
    assert [finding.code for finding in refused.value.findings] == ["vae-missing"]


def test_stable_diffusion_has_no_text_encoders_in_a_checkpoint(tmp_path: Path) -> None:
    base = write_sd3_base(tmp_path / "base")
    shards = cut(base, tmp_path / "shards", 2)
    with pytest.raises(CheckpointUnusable, match="text encoders"):
        load_family(Model(height=32, width=32, vae=str(base / "vae")), str(shards), "sd3", CPU)
