"""Stable Diffusion 3 against diffusers' own: one forward, and whole sampling runs of its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from nftctl.algorithm import sampler
from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.model.sd3_denoiser import Sd3Denoiser
from nftctl.model.sd3_encoder import PromptEmbeds
from nftctl.profile.schema import Model

from .bases import FloatTimesteps
from .sd3_bases import VARIANTS, build_pipeline, build_sd3, write_sd3_base

CPU = torch.device("cpu")
SIGMAS = [0.999999, 0.3712345, 0.001, 0.75]
STEPS, SHIFT = 6, 3.0


def given(rows: int, size: tuple[int, int], seed: int = 1) -> tuple[Tensor, Tensor, PromptEmbeds]:
    """Latents, sigmas and prompts of a batch, all different."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, 1, *size, generator=generator)
    prompts = PromptEmbeds(torch.randn(rows, 9, 32, generator=generator), torch.randn(rows, 20, generator=generator))
    return x, torch.tensor(SIGMAS[:rows]), prompts


def stock_velocity(stock: SD3Transformer2DModel, x: Tensor, sigma: Tensor, prompts: PromptEmbeds) -> Tensor:
    out: Tensor = stock(
        hidden_states=x[:, :, 0].to(stock.dtype),
        timestep=sigma * 1000,
        encoder_hidden_states=prompts.embeds.to(stock.dtype),
        pooled_projections=prompts.pooled.to(stock.dtype),
        return_dict=False,
    )[0]
    return out[:, :, None].float()


def relative_error(stock: SD3Transformer2DModel, rows: int, size: tuple[int, int]) -> float:
    x, sigma, prompts = given(rows, size)
    denoiser = Sd3Denoiser(stock)
    with torch.no_grad():
        ours, theirs = denoiser(x, sigma, prompts), stock_velocity(stock, x, sigma, prompts)
    assert ours.shape == x.shape
    assert ours.dtype == torch.float32
    assert denoiser.forwards == rows
    errors = [(a - b).norm() / b.norm() for a, b in zip(ours, theirs, strict=True)]
    return float(max(errors))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [(8, 8), (4, 10), (24, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_velocity_equals_diffusers(variant: str, size: tuple[int, int], rows: int) -> None:
    assert relative_error(build_sd3(**VARIANTS[variant]), rows, size) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [{"patch_size": 1}, {"num_layers": 1}, {"sample_size": 24, "pos_embed_max_size": 13}, {"qk_norm": "rms_norm"}],
    ids=str,
)
def test_every_variant_of_the_config_equals_diffusers(changes: dict[str, Any]) -> None:
    assert relative_error(build_sd3(**changes), 2, (4, 6)) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_equals_diffusers_within_its_precision(variant: str) -> None:
    # Positions stay float32 here, and upstream's own loading rounds them.
    stock: Any = build_sd3(dtype=torch.bfloat16, **VARIANTS[variant])
    assert relative_error(stock, 3, (6, 8)) <= 2e-2


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    denoiser = Sd3Denoiser(build_sd3(**VARIANTS["sd35"]))
    x, sigma, prompts = given(3, (4, 6))
    with torch.no_grad():
        together = denoiser(x, sigma, prompts)
        alone = [
            denoiser(x[i : i + 1], sigma[i : i + 1], PromptEmbeds(prompts.embeds[i : i + 1], prompts.pooled[i : i + 1]))
            for i in range(3)
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_gradients_equal_those_of_diffusers() -> None:
    stock = build_sd3(**VARIANTS["sd35"])
    denoiser = Sd3Denoiser(stock)
    x, sigma, prompts = given(2, (4, 4))
    weight = torch.randn(x.shape)
    watched = ["context_embedder.weight", "transformer_blocks.0.attn2.to_k.weight", "pos_embed.proj.bias"]
    grads = []
    for velocity in (denoiser(x, sigma, prompts), stock_velocity(stock, x, sigma, prompts)):
        stock.zero_grad()
        (velocity * weight).sum().backward()
        grads.append({name: stock.get_parameter(name).grad.clone() for name in watched})  # type: ignore[union-attr]
    for name in watched:
        assert grads[1][name].abs().max() > 0
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tail", [1, 2, 6, 9])
def test_equal_last_tokens_run_once_and_weigh_as_many(variant: str, tail: int) -> None:
    """Stock reads every token; ours runs one of the equal ones, and comes to the same velocity and gradients."""
    stock = build_sd3(**VARIANTS[variant])
    x, sigma, prompts = given(3, (4, 6))
    embeds = torch.cat([prompts.embeds[:, : 9 - tail], prompts.embeds[:, -1:].expand(-1, tail, -1)], dim=1)
    denoiser, seen = Sd3Denoiser(stock), set()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    watched = ["context_embedder.weight", "transformer_blocks.0.attn.add_v_proj.weight", "proj_out.weight"]
    watched += ["transformer_blocks.1.attn.add_k_proj.weight", "transformer_blocks.0.attn.to_q.weight"]
    results = []
    for tokens in (tail, 1):
        with torch.enable_grad():
            stock.zero_grad()
            hook = stock.context_embedder.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].shape[1]))
            v = denoiser(x, sigma, PromptEmbeds(embeds, prompts.pooled, tail=tokens))
            hook.remove()
            (v * weight).sum().backward()
        results.append((v.detach(), {name: stock.get_parameter(name).grad.clone() for name in watched}))  # type: ignore[union-attr]
    with torch.no_grad():
        theirs = stock_velocity(stock, x, sigma, PromptEmbeds(embeds, prompts.pooled))
    assert seen == {9, 10 - tail}
    for v, _ in results:
        assert float((v - theirs).norm() / theirs.norm()) <= 1e-5
    for name in watched:
        assert float(results[1][1][name].abs().max()) > 0
        torch.testing.assert_close(results[0][1][name], results[1][1][name], rtol=1e-4, atol=1e-5)


def test_a_batch_runs_no_more_tokens_at_once_than_all_its_prompts_allow() -> None:
    _, _, prompts = given(1, (4, 4))
    parts = [PromptEmbeds(prompts.embeds, prompts.pooled, tail=n) for n in (6, 4)]
    assert PromptEmbeds.batch(parts).tail == 4
    assert PromptEmbeds.batch(parts[:1] * 2).tail == 6


def test_module_and_parameter_names_are_those_of_diffusers() -> None:
    stock = build_sd3(**VARIANTS["sd35"])
    mine = dict(Sd3Denoiser(stock).named_parameters())
    theirs = dict(stock.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is parameter for name, parameter in theirs.items())
    assert Sd3Denoiser(stock).state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize(
    ("x", "sigma", "said"),
    [
        ((2, 4, 1, 4, 4), (1,), "x has"),
        ((1, 4, 1, 4, 4), (1,), "x has"),
        ((2, 3, 1, 4, 4), (2,), "x must be"),
        ((2, 4, 2, 4, 4), (2,), "x must be"),
        ((2, 4, 1, 5, 4), (2,), "whole patches"),
        ((2, 4, 1, 4, 26), (2,), "12 a side"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(x: tuple[int, ...], sigma: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sd3Denoiser(build_sd3())(torch.zeros(x), torch.zeros(sigma), given(2, (4, 4))[2])


PROMPTS = ["a red seven", "two blue cats and a dog, by night"]
NEGATIVE = "ugly, blurred"


def latents(seed: int = 3) -> Tensor:
    return torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(seed))


def theirs(pipeline: Any, guidance: float) -> tuple[Tensor, Tensor]:
    """Final latents, and images in 0..255 as floats [B, H, W, 3], of diffusers' own pipeline."""
    # Below 1 it samples the prompt alone, so guidance 0 is asked for in its own words.
    prompt = [NEGATIVE] * 2 if guidance == 0 else PROMPTS
    negative = [NEGATIVE] * 2 if guidance > 1 else None
    options = {"num_inference_steps": STEPS, "guidance_scale": max(guidance, 1.0), "height": 64, "width": 96}
    runs = [
        pipeline(prompt=prompt, negative_prompt=negative, latents=latents(), output_type=kind, **options).images
        for kind in ("latent", "pt")
    ]
    return runs[0], runs[1].permute(0, 2, 3, 1) * 255


def ours(family: Family, guidance: float) -> tuple[Tensor, Tensor]:
    negative = family.batch(family.encoder.encode([NEGATIVE] * 2, negative=True)) if guidance != 1 else None
    velocity = sampler.guided_velocity(
        family.denoiser, family.batch(family.encoder.encode(PROMPTS)), negative, guidance, merge=family.batch
    )
    x0 = sampler.sample(velocity, latents()[:, :, None], steps=STEPS, shift=SHIFT)
    return x0[:, :, 0], family.decoder.decode(x0)[:, 0].float()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {variant: write_sd3_base(tmp_path_factory.mktemp(variant), variant) for variant in VARIANTS}


def load(base: Path) -> Family:
    return load_family(Model(height=64, width=96, dtype="float32"), str(base), "sd3", CPU)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_sampling_run_equals_the_pipeline(bases: dict[str, Path], variant: str) -> None:
    pipeline = build_pipeline(variant)
    pipeline.scheduler = FloatTimesteps.from_config(pipeline.scheduler.config)
    family = load(bases[variant])
    seen = []
    for guidance in (0.0, 1.0, 3.0):
        (x_theirs, image_theirs), (x_ours, image_ours) = theirs(pipeline, guidance), ours(family, guidance)
        assert float((x_ours - x_theirs).norm() / x_theirs.norm()) <= 1e-4
        assert float((image_ours - image_theirs).abs().max()) <= 1.0
        assert image_ours.unique().numel() > 50
        seen.append(x_ours)
    assert float((seen[0] - seen[1]).abs().max()) > 0.01
    assert float((seen[2] - seen[1]).abs().max()) > 0.01


def test_what_upstream_s_integer_timesteps_change(bases: dict[str, Path]) -> None:
    """The pipeline as it is feeds int64 timesteps: close to the run above, and not the same."""
    pipeline = build_pipeline("sd35")
    truncated, _ = theirs(pipeline, 1.0)
    assert pipeline.scheduler.timesteps.dtype == torch.int64
    ratio = float((ours(load(bases["sd35"]), 1.0)[0] - truncated).norm() / truncated.norm())
    assert 1e-4 < ratio < 0.1
