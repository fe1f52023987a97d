"""One rank: an actor that holds the five roles and does, stage by stage, what the driver asks of all ranks at once.

Images, latents and weights never leave it; prompts, scalars and paths come and go. Heavy modules are imported here and
not in the driver. Every method that contains a collective is called on all ranks together.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nftctl.errors import TrainingFailed
from nftctl.profile.schema import Profile
from nftctl.roles import stage
from nftctl.run.state import RunState

if TYPE_CHECKING:
    from nftctl.engine.least import LeastTime
    from nftctl.engine.pictures import Layout
    from nftctl.roles.reward import Endpoint
    from nftctl.roles.trajectory import Sampling, Trajectory, Weights

log = logging.getLogger("nftctl.worker")

Rewards = list[list[float] | None]
"""Rewards of a step by prompt row, in rank order; None where the group was dropped."""
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit that the kernel counts resident memory in."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a rank is built from; the same on every rank.

    request_key   run id and attempt, the head of every idempotency key
    judges        who scores evaluations, where that is not who scores training
    base_grid     fixed samples of the base that only the build can make: later nothing keeps the base's weights
    """

    profile: Profile
    family: str
    base: Path
    prompt_path: Path
    endpoints: tuple[Endpoint, ...]
    component_names: tuple[str, ...]
    request_key: str
    judges: tuple[Endpoint, ...] = ()
    base_grid: tuple[Sequence[EvalSample], Sampling] | None = None
    resume_from: Path | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """A grid of what was painted: one prompt a row, one copy of the weights a column, `rewards` by row and column."""

    path: Path
    title: str
    prompts: Sequence[str]
    columns: Sequence[Weights]
    captions: Sequence[str]
    notes: Sequence[str]
    rewards: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One image to make from fixed noise: its prompt, the scorer's prompt, and the key of its noise."""

    prompt: str
    reward_prompt: str
    metadata: dict[str, Any]
    key: tuple[int | str, ...]


class Worker:
    """The actor class; plain Python, so that tests can also drive it in process."""

    def __init__(self, rank: int, log_path: Path | None = None, deterministic: bool = False) -> None:
        self.rank = rank
        if log_path is not None:
            _redirect_output(log_path)
        if deterministic:  # read by cuBLAS when its first handle is made
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._trajectories: list[Trajectory] = []
        self._step = 0
        self._keep = False
        self._saved_step = 0
        self._peaks: dict[str, float] = {}
        self._saver: Any = None
        self._store: Any = None
        self._address = ""

    # -- one world ----------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Process id and host of this rank, and the folder of the nftctl that it runs."""
        import socket

        code = str(Path(__file__).resolve().parents[1])
        return {"rank": self.rank, "pid": os.getpid(), "host": socket.gethostname(), "code": code}

    def wire(self, interface: str) -> None:
        """Before `join`, where ranks are on several nodes: talk over `interface`, empty for the node's own."""
        import socket

        import ray

        from nftctl.engine import interfaces

        ip = ray.util.get_node_ip_address()
        name, self._address = interfaces.choose(interfaces.addresses(), ip, interface, f"node {socket.gethostname()}")
        interfaces.bind(name, asked=bool(interface))
        log.info("rank %d talks over %s, %s", self.rank, name or "what its host's name resolves to", self._address)

    def settle(self, folder: Path, variables: dict[str, str]) -> None:
        """Work in the driver's folder and with these of its variables: a Ray that it only joined has its own."""
        os.chdir(folder)
        os.environ.update(variables)

    def host_store(self, world: int, timeout_s: float) -> tuple[str, int]:
        """Rank 0: open the rendezvous store on a port that the system picks, so two runs never meet on one."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = self._address or (ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1")
        self._store = TCPStore(
            host, 0, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        return host, self._store.port

    def join(self, world: int, host: str, port: int, device: str, timeout_s: float) -> None:
        """Join the FSDP world. Collective."""
        import torch
        import torch.distributed as dist

        from nftctl.engine.checkpoint import WRITING_S

        timeout = timedelta(seconds=timeout_s)
        store = self._store or dist.TCPStore(  # type: ignore[attr-defined]
            host, port, world, is_master=False, timeout=timeout
        )
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=world,
            timeout=timeout,
            device_id=self.device if device == "cuda" else None,
        )
        # Scalars and reward tables travel on the CPU; the checkpoint has a group of its own, because saving in the
        # background on a group that training also uses deadlocks.
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self._saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(WRITING_S, timeout_s)))
        log.info("rank %d of %d on %s, pid %d", self.rank, world, self.device, os.getpid())
        if device == "cuda":
            facts, chosen = torch.cuda.get_device_properties(self.device), os.environ.get("CUDA_VISIBLE_DEVICES")
            log.info(
                "rank %d computes on GPU-%s, %s (CUDA_VISIBLE_DEVICES=%s)", self.rank, facts.uuid, facts.name, chosen
            )

    def build(self, spec: WorkerSpec) -> dict[str, Any]:
        """Load the base, add the adapters, shard, set up the roles, then load the checkpoint, if any. Collective.

        Returns facts for the log: parameters, FSDP units, tensors loaded.
        """
        import torch

        from nftctl.engine.checkpoint import Saver
        from nftctl.engine.looking_rank import Onlooker
        from nftctl.roles.build import build_roles

        if spec.profile.job.deterministic:
            torch.use_deterministic_algorithms(True)
        self.close()
        self._peak("")
        self.spec = spec
        self.roles = build_roles(spec, rank=self.rank, device=self.device, control=self._control)
        self._saver = Saver(self._saving)
        self._onlooker = Onlooker(self.roles, self.rank, self._control)
        if spec.base_grid is not None:
            self._onlooker.remember_base(*spec.base_grid)
        if spec.resume_from is not None:
            self._load(spec.resume_from)
        facts = self.roles.facts()
        log.info("base %s: %s", spec.base, ", ".join(f"{key} {value}" for key, value in facts.items()))
        self._peak("build")
        if "build" in self._peaks:
            log.info("built with %.3f GB of GPU memory at the most", self._peaks["build"])
        self._least = self._measured() if self.device.type == "cuda" else None
        return facts

    def _measured(self) -> LeastTime:
        import torch

        from nftctl.engine.least import LeastTime
        from nftctl.model.arithmetic import count_forward, matmul_rate

        spec = self.spec
        forward = count_forward(spec.family, spec.base, self.roles.family.latent_shape)
        rate = matmul_rate(self.device, getattr(torch, spec.profile.model.dtype))
        log.info("matrix products in %s reach %.4g TFLOP/s", spec.profile.model.dtype, rate / 1e12)
        return LeastTime(forward, spec.profile, rate)

    # -- the stages of a step -----------------------------------------------------------------------------------

    def sample(self, state: RunState, keep: bool = False) -> list[int]:
        """data.next and rollout.sample; when it returns, images are on their way to the scorer. Returns row numbers.

        `keep` keeps the images as well, for `extremes` after the step.
        """
        roles, self._step, self._keep = self.roles, state.step + 1, keep
        self._onlooker.keep([])
        stage.begin(self._step, "rollout")
        rows = roles.data.next(state.cursor)
        log.info("sampling with %s: rows %d to %d", roles.rollout.weights, rows[0].number, rows[-1].number)
        self._peaks = {}
        self._peak("")  # what an evaluation took is not the step's
        self._played_before = self._played()
        roles.reward.begin()
        self._trajectories = roles.rollout.sample(
            rows, state.optimizer_steps, lambda part: roles.reward.submit(state.step, part, keep=keep)
        )
        self._peak("sample")
        return [row.number for row in rows]

    def prepare(self, state: RunState) -> None:
        """Everything of training that does not need rewards."""
        stage.begin(self._step, "prepare")
        self.roles.policy.prepare(self._trajectories, state)

    def score(self) -> None:
        """Wait for this rank's scores."""
        stage.begin(self._step, "reward")
        self.roles.rollout.hand_over()
        self.roles.reward.collect()

    def train(self, state: RunState) -> tuple[dict[str, float], RunState, Rewards | None]:
        """replay.commit and policy.train. Collective. Returns the step's metrics, the state after it, and from rank 0
        alone the rewards of all ranks."""
        roles = self.roles
        roles.replay.held = len(self._trajectories)
        commit = roles.replay.commit(self._trajectories)
        metrics, state = roles.policy.train(commit.trajectories, state)
        least = self._least_seconds()
        roles.release()
        if self._keep:
            self._onlooker.keep(self._trajectories)
        self._trajectories = []
        roles.replay.held = 0
        state.step += 1
        state.cursor += self.spec.profile.data.rows_per_step
        rewards = commit.rewards if self.rank == 0 else None
        return {**commit.metrics, **metrics, **self._system(), **least}, state, rewards

    def _least_seconds(self) -> dict[str, float]:
        """What the step's arithmetic takes at the least; GPUs alone, whose time is worth measuring their rate for."""
        if self._least is None:
            return {}
        prompts = [t.conditioning.tokens[0] for t in self._trajectories]
        return {"system/least_seconds": self._least.seconds(prompts, self.roles.rollout.negative_tokens)}

    def _system(self) -> dict[str, float]:
        row = {f"system/reward_{k}": float(v) for k, v in self.roles.reward.counters().items()}
        self._peak("train")
        row |= {f"system/gpu_peak_{stage}_gb": peak for stage, peak in self._peaks.items()}
        row["system/rss_peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / 1e9
        if self.roles.family.denoiser.recorder is not None:
            row["system/rows_played"] = float(self._played() - self._played_before)
        return row

    def _played(self) -> int:
        recorder = self.roles.family.denoiser.recorder
        return 0 if recorder is None else recorder.played

    def _peak(self, stage: str) -> None:
        """Note the most memory that tensors took since the last note; an empty name only starts anew."""
        import torch

        if self.device.type == "cuda":
            if stage:
                self._peaks[stage] = torch.cuda.max_memory_allocated(self.device) / 1e9
            torch.cuda.reset_peak_memory_stats(self.device)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_begin(self, step: int, folder: Path) -> dict[str, Any]:
        """Snapshot the state of `step` and start writing it in the background; returns manifest facts.

        Collective when the state is sharded; otherwise rank 0 alone is asked.
        """
        stage.begin(step, "save")
        self._saved_step = step
        if self.roles.replay.held:
            raise TrainingFailed("a checkpoint was asked for in the middle of a step")
        from nftctl.engine.checkpoint import describe, optimizer_state

        policy = self.roles.policy
        moments, entries = optimizer_state(policy.optimizer, policy.parameters)
        state = policy.copies.state() | moments
        self._saver.begin(state, folder)
        return {"tensors": describe(state), "optimizer_entries": entries}

    def _load(self, checkpoint: Path) -> None:
        """Weights and optimizer of a checkpoint whose manifest was verified."""
        from nftctl.engine.checkpoint import load, load_optimizer, optimizer_like
        from nftctl.run.manifest import STATE_FOLDER, read_manifest

        policy, entries = self.roles.policy, read_manifest(checkpoint).optimizer_entries
        like = policy.copies.state() | optimizer_like(policy.parameters, entries)
        tensors = load(checkpoint / STATE_FOLDER, like)
        policy.copies.load(tensors)
        load_optimizer(policy.optimizer, policy.parameters, tensors, entries)

    def save_finish(self, wait_s: float) -> bool:
        """Whether the state of `save_begin` is written, when it was given `wait_s` seconds to be."""
        writing = self._saver.busy
        written: bool = self._saver.finish(wait_s)
        if writing and written:
            stage.begin(self._saved_step, "commit")
        return written

    # -- looking at the model ------------------------------------------------------------------------------------

    def evaluate(
        self, samples: Sequence[EvalSample], how: Sampling, weights: Weights, distance: bool
    ) -> list[tuple[tuple[float, dict[str, float]], float | None]]:
        """Reward, components and, of some, the distance to the reference, for this rank's share: samples rank,
        rank + world, ... Every rank makes as many. Collective."""
        stage.begin(self._step, "evaluation")
        return self._onlooker.evaluate(samples, how, weights, distance=distance)

    def paint(
        self, samples: Sequence[EvalSample], how: Sampling, columns: Sequence[Weights]
    ) -> dict[Weights, list[float]]:
        """Sample this rank's share with each of the weights for `grid`; returns the rewards. Collective."""
        stage.begin(self._step, "grid")
        return self._onlooker.paint(samples, how, columns)

    def grid(self, drawing: Drawing) -> Layout | None:
        """Rank 0 writes what was painted as a PNG, and says where the images stand. Collective."""
        return self._onlooker.grid(drawing)

    def extremes(self, path: Path, title: str) -> tuple[Layout, dict[str, Any]] | None:
        """Rank 0 writes the best and worst samples of a step whose images were kept, and says which. Collective."""
        stage.begin(self._step, "extremes")
        return self._onlooker.extremes(path, title)

    def apply(self, look: Callable[[Worker], Any]) -> Any:
        """Run `look` on this rank and return its answer: diagnosis and tests."""
        return look(self)

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End this process at once: for a cluster that cannot do it any more."""
        os._exit(0)

    def close(self) -> None:
        """Let go of connections; the process group goes with the process."""
        if hasattr(self, "roles"):
            self.roles.close()
            del self.roles


def _redirect_output(path: Path) -> None:
    """Send everything this process prints, C libraries included, to the rank's log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
