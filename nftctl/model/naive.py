"""The plain way: diffusers' own transformer, called as its own pipeline calls it, one sample at a time.

The other side of `bench --compare naive`, and a witness of what our denoiser computes. Whole on a single rank; on more
every layer is sharded by FSDP2 and gathered again for each forward and backward. Weights come from the same folder by
the same strict loader. Nothing here is compiled, cached or batched; refuses families whose pipeline it does not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import Cosmos3OmniPipeline
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from nftctl.errors import UsageRefused
from nftctl.model import cosmos3, sd3
from nftctl.model.family import Family
from nftctl.model.shard import CountedAllGather
from nftctl.model.stopwatch import seconds_of
from nftctl.model.weights import Destination, load_strictly
from nftctl.profile.artifacts import inspect_folder
from nftctl.tensorfile import weight_files


@dataclass(frozen=True, slots=True)
class Loading:
    """Where weights come from, and in which precision and where they go."""

    base: Path
    dtype: torch.dtype
    device: torch.device
    skip_keys: tuple[str, ...] = ()
    seed: int = 0


class Stock(ABC):
    """A family's unmodified transformer, frozen, and the way its pipeline calls it."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.module = module
        self.dtype = dtype
        self.device = device

    @classmethod
    @abstractmethod
    def load(cls, how: Loading) -> Stock:
        """Read the transformer. Raises as the family's own loader does."""

    @staticmethod
    @abstractmethod
    def prompt(family: Family, text: str, negative: bool) -> Any:
        """What the transformer wants to be told of a prompt, by the family's own encoder or tokenizer."""

    @abstractmethod
    def prepare(self, prompts: Sequence[Any], shape: torch.Size) -> Callable[[Tensor, float], Tensor]:
        """What the pipeline does once per sample: bind the branches' prompts to latents of `shape` [1, C, T, H, W].

        The result maps (x [1, C, T, H, W], sigma) to the velocities of the branches in order, [branches, C, T, H, W]
        float32, in as many calls as the pipeline makes.
        """

    @abstractmethod
    def units(self) -> list[nn.Module]:
        """Submodules with a parameter group of their own; the root holds the rest."""

    def shard(self, mesh: DeviceMesh) -> CountedAllGather:
        """Shard every unit over the mesh, to be gathered where it runs and freed behind it; returns the count.

        The root keeps what it gathered, as FSDP2 does where nothing else is asked of it.
        """
        counted = CountedAllGather()
        for unit in (*self.units(), self.module):
            sharded: Any = fully_shard(unit, mesh=mesh)
            sharded.set_custom_all_gather(counted)
        return counted

    def train(self, names: Sequence[str], rank: int, alpha: float) -> list[nn.Parameter]:
        """Make trainable what a run trains, by our names of it: adapters by peft, or the weights themselves."""
        adapted = [name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")]
        if adapted:
            scale: Any = alpha
            inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=scale, target_modules=adapted), self.module)
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_("lora_" in name)
        else:
            for name in names:
                self.module.get_parameter(name).requires_grad_(True)
        return [p for p in self.module.parameters() if p.requires_grad]


class StockCosmos3(Stock):
    """Cosmos3: one call per guidance branch; both towers run in every call."""

    @classmethod
    def load(cls, how: Loading) -> Stock:
        source = inspect_folder(how.base)
        names, module = cosmos3.empty_transformer(source.config_folder), cosmos3.empty_transformer(source.config_folder)
        for name in [name for name, _ in module.named_children() if f"{name}.".startswith(cosmos3.UNUSED)]:
            delattr(module, name)  # no image passes through it, and the files need not have it
        place = Destination(module, how.dtype, how.device, cosmos3.KEPT_IN_FP32)
        load_strictly(
            source.weight_files(), names, [place], optional=cosmos3.UNUSED, skip_keys=how.skip_keys, seed=how.seed
        )
        module.rotary_emb.to(how.device)
        return cls(module, how.dtype, how.device)

    @staticmethod
    def prompt(family: Family, text: str, negative: bool) -> list[int]:
        encoder: Any = family.encoder
        return [int(token) for token in encoder.tokenize(text, negative)]

    def prepare(self, prompts: Sequence[Any], shape: torch.Size) -> Callable[[Tensor, float], Tensor]:
        static = [self._pack(ids, shape) for ids in prompts]

        def velocities(x: Tensor, sigma: float) -> Tensor:
            return torch.cat([self._call(packed, x, sigma) for packed in static])

        return velocities

    def _pack(self, ids: list[int], shape: torch.Size) -> dict[str, Any]:
        """The pipeline's own packing of a prompt and an image of that shape."""
        pipeline: Any = Cosmos3OmniPipeline.__new__(Cosmos3OmniPipeline)
        # Past the registry of components, which asks for all of them.
        object.__setattr__(pipeline, "transformer", self.module)
        object.__setattr__(pipeline, "vae_scale_factor_temporal", 4)
        text = pipeline._prepare_text_segment(ids, self.device)
        image = pipeline._prepare_vision_segment(
            torch.empty(shape, device="meta"), False, text["vision_start_temporal_offset"], 24.0, len(ids), self.device
        )
        keys = ("token_shapes", "sequence_indexes", "mse_loss_indexes", "noisy_frame_indexes")
        return {
            "input_ids": text["input_ids"],
            "text_indexes": text["text_indexes"],
            "position_ids": torch.cat([text["text_mrope_ids"], image["vision_mrope_ids"]], dim=1),
            "und_len": text["und_len"],
            "sequence_length": text["und_len"] + image["num_vision_tokens"],
            **{f"vision_{key}": image[f"vision_{key}"] for key in keys},
        }

    def _call(self, packed: dict[str, Any], x: Tensor, sigma: float) -> Tensor:
        tokens = len(packed["vision_mse_loss_indexes"])
        times = torch.full((tokens,), sigma * 1000.0, device=self.device)
        answer = self.module(**packed, vision_tokens=[x.to(self.dtype)], vision_timesteps=times, return_dict=False)
        velocity: Tensor = answer[0][0].float()
        return velocity

    def units(self) -> list[nn.Module]:
        module: Any = self.module
        return [module.time_embedder, *module.layers]


class StockSd3(Stock):
    """Stable Diffusion 3: the branches of a sample go through one call, as rows of it."""

    @classmethod
    def load(cls, how: Loading) -> Stock:
        module: Any = sd3.empty_transformer(how.base / "transformer")
        place = Destination(module, how.dtype, how.device)
        load_strictly(weight_files(how.base / "transformer"), module, [place], skip_keys=how.skip_keys, seed=how.seed)
        return cls(module.to(how.device), how.dtype, how.device)

    @staticmethod
    def prompt(family: Family, text: str, negative: bool) -> tuple[Tensor, Tensor]:
        (encoded,) = family.encoder.encode([text], negative=negative)
        embeds: Any = encoded
        return embeds.embeds.cpu(), embeds.pooled.cpu()

    def prepare(self, prompts: Sequence[Any], shape: torch.Size) -> Callable[[Tensor, float], Tensor]:
        embeds, pooled = (torch.cat(parts).to(self.device, self.dtype) for parts in zip(*prompts, strict=True))

        def velocities(x: Tensor, sigma: float) -> Tensor:
            module: Any = self.module
            answer = module(
                hidden_states=x[:, :, 0].to(self.dtype).expand(len(prompts), -1, -1, -1),
                timestep=torch.full((len(prompts),), sigma * 1000.0, device=self.device),
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
            out: Tensor = answer[:, :, None].float()
            return out

        return velocities

    def units(self) -> list[nn.Module]:
        module: Any = self.module
        return list(module.transformer_blocks)


FAMILIES: dict[str, type[Stock]] = {"cosmos3": StockCosmos3, "sd3": StockSd3}


def stock_of(family: str) -> type[Stock]:
    """The stock transformer of a family by name."""
    if family not in FAMILIES:
        raise UsageRefused(f"--compare naive does not know the family {family!r}", hint=", ".join(sorted(FAMILIES)))
    return FAMILIES[family]


@dataclass(frozen=True, slots=True)
class Work:
    """One sample to measure with: noise [1, C, T, H, W] on the CPU, a sigma, and the prompts of its branches.

    The last branch is the conditional one, which training runs alone.
    """

    x: Tensor
    sigma: float
    prompts: tuple[Any, ...]


@torch.no_grad()
def time_sampling(stock: Stock, work: Work, *, repeats: int, warm: int) -> list[float]:
    """Seconds of one row's forward in a rollout: `repeats` samplers' steps of one sample, each over its branches."""
    velocities = stock.prepare(work.prompts, work.x.shape)
    x = work.x.to(stock.device)
    took = seconds_of(lambda: velocities(x, work.sigma), stock.device, repeats=repeats, warm=warm)
    return [seconds / len(work.prompts) for seconds in took]


def time_training(stock: Stock, work: Work, trained: Sequence[nn.Parameter], *, repeats: int, warm: int) -> list[float]:
    """Seconds of one pair's forward and backward, conditional only."""
    velocities = stock.prepare(work.prompts[-1:], work.x.shape)
    x = work.x.to(stock.device)

    def step() -> None:
        loss: Any = velocities(x, work.sigma).square().mean()
        loss.backward()
        for parameter in trained:
            parameter.grad = None

    return seconds_of(step, stock.device, repeats=repeats, warm=warm)


@torch.no_grad()
def velocities_of(stock: Stock, work: Work) -> Tensor:
    """The branches' velocities [branches, C, T, H, W], float32 on the CPU."""
    return stock.prepare(work.prompts, work.x.shape)(work.x.to(stock.device), work.sigma).cpu()


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in the 2-norm, in double precision: the worst of the branches."""
    errors = [
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(value, reference, strict=True)
    ]
    return max(errors)
