"""One rank of a run in this process, without Ray: what `sd3_plain_loop.py` and `fold_timesteps.py` measure.

Builds a profile for a base of random weights, an embedded reward service and a `Worker` in a world of one. Not a run:
with one sample a prompt there is no group, so whoever uses it supplies the optimality of samples.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from nftctl.engine import services
from nftctl.engine.plan import required_revision
from nftctl.engine.worker import Worker, WorkerSpec
from nftctl.model.rehearsal import write_base
from nftctl.model.shapes import SHAPES
from nftctl.profile.load import Resolved, load_profile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

RECIPES = {"sd3": "sd35m_nft_paper_2gpu", "cosmos3": "cosmos3_nft_t2i_public_2gpu"}
"""The shipped profile of each family that a rank is made from."""
TIMEOUT_S = 600.0


def device_of(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def base_of(shape: str, given: str, folder: Path) -> Path:
    """The base in `given`, written there or into `folder` where there is none yet."""
    base = Path(given) if given else folder / shape
    if not (base / "model_index.json").exists():
        before = time.perf_counter()
        write_base(shape, base)
        print(f"wrote a base of the shape {shape} to {base} in {time.perf_counter() - before:.0f} s", flush=True)
    return base


def resolve(shape: str, base: Path, folder: Path, prompts: Sequence[str], sets: Sequence[str] = ()) -> Resolved:
    """The family's recipe on this base, brightness as the reward; `sets` are `key=value` texts."""
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    profile = folder / "rank.toml"
    profile.write_text(
        f'extends = "{RECIPES[SHAPES[shape].family]}"\n'
        f'[rl]\ninit_from = "{base}"\nmax_steps = 1000\n'
        f'[data]\nprompt_file = "{folder / "prompts.txt"}"\n'
        '[[reward.providers]]\nname = "light"\nkind = "embedded"\nscorer = "brightness"\n'
    )
    return load_profile(profile, sets=[f'model.vae="{base / "vae"}"', *sets], env={})


@contextmanager
def one_rank(resolved: Resolved, family: str, device: torch.device, folder: Path) -> Iterator[Worker]:
    """A worker that has built its roles, rank 0 of 1. The world and the reward service end with the block."""
    profile = resolved.profile
    worker = Worker(0)
    host, port = worker.host_store(1, TIMEOUT_S)
    worker.join(1, host, port, device.type, TIMEOUT_S)
    revisions = {p.name: required_revision(p) for p in profile.reward.providers}
    try:
        with services.embedded(profile, revisions, folder) as found:
            answered = list(found.values())
            worker.build(
                WorkerSpec(
                    profile=profile,
                    family=family,
                    base=Path(profile.rl.init_from),
                    prompt_path=Path(profile.data.prompt_file),
                    endpoints=tuple(service.endpoint for service in answered),
                    component_names=tuple(services.component_names(answered)),
                    request_key="benchmark/1",
                )
            )
            yield worker
    finally:
        worker.close()
        dist.destroy_process_group()


def synchronise(device: torch.device) -> None:
    """Wait for what the device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
