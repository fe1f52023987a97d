"""Whole sampling runs of the rollout role against diffusers' own Cosmos3 pipeline: same latents, same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Cosmos3OmniPipeline, UniPCMultistepScheduler
from torch import Tensor

from nftctl.algorithm import sampler
from nftctl.model.cosmos3_encoder import PromptCache
from nftctl.model.family import Family
from nftctl.model.registry import load_family
from nftctl.profile.schema import Model, Profile
from nftctl.roles.rollout import RolloutRole
from nftctl.roles.trajectory import Sampling

from .bases import FloatTimesteps

CPU = torch.device("cpu")
STEPS, SHIFT = 4, 5.0
GUIDANCES = (0.0, 1.0, 3.0)
PROMPTS = ["a red seven", '{"subject": "кот", "n": 3}', "two blue cats and a dog, by night, seen from far away..."]
SIZES = [(64, 64), (32, 80)]
NEGATIVES = [None, "", "ugly. blurred..."]


@dataclass(frozen=True)
class Words:
    """What is put around a prompt, and the negative one; None: upstream's own default."""

    system_prompt: bool = True
    resolution_template: bool = True
    negative: str | None = None


def latents(size: tuple[int, int], frames: int = 1) -> Tensor:
    shape = (len(PROMPTS), 16, frames, size[0] // 8, size[1] // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def stock_pipeline(base: Path, *, integers: bool = False) -> Any:
    pipeline: Any = Cosmos3OmniPipeline.from_pretrained(base, enable_safety_checker=False)
    kind: Any = UniPCMultistepScheduler if integers else FloatTimesteps
    pipeline.scheduler = kind(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def theirs(pipeline: Any, size: tuple[int, int], words: Words, guidance: float) -> tuple[Tensor, Tensor]:
    """Final latents, and images as bytes [B, H, W, 3]: the pipeline makes one sample a call."""
    run = partial(
        pipeline,
        negative_prompt=words.negative,
        num_frames=1,
        height=size[0],
        width=size[1],
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        use_system_prompt=words.system_prompt,
        add_resolution_template=words.resolution_template,
    )
    x0, images = [], []

    def keep(pipeline: Any, step: int, timestep: Tensor, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        if step == STEPS - 1:
            x0.append(kept["latents"])
        return kept

    for prompt, noise in zip(PROMPTS, latents(size), strict=True):
        image = run(prompt, latents=noise[None], output_type="pt", callback_on_step_end=keep).video[0]
        images.append(image.permute(1, 2, 0))
    return torch.cat(x0), (torch.stack(images) * 255).round()


def load(base: Path, size: tuple[int, int], words: Words = Words()) -> tuple[Family, Model]:
    model = Model(
        height=size[0],
        width=size[1],
        dtype="float32",
        system_prompt=words.system_prompt,
        resolution_template=words.resolution_template,
    )
    return load_family(model, str(base), "cosmos3", CPU), model


def ours(base: Path, size: tuple[int, int], words: Words, guidance: float) -> tuple[Tensor, Tensor]:
    """The same by the rollout role: all prompts, and both branches of the guidance, in one ragged batch."""
    family, model = load(base, size, words)
    settings: dict[str, Any] = {"model": model, "rl": {"negative_prompt": words.negative or ""}}
    role = RolloutRole(family, Profile.model_validate(settings), rank=0, device=CPU)
    how = Sampling(STEPS, SHIFT, guidance)
    conditions, negative = role.encode(PROMPTS, how)
    x0, images = role.denoise(conditions, negative, latents(size), how, "policy")
    assert family.denoiser.forwards == len(PROMPTS) * STEPS * (1 if guidance in (0, 1) else 2)
    return x0, images[:, 0].float()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (SIZES[0], Words()),
        (SIZES[1], Words()),
        (SIZES[1], Words(negative=NEGATIVES[2])),
        (SIZES[0], Words(resolution_template=False, negative="")),
        (SIZES[1], Words(system_prompt=False, negative=NEGATIVES[2])),
        (SIZES[0], Words(system_prompt=False, resolution_template=False)),
    ],
    ids=str,
)
def test_a_whole_sampling_run_equals_the_pipeline(vae_base: Path, size: tuple[int, int], words: Words) -> None:
    pipeline = stock_pipeline(vae_base)
    seen = []
    for guidance in GUIDANCES:
        x_theirs, image_theirs = theirs(pipeline, size, words, guidance)
        x_ours, image_ours = ours(vae_base, size, words, guidance)
        assert x_ours.shape == x_theirs.shape
        assert max(float((a - b).norm() / b.norm()) for a, b in zip(x_ours, x_theirs, strict=True)) <= 1e-5
        assert float((image_ours - image_theirs).abs().max()) <= 1.0
        assert image_ours.unique().numel() > 40
        seen.append(x_ours)
    # Each guidance is its own run; at 0 the prompt is not read at all.
    assert float((seen[0] - seen[1]).abs().max()) > 0.01
    assert float((seen[2] - seen[1]).abs().max()) > 0.01


def test_several_frames_are_sampled_as_the_pipeline_samples_them(vae_base: Path) -> None:
    """Profiles make no video; the family's denoiser, sampler and decoder are nevertheless upstream's for one."""
    size, frames, prompt = (32, 48), 3, PROMPTS[0]
    pipeline = stock_pipeline(vae_base)
    options: dict[str, Any] = {"num_frames": 4 * (frames - 1) + 1, "height": size[0], "width": size[1], "fps": 10.0}
    noise = latents(size, frames)[:1]
    run = partial(pipeline, prompt, "", latents=noise, num_inference_steps=STEPS, guidance_scale=3.0, **options)
    family, _ = load(vae_base, size)
    denoiser: Any = family.denoiser
    denoiser.fps = options["fps"]
    tower: Any = family.encoder.tower  # type: ignore[attr-defined]
    cond, uncond = (tower.run([ids]) for ids in pipeline.tokenize_prompt(prompt, "", **options))
    velocity = sampler.guided_velocity(denoiser, cond, uncond, 3.0, merge=PromptCache.batch)
    x0 = sampler.sample(velocity, noise, steps=STEPS, shift=SHIFT)
    want = run(output_type="latent").video
    assert float((x0 - want).norm() / want.norm()) <= 1e-5
    images, video = family.decoder.decode(x0)[0].float(), run(output_type="pt").video
    assert images.shape == (9, *size, 3)
    assert float((images - (video * 255).round().permute(0, 2, 3, 1)).abs().max()) <= 1.0


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_what_upstream_s_integer_timesteps_change(
    vae_base: Path, guidance: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pipeline as it is shows the model the whole part of 1000 sigma: near the run above, and not the same."""
    pipeline = stock_pipeline(vae_base, integers=True)
    x_theirs, image_theirs = theirs(pipeline, SIZES[0], Words(), guidance)
    assert pipeline.scheduler.timesteps.dtype == torch.int64
    cut = pipeline.scheduler.sigmas[:-1] * 1000 - pipeline.scheduler.timesteps
    assert 0.5 < float(cut.max()) < 1.0
    x_ours, image_ours = ours(vae_base, SIZES[0], Words(), guidance)
    latent, levels = rms(x_ours - x_theirs) / rms(x_theirs), (image_ours - image_theirs).abs()
    with capsys.disabled():
        said = f"\n  integer timesteps, guidance {guidance:g}: latents {latent:.1e} apart (relative)"
        print(f"{said}, {float((levels > 0).float().mean()):.2%} of the bytes, by {int(levels.max())} at most")
    # Twenty times what the run above leaves, and still less than a byte.
    assert 1e-5 < latent < 1e-3
    assert float(levels.max()) <= 1.0


def tokens_of(pipeline: Any, prompts: Sequence[str | None], words: Words) -> list[list[int]]:
    """The pipeline's own tokens of negative prompts."""
    options = {"use_system_prompt": words.system_prompt, "add_resolution_template": words.resolution_template}
    return [pipeline.tokenize_prompt("a", p, num_frames=1, height=64, width=64, **options)[1] for p in prompts]


@pytest.mark.parametrize("words", [Words(), Words(resolution_template=False), Words(system_prompt=False)], ids=str)
def test_the_unconditional_branch_reads_the_pipeline_s_tokens(vae_base: Path, words: Words) -> None:
    """An empty negative prompt is upstream's missing one: the negated resolution alone, or nothing but the template."""
    family, _ = load(vae_base, SIZES[0], words)
    encoder: Any = family.encoder
    pipeline = stock_pipeline(vae_base)
    wanted = tokens_of(pipeline, NEGATIVES, words)
    assert [encoder.tokenize(p or "", True) for p in NEGATIVES] == wanted
    assert wanted[0] == wanted[1] != wanted[2]
    text = pipeline.text_tokenizer.decode(wanted[0])
    assert ("is not of 64x64" in text) is words.resolution_template
    assert ("You are a helpful assistant" in text) is words.system_prompt
