"""Loading is strict: every tensor is accounted for by name, and what the profile says is what is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nftctl.errors import CheckpointUnusable, ProfileRefused, UsageRefused
from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.profile.schema import Model

from .bases import build_transformer, write_pixel_base

CPU = torch.device("cpu")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
Load = Callable[..., Family]


@pytest.fixture
def base(tmp_path: Path, pixel_base: Path) -> Path:
    return Path(shutil.copytree(pixel_base, tmp_path / "base"))


@pytest.fixture
def load(make_model: Callable[..., Model]) -> Load:
    def run(folder: Path, skip_keys: tuple[str, ...] = (), seed: int = 0, **changes: object) -> Family:
        return load_family(make_model(**changes), str(folder), "cosmos3", CPU, skip_keys=skip_keys, seed=seed)

    return run


def rewrite(base: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(base / WEIGHTS)
    tensors = {name: t.clone() for name, t in tensors.items()}
    change(tensors)
    save_file(tensors, base / WEIGHTS)


def test_every_tensor_that_is_used_is_loaded_and_counted(base: Path, load: Load) -> None:
    family = load(base)
    tensors = load_file(base / WEIGHTS)
    tower, denoiser = family.encoder.tower, family.denoiser  # type: ignore[attr-defined]
    loaded = dict(tower.named_parameters()) | dict(denoiser.named_parameters())
    assert all(torch.equal(p, tensors[name]) for name, p in loaded.items())
    assert not any(p.requires_grad for p in loaded.values())
    # The head for text, the final norm of the prompt's tower, and of its last layer all but keys and values: 2 + 7.
    assert len(loaded) == len(tensors) - 9
    assert (family.report.loaded, family.report.expected) == (len(loaded), len(loaded))
    assert family.lora_prefix == "transformer"


def test_the_loaded_family_is_the_transformer_that_was_saved(base: Path, load: Load) -> None:
    from nftctl.model.cosmos3 import split

    family = load(base)
    tower, denoiser = split(build_transformer())
    x, sigma = torch.randn(2, 3, 1, 8, 12), torch.tensor([0.3, 0.9])
    ids = [family.encoder.tokenize(prompt, False) for prompt in ("a", "bcd")]  # type: ignore[attr-defined]
    batch = family.batch(family.encoder.encode(["a", "bcd"]))
    with torch.no_grad():
        torch.testing.assert_close(family.denoiser(x, sigma, batch), denoiser(x, sigma, tower.run(ids)))


def test_bfloat16_leaves_the_timestep_embedder_in_float32(base: Path, load: Load) -> None:
    family = load(base, dtype="bfloat16")
    dtypes = {name: p.dtype for name, p in family.denoiser.named_parameters()}
    assert {d for n, d in dtypes.items() if n.startswith("time_embedder.")} == {torch.float32}
    assert {d for n, d in dtypes.items() if not n.startswith("time_embedder.")} == {torch.bfloat16}


def test_missing_unexpected_and_misshapen_tensors_are_all_named(base: Path, load: Load) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.1.self_attn.to_k.weight"]
        del tensors["norm.weight"]
        tensors["layers.0.self_attn.surprise"] = torch.zeros(2)
        tensors["proj_in.bias"] = torch.zeros(7)

    rewrite(base, change)
    with pytest.raises(CheckpointUnusable) as refusal:
        load(base)
    text = refusal.value.message
    assert "missing layers.1.self_attn.to_k.weight" in text
    assert "missing norm.weight" in text
    assert "unexpected layers.0.self_attn.surprise" in text
    assert "proj_in.bias is [7], the config says [30]" in text
    assert "4 of" in text


def test_the_head_for_text_may_be_left_out(base: Path, load: Load) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    rewrite(base, change)
    assert load(base).report.initialised == ()


def test_integers_are_not_weights(base: Path, load: Load) -> None:
    rewrite(base, lambda tensors: tensors.update({"proj_in.bias": torch.zeros(30, dtype=torch.int64)}))
    with pytest.raises(CheckpointUnusable, match=r"proj_in\.bias is torch\.int64"):
        load(base)


@pytest.mark.parametrize("damage", ["truncated", "text", "gone"])
def test_a_damaged_weight_file_is_refused(base: Path, load: Load, damage: str) -> None:
    file = base / WEIGHTS
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "text":
        file.write_text("version https://git-lfs.github.com/spec/v1")
    else:
        file.unlink()
    with pytest.raises(CheckpointUnusable, match=r"diffusion_pytorch_model\.safetensors"):
        load(base)


def shard_weights(base: Path) -> list[Path]:
    """Split the weights over two files with an index, as large bases come."""
    tensors = load_file(base / WEIGHTS)
    names = sorted(tensors)
    parts = {f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, base / "transformer" / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (base / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (base / WEIGHTS).unlink()
    return [base / "transformer" / file for file in parts]


def test_a_base_in_several_files_loads_whole_or_not_at_all(base: Path, load: Load) -> None:
    whole = load(base).denoiser.state_dict()
    files = shard_weights(base)
    split = load(base).denoiser.state_dict()
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[name], split[name]) for name in whole)
    files[1].unlink()
    with pytest.raises(CheckpointUnusable, match="has not diffusion_pytorch_model-00002-of-00002"):
        load(base)


def test_skipped_keys_keep_a_seeded_start(base: Path, load: Load) -> None:
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    skip = ("layers.1.self_attn.add_q_proj", "2.self_attn.norm_added_q", "embed_tokens")
    first, again, other = load(base, skip), load(base, skip), load(base, skip, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    name = "layers.1.self_attn.add_q_proj.weight"
    values = [f.denoiser.get_parameter(name) for f in (first, again, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert not torch.equal(values[0], load_file(base / WEIGHTS)[name])
    assert float(values[0].abs().max()) <= 30**-0.5
    assert torch.equal(first.denoiser.get_parameter("layers.2.self_attn.norm_added_q.weight"), torch.ones(12))
    assert first.report.initialised == (
        "embed_tokens.weight",
        "layers.1.self_attn.add_q_proj.weight",
        "layers.2.self_attn.norm_added_q.weight",
    )
    assert first.report.loaded == first.report.expected - 3


def test_a_skipped_tensor_may_be_missing_or_of_another_shape(base: Path, load: Load) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["proj_in.weight"]
        tensors["proj_in.bias"] = torch.zeros(7)

    rewrite(base, change)
    assert load(base, ("proj_in",)).denoiser.get_parameter("proj_in.bias").shape == (30,)


def test_a_skip_key_that_matches_nothing_is_an_error(base: Path, load: Load) -> None:
    with pytest.raises(ProfileRefused) as refusal:
        load(base, ("proj_in", "not_there", "nor_this"))
    assert [f.code for f in refusal.value.findings] == ["init-key-matches-nothing"] * 2
    assert all(f.key == "rl.init_keys_to_skip_loading" for f in refusal.value.findings)
    assert "not_there" in refusal.value.findings[0].message


@pytest.mark.parametrize("config", ["{", "[]", '{"_class_name": "SD3Transformer2DModel"}', "{}"])
def test_a_config_of_something_else_is_refused(base: Path, load: Load, config: str) -> None:
    (base / "transformer/config.json").write_text(config)
    with pytest.raises(CheckpointUnusable):
        load(base)


def test_three_channels_alone_do_not_make_a_pixel_base(base: Path, load: Load) -> None:
    (base / "model_index.json").write_text(json.dumps({"vae": ["diffusers", "AutoencoderKLWan"]}))
    with pytest.raises(ProfileRefused) as refusal:
        load(base)
    assert refusal.value.findings[0].code == "vae-missing"


def test_a_missing_tokenizer_is_a_finding_and_another_folder_serves(base: Path, load: Load, tmp_path: Path) -> None:
    moved = Path(shutil.move(base / "tokenizer", tmp_path / "elsewhere"))
    with pytest.raises(ProfileRefused) as refusal:
        load(base)
    assert refusal.value.findings[0].code == "tokenizer-missing"
    assert load(base, tokenizer=str(moved)).name == "cosmos3"
    shutil.move(moved, base / "text_tokenizer")
    assert load(base).name == "cosmos3"


def test_a_shape_that_the_vae_cannot_make_is_refused(vae_base: Path, load: Load) -> None:
    with pytest.raises(ProfileRefused) as refusal:
        load(vae_base, height=20, width=33)
    assert [f.key for f in refusal.value.findings] == ["model.height", "model.width"]
    assert all("multiple of 8" in f.message for f in refusal.value.findings)


def test_a_vae_of_other_channels_is_refused(vae_base: Path, tmp_path: Path, load: Load) -> None:
    base = write_pixel_base(tmp_path, build_transformer(latent_channel=4, patch_latent_dim=16))
    with pytest.raises(CheckpointUnusable, match="16 latent channels"):
        load(base, vae=str(vae_base / "vae"), height=16, width=16)


def test_unknown_families_and_folders_are_refused(make_model: Callable[..., Model], tmp_path: Path) -> None:
    with pytest.raises(UsageRefused) as refusal:
        load_family(make_model(), str(tmp_path), "cosmos4", CPU)
    assert "cosmos3" in refusal.value.hint
    with pytest.raises(CheckpointUnusable, match="is not a folder"):
        load_family(make_model(), str(tmp_path / "nowhere"), "cosmos3", CPU)
