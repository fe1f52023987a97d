"""A Stable Diffusion 3 base from disk: strict loading, prompts encoded once, with and without T5, and its decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file

from nftctl.errors import CheckpointUnusable, ProfileRefused, TrainingFailed
from nftctl.model.decoder import KlDecoder
from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.model.sd3_encoder import PromptEmbeds, Sd3PromptEncoder
from nftctl.profile.schema import Model
from nftctl.run.hashing import fingerprint_base

from .sd3_bases import build_pipeline, write_sd3_base

CPU = torch.device("cpu")
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
PROMPTS = ["a red seven", "", 'кот, "three" of them', "a red seven"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd3_base(tmp_path_factory.mktemp("sd3"))


@pytest.fixture
def base(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "base"))


def load(base: Path, skip_keys: tuple[str, ...] = (), seed: int = 0, **changes: Any) -> Family:
    model = Model(**{"height": 64, "width": 96, "dtype": "float32", **changes})
    return load_family(model, str(base), "sd3", CPU, skip_keys=skip_keys, seed=seed)


def embeds(family: Family, prompts: list[str], **how: Any) -> list[PromptEmbeds]:
    found = family.encoder.encode(prompts, **how)
    assert all(isinstance(one, PromptEmbeds) for one in found)
    return found  # type: ignore[return-value]


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# -- weights ------------------------------------------------------------------------------------------------------


def test_every_tensor_is_loaded_and_counted(base: Path) -> None:
    tensors = load_file(base / TRANSFORMER)
    family = load(base)
    loaded = dict(family.denoiser.named_parameters())
    assert all(torch.equal(p, tensors[name]) for name, p in loaded.items())
    assert loaded.keys() == tensors.keys() - {"pos_embed.pos_embed"}
    assert (family.report.loaded, family.report.expected) == (len(tensors), len(tensors))
    assert not any(p.requires_grad for p in family.denoiser.parameters())
    assert not any(p.is_meta for p in (*family.denoiser.parameters(), *family.denoiser.buffers()))
    assert (family.latent_shape, family.clamp_x0, family.lora_prefix) == ((4, 1, 8, 12), False, "transformer")


def test_positions_are_those_of_the_file_cut_to_the_size(base: Path) -> None:
    """Cut from the middle of 12 x 12, in the file's own values: a table that was trained on is not a formula."""
    rewrite(base / TRANSFORMER, lambda t: t.update({"pos_embed.pos_embed": torch.randn(1, 144, 24).half()}))
    table = load_file(base / TRANSFORMER)["pos_embed.pos_embed"].float().view(12, 12, 24)
    family = load(base)
    buffers = dict(family.denoiser.named_buffers())
    assert list(buffers) == ["pos_embed.pos_embed"]
    assert torch.equal(buffers["pos_embed.pos_embed"], table[4:8, 3:9].reshape(1, 24, 24))
    with pytest.raises(ValueError, match="loaded for latents of"):
        family.denoiser(torch.zeros(1, 4, 1, 12, 8), torch.tensor([0.5]), embeds(family, ["a"])[0])


def test_the_loaded_family_is_the_transformer_that_was_saved(base: Path) -> None:
    family = load(base)
    stock: Any = SD3Transformer2DModel.from_pretrained(base / "transformer")
    x, sigma = torch.randn(2, 4, 1, 8, 12), torch.tensor([0.3, 0.9])
    batch = PromptEmbeds.batch(embeds(family, PROMPTS[:2]))
    with torch.no_grad():
        want = stock(x[:, :, 0], batch.embeds, batch.pooled, sigma * 1000, return_dict=False)[0]
        torch.testing.assert_close(family.denoiser(x, sigma, batch)[:, :, 0], want, rtol=1e-5, atol=1e-5)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(base: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["transformer_blocks.1.attn.to_k.weight"]
        del tensors["pos_embed.pos_embed"]
        tensors["surprise"] = torch.zeros(2)
        tensors["proj_out.bias"] = torch.zeros(7)

    rewrite(base / TRANSFORMER, change)
    with pytest.raises(CheckpointUnusable) as refusal:
        load(base)
    for line in (
        "missing transformer_blocks.1.attn.to_k.weight",
        "missing pos_embed.pos_embed",
        "unexpected surprise",
        "proj_out.bias is [7], the config says [16]",
        "4 of",
    ):
        assert line in refusal.value.message


def test_skipped_keys_start_anew_from_seed_and_name(base: Path) -> None:
    want = load_file(base / TRANSFORMER)
    rewrite(base / TRANSFORMER, lambda t: t["pos_embed.pos_embed"].zero_())
    first, again, other = (load(base, ("pos_embed", "norm_q"), seed=seed) for seed in (1, 1, 2))
    for family in (first, again, other):
        assert family.report.loaded == family.report.expected - len(family.report.initialised)
        assert {"pos_embed.pos_embed", "pos_embed.proj.weight"} < set(family.report.initialised)
        # The table has no seed: it is the formula's again.
        table = want["pos_embed.pos_embed"].view(12, 12, 24)[4:8, 3:9].reshape(1, 24, 24)
        torch.testing.assert_close(dict(family.denoiser.named_buffers())["pos_embed.pos_embed"], table)
        assert family.denoiser.get_parameter("transformer_blocks.0.attn.norm_q.weight").tolist() == [1.0] * 8
    kernels = [f.denoiser.get_parameter("pos_embed.proj.weight") for f in (first, again, other)]
    assert torch.equal(kernels[0], kernels[1])
    assert not torch.equal(kernels[0], kernels[2])
    assert float(kernels[0].abs().max()) <= (4 * 2 * 2) ** -0.5  # the uniform law of a fresh convolution


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_3"])
def test_text_encoders_are_loaded_strictly(base: Path, part: str) -> None:
    file = base / part / "model.safetensors"
    lost = next(name for name in load_file(file) if "layer_norm" in name)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[lost]
        tensors["surprise"] = torch.zeros(2)

    rewrite(file, change)
    with pytest.raises(CheckpointUnusable, match="do not match their config") as refusal:
        load(base)
    assert lost in refusal.value.message
    assert "surprise" in refusal.value.message


def test_pickled_text_encoders_are_not_opened(base: Path) -> None:
    weights = base / "text_encoder" / "model.safetensors"
    torch.save(load_file(weights), base / "text_encoder" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(CheckpointUnusable, match="no CLIPTextModelWithProjection can be read"):
        load(base)


def test_parts_that_do_not_fit_together_are_refused(base: Path) -> None:
    file = base / "transformer" / "config.json"
    config = json.loads(file.read_text())
    for changes, said in (
        ({"joint_attention_dim": 24}, "at most 24; T5 gives 32"),
        ({"pooled_projection_dim": 19}, "pool 20 numbers, not 19"),
        ({"in_channels": 3, "out_channels": 3}, "4 latent channels"),
        ({"out_channels": 5}, "makes 5 channels of 4"),
        ({"pos_embed_max_size": 0}, "pos_embed_max_size"),
        ({"_class_name": "FluxTransformer2DModel"}, "family sd3 needs a SD3Transformer2DModel"),
    ):
        file.write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointUnusable, match=said):
            load(base)


def test_a_tokenizer_with_more_tokens_than_the_encoder_embeds_is_refused(base: Path) -> None:
    shutil.rmtree(base / "tokenizer_3")
    shutil.copytree(base / "tokenizer_2", base / "tokenizer_3")
    with pytest.raises(CheckpointUnusable, match=r"514 tokens, its encoder embeds 258"):
        load(base)


@pytest.mark.parametrize(
    ("changes", "keys", "said"),
    [
        ({"height": 72, "width": 100}, ["model.height", "model.width"], "multiple of 16"),
        ({"height": 208}, ["model.height"], "192 pixels at most"),
        ({"vae": "nowhere"}, ["model.vae"], "there is no folder"),
    ],
)
def test_shapes_and_folders_that_cannot_be_are_findings(
    base: Path, changes: dict[str, Any], keys: list[str], said: str
) -> None:
    with pytest.raises(ProfileRefused) as refusal:
        load(base, **changes)
    assert [finding.key for finding in refusal.value.findings] == keys
    assert all(said in finding.message for finding in refusal.value.findings)


@pytest.mark.parametrize(
    "part", ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae", "tokenizer", "tokenizer_3"]
)
def test_the_fingerprint_covers_every_part(base: Path, part: str) -> None:
    before = fingerprint_base(base)
    folder = base / part
    if part.startswith("tokenizer"):
        file = folder / "tokenizer.json"
        file.write_text(file.read_text() + "\n")
    else:
        rewrite(next(folder.glob("*.safetensors")), lambda tensors: next(iter(tensors.values())).add_(1))
    assert fingerprint_base(base) != before


# -- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t5", [True, False])
def test_embeddings_are_upstream_s(base: Path, t5: bool) -> None:
    pipeline = build_pipeline(t5=t5)
    for prompt, found in zip(PROMPTS, embeds(load(base, t5=t5), PROMPTS), strict=True):
        with torch.no_grad():
            want, _, pooled, _ = pipeline.encode_prompt(prompt, None, None, do_classifier_free_guidance=False)
        assert float((found.embeds - want).norm() / want.norm()) <= 1e-5
        assert float((found.pooled - pooled).norm() / pooled.norm()) <= 1e-5
        assert found.embeds.shape == (1, 20 + 256, 32)
        assert bool(found.embeds[:, 20:].any()) is t5


def test_a_base_without_t5_is_one_whose_t5_is_switched_off(base: Path, tmp_path: Path) -> None:
    bare = write_sd3_base(tmp_path / "bare", t5=False)
    assert json.loads((bare / "model_index.json").read_text())["text_encoder_3"] == [None, None]
    assert not (bare / "text_encoder_3").exists()
    off, absent, whole = load(base, t5=False), load(bare), load(base)
    shutil.rmtree(base / "text_encoder_3")
    assert torch.equal(embeds(load(base, t5=False), ["a"])[0].embeds, embeds(off, ["a"])[0].embeds)
    with pytest.raises(CheckpointUnusable, match="text_encoder_3"):
        load(base)
    for family in (off, absent):
        assert isinstance(family.encoder, Sd3PromptEncoder)
        assert family.encoder.parts.t5 is None
    x, sigma = torch.randn(1, 4, 1, 8, 12), torch.tensor([0.7])
    with torch.no_grad():
        seen = [family.denoiser(x, sigma, embeds(family, ["a"])[0]) for family in (off, absent, whole)]
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2], atol=1e-3)


def test_each_prompt_is_encoded_once_and_alone(base: Path) -> None:
    family = load(base)
    first = embeds(family, PROMPTS)
    assert family.encoder.encoded == 3
    assert first[0] is first[3]
    assert embeds(family, [""], negative=True)[0] is first[1]
    assert family.encoder.encoded == 3
    alone = [embeds(load(base), [prompt])[0] for prompt in PROMPTS]
    assert all(torch.equal(a.embeds, b.embeds) for a, b in zip(first, alone, strict=True))
    assert not any(one.embeds.requires_grad for one in first)


def test_memory_of_prompts_is_bounded(base: Path) -> None:
    family = load(base)
    assert isinstance(family.encoder, Sd3PromptEncoder)
    one = embeds(family, ["a"])[0].nbytes
    bounded = Sd3PromptEncoder(family.encoder.parts, family.encoder.pipeline.transformer, CPU, cache_bytes=2 * one)
    for prompt in ("a", "b", "a", "c", "a", "b"):  # b is the oldest when c comes
        bounded.encode([prompt])
    assert bounded.encoded == 4


def test_encoders_have_the_precision_that_was_asked_for_and_are_frozen(base: Path) -> None:
    family = load(base, dtype="bfloat16")
    assert isinstance(family.encoder, Sd3PromptEncoder)
    for encoder in family.encoder.parts.encoders():
        assert {p.dtype for p in encoder.parameters()} <= {torch.bfloat16, torch.float32}
        assert torch.bfloat16 in {p.dtype for p in encoder.parameters()}
        assert not any(p.requires_grad for p in encoder.parameters())
        assert not encoder.training
    found = embeds(family, ["a"])[0]
    assert (found.embeds.dtype, found.pooled.dtype) == (torch.bfloat16, torch.bfloat16)
    assert {p.dtype for p in family.denoiser.parameters()} == {torch.bfloat16}
    v = family.denoiser(torch.randn(1, 4, 1, 8, 12), torch.tensor([0.5]), found)
    assert v.dtype == torch.float32


# -- decoder ------------------------------------------------------------------------------------------------------


def decoder(base: Path, **changes: Any) -> KlDecoder:
    return KlDecoder.load(base / "vae", Model(**changes), CPU)


def latents(rows: int, side: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, 1, side, side, generator=torch.Generator().manual_seed(0))


def test_images_are_the_pipeline_s(base: Path) -> None:
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(base)
    x0, config = latents(2), pipeline.vae.config
    with torch.no_grad():
        decoded = pipeline.vae.decode(x0[:, :, 0] / config.scaling_factor + config.shift_factor).sample
    want = pipeline.image_processor.postprocess(decoded, output_type="pt").permute(0, 2, 3, 1) * 255
    got = decoder(base).decode(x0)
    assert got.shape == (2, 1, 64, 64, 3)
    assert got.dtype == torch.uint8
    assert float((got[:, 0] - want).abs().max()) <= 0.51
    assert got.unique().numel() > 20


def calls_of(vae_decoder: KlDecoder, x0: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """The images, and the shapes that the convolutional decoder was really given."""
    seen: list[tuple[int, ...]] = []
    hook = vae_decoder.vae.decoder.register_forward_pre_hook(lambda module, given: seen.append(tuple(given[0].shape)))
    images = vae_decoder.decode(x0)
    hook.remove()
    return images.int(), seen


def test_slicing_decodes_one_image_at_a_time(base: Path) -> None:
    x0 = latents(3)
    plain, together = calls_of(decoder(base), x0)
    sliced, apart = calls_of(decoder(base, decode_slicing=True), x0)
    assert together == [(3, 4, 8, 8)]
    assert apart == [(1, 4, 8, 8)] * 3
    assert (plain - sliced).abs().max() <= 1


def test_tiling_decodes_tiles_and_leaves_images_of_one_tile_alone(base: Path) -> None:
    x0, large = latents(2), latents(1, 12)
    tiled = decoder(base, decode_tiling=True)
    images, shapes = calls_of(tiled, x0)
    assert shapes == [(2, 4, 8, 8)]
    assert (images - decoder(base).decode(x0).int()).abs().max() <= 1
    images, shapes = calls_of(tiled, large)
    assert len(shapes) == 4
    assert max(max(shape[2:]) for shape in shapes) == 8
    # Norms over a tile are not norms over the image: what a tiled image has to be is upstream's own.
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(base)
    pipeline.vae.enable_tiling()
    with torch.no_grad():
        config = pipeline.vae.config
        decoded = pipeline.vae.decode(large[:, :, 0] / config.scaling_factor + config.shift_factor).sample
    want = pipeline.image_processor.postprocess(decoded, output_type="pt").permute(0, 2, 3, 1) * 255
    assert float((images[:, 0] - want).abs().max()) <= 0.51


def test_both_at_once_are_both_done(base: Path) -> None:
    both = decoder(base, decode_tiling=True, decode_slicing=True)
    assert calls_of(both, latents(2, 12))[1] == [(1, 4, *s) for s in [(8, 8), (8, 6), (6, 8), (6, 6)]] * 2


def test_numbers_that_are_not_finite_are_refused_by_sample(base: Path) -> None:
    x0 = latents(3)
    x0[1, 0, 0, 0, 0] = float("nan")
    with pytest.raises(TrainingFailed, match="the final latent of sample 1"):
        decoder(base).decode(x0)
    x0[1] = 3e38
    with pytest.raises(TrainingFailed, match="the decoded image of sample 1"):
        decoder(base).decode(x0)


def test_another_class_of_vae_is_refused(base: Path, vae_base: Path) -> None:
    with pytest.raises(CheckpointUnusable, match=r"AutoencoderKL can be read|does not match"):
        load(base, vae=str(vae_base / "vae"))


def test_another_vae_of_the_same_class_serves(base: Path, tmp_path: Path) -> None:
    shutil.move(base / "vae", tmp_path / "elsewhere")
    with pytest.raises(ProfileRefused):
        load(base)
    assert load(base, vae=str(tmp_path / "elsewhere")).name == "sd3"
