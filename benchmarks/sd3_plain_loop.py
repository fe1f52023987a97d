"""nftctl's step on a Stable Diffusion 3 base against a plain loop of the same work, on one device, turn by turn.

The plain loop is written here from the paper's formulas: diffusers' modules as its pipeline calls them, eager; LoRA by
peft; the prompts of a batch encoded with that batch; and for every training timestep of a batch of samples three
forwards, of the old policy, the reference and the policy. Both sides do the paper's recipe (10 sampler steps without
guidance, 9 training timesteps out of the rollout's own, penalty 1e-4, moving old policy) on the same prompts, noise,
times and optimalities, from the same adapter, in batches of the same size. The noise of the plain loop's training is
drawn beforehand and not timed. No prompt comes twice, so neither side has any of them encoded beforehand. A base
without T5 has 256 zeros in its place, which nftctl runs as one token; `sd35-medium-t5` has none to save.

First both are compared in float32 on a tiny base on the CPU: losses and gradient norms of three steps. Then the shape
is measured: medians of interleaved steps after warm-up, samples per second of both, their ratio, where each side's
seconds go, and the largest difference of their losses in bfloat16.

    python benchmarks/sd3_plain_loop.py [--shape sd35-medium] [--rows 16] [--turns 3] [--plain autocast|fp32|bf16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline, UniPCMultistepScheduler
from peft import LoraConfig, get_peft_model
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from one_rank import base_of, device_of, one_rank, resolve, synchronise

from nftctl.algorithm import draws, schedule
from nftctl.engine.worker import Worker
from nftctl.model import adapters
from nftctl.model.shapes import SHAPES
from nftctl.profile.schema import Profile
from nftctl.reward.scorers import load_scorer
from nftctl.roles.timing import BETWEEN, Watch
from nftctl.run.state import RunState

LOSSES = ("train/policy_loss", "train/kl_loss", "train/grad_norm")
FLOAT32, BFLOAT16 = 1e-5, 5e-2
"""Largest relative difference of a loss that is the same work, in each precision."""
CHECK_STEPS = 3


def optimality(profile: Profile, row: int) -> float:
    """What stands in for the group's judgement of a sample: uniform in [0, 1), keyed by its row."""
    return float(draws.uniform((1,), profile.rl.seed, "benchmark", row))


# -- nftctl ---------------------------------------------------------------------------------------------------------


class Ours:
    """A rank of nftctl, its samples judged by `optimality`."""

    def __init__(self, worker: Worker, profile: Profile) -> None:
        self.worker, self.state = worker, RunState()
        judge = worker.roles.replay.commit

        def commit(trajectories: Any) -> Any:
            made = judge(trajectories)
            for t in made.trajectories:
                t.optimality = optimality(profile, t.row.number)
            return made

        worker.roles.replay.commit = commit  # type: ignore[method-assign]
        self.watch = Watch(worker.roles, worker.device)

    def step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics and seconds of one step."""
        worker = self.worker
        worker.sample(self.state)
        worker.prepare(self.state)
        worker.score()
        row, self.state, _ = worker.train(self.state)
        seconds = self.watch.read().seconds
        seconds.pop(BETWEEN, None)  # the other side's turn
        return row, seconds


# -- the plain loop -------------------------------------------------------------------------------------------------


class Plain:
    """The same step without nftctl's model, roles or objective. `lora` says how the adapter computes under bfloat16:

    autocast   float32 parameters under torch.autocast, as the paper's code trains
    fp32       float32 parameters, products in float32, as peft does by itself
    bf16       parameters in bfloat16
    """

    def __init__(self, base: Path, profile: Profile, device: torch.device, start: dict[str, Tensor], lora: str) -> None:
        self.profile, self.device, self.lora = profile, device, lora
        self.dtype = getattr(torch, profile.model.dtype)
        absent = {} if (base / "text_encoder_3").is_dir() else {"text_encoder_3": None, "tokenizer_3": None}
        made: Any = StableDiffusion3Pipeline
        self.pipeline = made.from_pretrained(base, torch_dtype=self.dtype, local_files_only=True, **absent).to(device)
        self.vae = self.pipeline.vae.to(getattr(torch, profile.model.decode_dtype))
        for module in (
            self.vae,
            self.pipeline.text_encoder,
            self.pipeline.text_encoder_2,
            self.pipeline.text_encoder_3,
        ):
            if module is not None:
                module.requires_grad_(False).eval()
        self.model = self._adapted(start)
        self.policy, self.old = (self._parameters(name) for name in ("default", "old"))
        s = profile.optimizer
        self.optimizer = torch.optim.AdamW(
            self.policy, lr=s.lr, betas=(s.betas[0], s.betas[1]), eps=s.eps, weight_decay=s.weight_decay
        )
        self.scorer = load_scorer("brightness")
        self.updates, self.cursor = 0, 0
        self.seconds: dict[str, float] = {}
        shape = self.pipeline.transformer.config.in_channels, profile.model.height // 8, profile.model.width // 8
        self.latent: tuple[int, ...] = shape

    def _adapted(self, start: dict[str, Tensor]) -> Any:
        lora = self.profile.model.lora
        config = LoraConfig(
            r=lora.rank, lora_alpha=int(lora.alpha), init_lora_weights="gaussian", target_modules=list(lora.targets)
        )
        transformer = self.pipeline.transformer.requires_grad_(False).eval()
        model: Any = get_peft_model(transformer, config, autocast_adapter_dtype=self.lora != "bf16")
        model.add_adapter("old", config)
        model.set_adapter("default")
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                key = name.removeprefix("base_model.model.").removesuffix(".weight")
                parameter.data.copy_(start[key.removesuffix(".default").removesuffix(".old")])
        return model

    def _parameters(self, adapter: str) -> list[torch.nn.Parameter]:
        named = sorted((n, p) for n, p in self.model.named_parameters() if f".{adapter}." in n and ".lora_" in n)
        return [parameter for _, parameter in named]

    def velocity(self, x: Tensor, sigma: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        """v [B, C, h, w] of x at sigma [B], as the pipeline calls its transformer."""
        mixed = self.lora == "autocast" and self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, self.dtype, enabled=mixed):
            out: Tensor = self.model(
                hidden_states=x.to(self.dtype),
                timestep=sigma * 1000.0,
                encoder_hidden_states=text[0],
                pooled_projections=text[1],
                return_dict=False,
            )[0]
        return out.float()

    def step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics and seconds of one step."""
        self.seconds = {}
        rows = list(range(self.cursor, self.cursor + self.profile.data.rows_per_step))
        known = self.drawn(rows)
        before = time.perf_counter()
        x0, texts = self.rollout(rows, known["noise"])
        row = self.train(rows, x0, texts, known)
        synchronise(self.device)
        self.seconds["step"] = time.perf_counter() - before
        self.cursor += len(rows)
        return row, self.seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        synchronise(self.device)
        before = time.perf_counter()
        yield
        synchronise(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - before

    def drawn(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Everything random of a step, by nftctl's keys: noise, times [rows, T] and noises [rows, T, ...]."""
        rl, count = self.profile.rl, self.profile.rl.timesteps_per_sample
        shape = (self.latent[0], 1, *self.latent[1:])
        pairs = [(row, k) for row in rows for k in range(count)]
        eps = draws.train_noise(shape, seed=rl.seed, rank=0, pairs=pairs)
        grid = schedule.sigmas(rl.sample_steps, rl.sampler_shift)
        times = [
            schedule.draw_timesteps(
                seed=rl.seed, row=row, rank=0, update=0, count=count, source=rl.timestep_source,
                uniform_law=rl.uniform_timestep, shift=rl.sampler_shift, t_range=rl.train_t_range, grid=grid,
            )
            for row in rows
        ]  # fmt: skip
        noise = draws.rollout_noise(shape, seed=rl.seed, ticks=rows, rank=0)
        known = {
            "noise": noise[:, :, 0],
            "eps": eps[:, :, 0].unflatten(0, (len(rows), count)),
            "t": torch.stack(times),
            "r": torch.tensor([optimality(self.profile, row) for row in rows]),
        }
        return {name: value.to(self.device) for name, value in known.items()}

    @torch.no_grad()
    def rollout(self, rows: Sequence[int], noise: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Final latents and text embeddings of all rows; images are scored as they come."""
        size = self.profile.model.rollout_micro_batch or len(rows)
        lines = Path(self.profile.data.prompt_file).read_text().splitlines()
        self.model.set_adapter("old")
        latents, texts = [], []
        for start in range(0, len(rows), size):
            prompts = [lines[row % len(lines)] for row in rows[start : start + size]]
            with self.timed("prompts"):
                embeds, _, pooled, _ = self.pipeline.encode_prompt(
                    prompt=prompts, prompt_2=None, prompt_3=None, device=self.device, max_sequence_length=256,
                    do_classifier_free_guidance=False,
                )  # fmt: skip
            with self.timed("rollout"):
                x = self.sampled(noise[start : start + size], (embeds, pooled))
            with self.timed("decode"):
                images = self.decoded(x)
            with self.timed("reward"):
                self.scorer.score(list(images), prompts, [{}] * len(prompts))
            latents.append(x)
            texts.append((embeds, pooled))
        return torch.cat(latents), (torch.cat([t[0] for t in texts]), torch.cat([t[1] for t in texts]))

    def sampled(self, x: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        rl = self.profile.rl
        made: Any = UniPCMultistepScheduler
        solver = made(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=rl.sampler_shift)
        solver.set_timesteps(rl.sample_steps)
        solver.timesteps = solver.sigmas[:-1] * 1000.0  # the float ones: upstream's are cut to integers
        for t in solver.timesteps:
            v = self.velocity(x, (t / 1000.0).to(self.device).expand(len(x)), text)
            x = solver.step(v, t, x, return_dict=False)[0]
        return x

    def decoded(self, x: Tensor) -> np.ndarray[Any, Any]:
        config = self.vae.config
        z = (x / config.scaling_factor + config.shift_factor).to(self.vae.dtype)
        pixels = self.vae.decode(z, return_dict=False)[0].float()
        images: np.ndarray[Any, Any] = (
            ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        )
        return images

    def train(
        self, rows: Sequence[int], x0: Tensor, texts: tuple[Tensor, Tensor], known: dict[str, Tensor]
    ) -> dict[str, float]:
        """One optimizer step: batches of samples, and of each batch one timestep after the other."""
        rl, count = self.profile.rl, self.profile.rl.timesteps_per_sample
        size, total = self.profile.model.train_micro_batch or len(rows), len(rows) * count
        policy_loss = kl_loss = 0.0
        self.optimizer.zero_grad()
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            text = (texts[0][part], texts[1][part])
            for k in range(count):
                clean, t, eps, r = x0[part], known["t"][part, k], known["eps"][part, k], known["r"][part]
                wide = t.view(-1, 1, 1, 1)
                x_t = (1 - wide) * clean + wide * eps
                with torch.no_grad(), self.timed("old"):
                    self.model.set_adapter("old")
                    v_old = self.velocity(x_t, t, text)
                    self.model.set_adapter("default")
                with torch.no_grad(), self.timed("reference"), self.model.disable_adapter():
                    v_ref = self.velocity(x_t, t, text)
                with self.timed("policy"):
                    v = self.velocity(x_t, t, text)
                    nft = self.objective(v, v_old, clean, x_t, wide, r).sum() / total
                    kl = rl.kl_beta * ((v - v_ref) ** 2).mean(dim=(1, 2, 3)).sum() / total
                    (nft + kl).backward()
                policy_loss, kl_loss = policy_loss + nft.item(), kl_loss + kl.item()
        with self.timed("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(self.policy, self.profile.optimizer.grad_clip)
            self.optimizer.step()
            self.updates += 1
            kept = min(0.001 * self.updates, 0.5)
            with torch.no_grad():
                for old, new in zip(self.old, self.policy, strict=True):
                    old.copy_(kept * old + (1 - kept) * new)
        return dict(zip(LOSSES, (policy_loss, kl_loss, float(norm)), strict=True))

    def objective(self, v: Tensor, v_old: Tensor, x0: Tensor, x_t: Tensor, t: Tensor, r: Tensor) -> Tensor:
        """The paper's loss per sample [B]: two implicit policies, each by its self-normalised x0 error."""
        beta = self.profile.rl.beta
        losses = []
        for implicit in (beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v):
            error = x_t - t * implicit - x0
            with torch.no_grad():
                weight = error.double().abs().mean(dim=(1, 2, 3), keepdim=True).clamp_min(1e-5)
            losses.append((error**2 / weight).mean(dim=(1, 2, 3)))
        loss: Tensor = self.profile.rl.policy_loss_scale * (r * losses[0] + (1 - r) * losses[1]) / beta
        return loss


# -- both -----------------------------------------------------------------------------------------------------------


@contextmanager
def both(
    shape: str, base: Path, device: torch.device, folder: Path, *, steps: int, lora: str, sets: Sequence[str]
) -> Iterator[tuple[Ours, Plain]]:
    """The two sides on one base, at the same adapter."""
    probe = resolve(shape, base, folder, ["unread"], sets).profile
    rows = probe.data.rows_per_step * steps
    resolved = resolve(
        shape, base, folder, [f"a photo of {n} red cubes on a table, seen from above" for n in range(rows)], sets
    )
    with one_rank(resolved, SHAPES[shape].family, device, folder) as worker:
        start = {n: p.detach().clone() for n, p in adapters.policy_parameters(worker.roles.family.denoiser).items()}
        yield Ours(worker, resolved.profile), Plain(base, resolved.profile, device, start, lora)


def difference(ours: dict[str, float], plain: dict[str, float]) -> float:
    """Largest relative difference of the losses; a penalty below 1e-6 of the policy's loss counts against that."""
    least = 1e-6 * abs(plain[LOSSES[0]])
    return max(abs(ours[name] - plain[name]) / max(abs(plain[name]), least) for name in LOSSES)


def check(device: torch.device) -> dict[str, Any]:
    """Three steps of both sides in float32 on the tiny base."""
    size = ("model.height=128", "model.width=128", 'model.dtype="float32"', 'model.compile="never"')
    work = ("data.rows_per_step=3", "rl.sample_steps=3", "rl.timesteps_per_sample=2", "model.rollout_micro_batch=2")
    # A rate at which the policy leaves the reference, so that the penalty is more than the rounding of a difference.
    far = ("model.train_micro_batch=2", "optimizer.lr=0.02", "rl.kl_beta=1")
    exact = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with tempfile.TemporaryDirectory() as name:
            base = base_of("sd3-tiny", "", Path(name))
            sets = [*size, *work, *far]
            with both("sd3-tiny", base, device, Path(name), steps=CHECK_STEPS, lora="fp32", sets=sets) as (ours, plain):
                pairs = [(ours.step()[0], plain.step()[0]) for _ in range(CHECK_STEPS)]
    finally:
        torch.backends.cudnn.allow_tf32 = exact
    found = [difference(*pair) for pair in pairs]
    losses = [{name: [row[name] for row in pair] for name in LOSSES} for pair in pairs]
    return {"relative_difference": found, "tolerance": FLOAT32, "agree": max(found) <= FLOAT32, "losses": losses}


def measure(options: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    """Samples per second of both sides and where their seconds go."""
    base = base_of(options.shape, options.base, folder)
    sets = [
        f"data.rows_per_step={options.rows}",
        f"model.rollout_micro_batch={options.rollout_batch}",
        f"model.train_micro_batch={options.train_batch}",
        *options.set,
    ]
    steps = options.warm + options.turns
    taken: dict[str, list[float]] = {"nftctl": [], "plain": []}
    parts: dict[str, list[dict[str, float]]] = {"nftctl": [], "plain": []}
    found, forwards = [], 0.0
    with both(options.shape, base, device, folder, steps=steps, lora=options.plain, sets=sets) as (ours, plain):
        for turn in range(steps):
            rows = []
            for name, side in (("nftctl", ours), ("plain", plain)):
                synchronise(device)
                before = time.perf_counter()
                row, seconds = side.step()
                synchronise(device)
                # The plain loop's noise is drawn before its own clock starts.
                taken[name].append(seconds.pop("step", time.perf_counter() - before))
                parts[name].append(seconds)
                rows.append(row)
            found.append(difference(rows[0], rows[1]))
            forwards = rows[0]["forwards/executed"]
            print(f"turn {turn}: nftctl {taken['nftctl'][-1]:.2f} s, plain {taken['plain'][-1]:.2f} s", flush=True)
    seconds = {name: statistics.median(values[options.warm :]) for name, values in taken.items()}
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "shape": options.shape,
        "rows": options.rows,
        "rollout_batch": options.rollout_batch,
        "train_batch": options.train_batch,
        "plain": options.plain,
        "forwards_per_sample": forwards / options.rows,
        "samples_per_s": {name: options.rows / value for name, value in seconds.items()},
        "ratio": seconds["plain"] / seconds["nftctl"],
        "step_s": seconds,
        "all_steps_s": taken,
        "stages_s": {name: _medians(rows[options.warm :]) for name, rows in parts.items()},
        "losses_relative_difference": found,
        "losses_tolerance": BFLOAT16,
        "losses_agree": max(found) <= BFLOAT16,
    }


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    return {name: round(statistics.median(row.get(name, 0.0) for row in rows), 4) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="sd35-medium", choices=[n for n, s in SHAPES.items() if s.family == "sd3"])
    parser.add_argument(
        "--base", default="", help="folder of a base of that shape; written there if it is not there yet"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=16, help="samples of a step")
    parser.add_argument("--rollout-batch", type=int, default=8)
    parser.add_argument("--train-batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--plain", default="autocast", choices=("autocast", "fp32", "bf16"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    device = device_of(options.device)
    agree = True
    if not options.no_check:
        checked = check(torch.device("cpu"))
        agree = checked["agree"]
        print(json.dumps({"check": checked}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, device, Path(folder))
    print(json.dumps(found))
    return 0 if agree and found["losses_agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
