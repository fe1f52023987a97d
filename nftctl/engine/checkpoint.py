"""Tensors to disk and back: asynchronous saves as safetensors, and strict loads through torch's distributed checkpoint.

Owns the snapshot, the one save in flight, and the flat names of optimizer state (`optim.<parameter>.exp_avg`, ...).
What makes a folder a checkpoint is the manifest, which is not written here. Refuses anything but tensors before the
first byte is written, because the writer would keep the rest as a pickle, and refuses to load anything that is not
exactly what the run needs, because the reader skips missing shards and ignores what it was not asked for.
"""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from nftctl.errors import CheckpointUnusable, TrainingFailed
from nftctl.run.disk import cure
from nftctl.run.tensors import compare_tensors
from nftctl.tensorfile import DTYPE_NAMES

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for a parameter that has been stepped."""

WHOLE_FILE = "shard-00001-model-00001-of-00001.safetensors"
"""Where tensors that no rank shares with another are kept, by the distributed writer's own naming."""

WRITING_S = 1800.0
"""Seconds after which a save that is still being written is given up, however busy its rank's other threads are.

Nothing is told by it but that a disk hangs: a rank that stands still answers no call, which is noticed much earlier.
Writing is no collective, so its own time-out would be too short; half an hour is 180 GB at 100 MB a second.
"""

_NO_SPACE = {errno.ENOSPC: "no space is left on the device", errno.EDQUOT: "the disk quota is used up"}


class Saver:
    """One asynchronous save at a time, on a gloo group of its own.

    A state of whole tensors is the same on every rank: rank 0 alone writes it, and nobody else does a thing. Sharded
    ones are written by all ranks together. The group must carry nothing else: those saves' collectives run in a
    thread, and on a group shared with training the two would wait for each other for ever.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if dist.get_backend(group) != "gloo":
            raise ValueError(f"the save group must be gloo, got {dist.get_backend(group)}")
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[Any] | None = None
        self._folder = Path()
        self._began = 0.0

    @property
    def busy(self) -> bool:
        """True between `begin` and `finish`."""
        return self._pending is not None

    def begin(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Copy `state` and start writing it to `folder`, which must be empty or absent; collective over the group.

        Tensors may change as soon as this returns. Plain tensors count as replicated.
        Raises TypeError for a value that is not a tensor, CheckpointUnusable for a folder that holds something.
        """
        if self._pending is not None:
            raise RuntimeError(f"the save to {self._folder} has not been finished")
        _refuse_foreign(state)
        self._folder, self._began = folder, time.monotonic()
        if any(isinstance(value, DTensor) for value in state.values()):
            _refuse_full(folder)
            self._pending = self._begin_sharded(state, folder)
        elif dist.get_rank(self._group) == 0:
            _refuse_full(folder)
            self._pending = self._thread.submit(_write_whole, Snapshot(state), folder)

    def _begin_sharded(self, state: Mapping[str, Tensor], folder: Path) -> Future[Any]:
        copies = {name: _copy(value.detach()) for name, value in state.items()}
        writer = _SnapshotWriter(str(folder), save_distributed=True)
        return _future(async_save(copies, storage_writer=writer, process_group=self._group))

    def finish(self, wait_s: float | None = None) -> bool:
        """Whether this rank's files are on the disk, when they were given `wait_s` seconds; None waits for the end.

        True when no save is in flight. Raises CheckpointUnusable when a rank could not write (on every rank, when all
        of them write) or writes for longer than a disk that works may need, and TrainingFailed when a rank went away.
        """
        if self._pending is None:
            return True
        if not wait_for([self._pending], wait_s).done:
            if time.monotonic() - self._began > WRITING_S:
                raise CheckpointUnusable(
                    f"the checkpoint is still being written to {self._folder} after {WRITING_S / 60:.0f} minutes",
                    hint="see whether that disk still answers",
                )
            return False
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise _write_failure(rank, cause, self._folder) from error
        except OSError as error:
            raise _write_failure(dist.get_rank(self._group), error, self._folder) from error
        except Exception as error:
            raise TrainingFailed(f"the save to {self._folder} broke off: {error}") from error
        return True


def _refuse_foreign(state: Mapping[str, object]) -> None:
    foreign = sorted(name for name, value in state.items() if not isinstance(value, Tensor))
    if foreign:
        raise TypeError(f"only tensors can be saved, not {', '.join(foreign)}")


def _refuse_full(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointUnusable(f"{folder} is not empty, so what is written there could not be told from what was")


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return value.clone()
    return value.to(device="cpu", copy=True).contiguous()


class Snapshot:
    """The values of whole tensors at one moment: one flat copy per device and dtype, made where the tensors live.

    On a GPU that is one kernel in the order of training's own, and the way to the CPU is left to `pieces`, which may
    run in another thread: a copy over the bus, tensor by tensor, would hold training up for many times as long.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, value in state.items():
            groups.setdefault((value.device, value.dtype), []).append(name)
        self._shapes = {name: value.shape for name, value in state.items()}
        # The widest numbers first, so that each lies in the file at a multiple of its own width.
        ordered = sorted(groups.items(), key=lambda group: -group[0][1].itemsize)
        self._parts = [(names, torch.cat([state[name].detach().reshape(-1) for name in names])) for _, names in ordered]
        self._ready = torch.cuda.Event() if any(flat.is_cuda for _, flat in self._parts) else None
        if self._ready is not None:
            self._ready.record()

    def pieces(self) -> Iterator[memoryview]:
        """The content of a safetensors file of all copies, in order: its header, then each flat copy as it is.

        By the format's description (README of safetensors, "Format"): the header's length in 8 bytes, little-endian;
        JSON with dtype, shape and place of each tensor in what follows, filled up with blanks to a multiple of 8; the
        numbers back to back.
        """
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for names, flat in self._parts:
            dtype = _dtype_name(flat)
            for name in names:
                shape = self._shapes[name]
                end = at + shape.numel() * flat.itemsize
                header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
                at = end
        text = orjson.dumps(header)
        text += b" " * (-len(text) % 8)
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for _, flat in self._parts:
            yield self._on_cpu(flat).view(torch.uint8).numpy().data

    def _on_cpu(self, flat: Tensor) -> Tensor:
        if self._ready is None or not flat.is_cuda:
            return flat
        target = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        stream = torch.cuda.Stream(flat.device)
        self._ready.wait(stream)
        with torch.cuda.stream(stream):
            target.copy_(flat, non_blocking=True)
        stream.synchronize()
        return target


def _write_whole(snapshot: Snapshot, folder: Path) -> None:
    """One safetensors file, as the distributed writer makes of a single rank's tensors, with a quarter of its work.

    It runs beside a rank that is busy launching kernels: what it does in Python, training waits for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / WHOLE_FILE).open("xb") as stream:
        for piece in snapshot.pieces():
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


class _SnapshotWriter(HuggingFaceStorageWriter):
    """The writer for tensors that are already copies: stages nothing a second time, and touches no accelerator."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.per_thread_copy_ahead = 0
        return state_dict


def _future(response: Any) -> Future[Any]:
    return response if isinstance(response, Future) else response.upload_completion


def _write_failure(rank: int, cause: BaseException, folder: Path) -> CheckpointUnusable | TrainingFailed:
    """A failing rank's reason as one of our errors."""
    if not isinstance(cause, OSError):
        return TrainingFailed(f"rank {rank} failed to save to {folder}: {cause!r}", rank=rank)
    reason = _NO_SPACE.get(cause.errno or 0, cause.strerror or str(cause))
    return CheckpointUnusable(f"rank {rank} could not write the checkpoint to {folder}: {reason}", hint=cure(cause))


def describe(state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Dtype and whole shape of each tensor, as the manifest lists them: {"dtype": "F32", "shape": [16, 64]}."""
    return {name: {"dtype": _dtype_name(value), "shape": list(value.shape)} for name, value in sorted(state.items())}


def _dtype_name(tensor: Tensor) -> str:
    return DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]


def load(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors with the stored values, each with the dtype, shape, device and sharding of its namesake in `like`.

    Call it after the manifest was verified. No collective runs, so a refusal on one rank strands no other. Raises
    CheckpointUnusable with every missing, extra, wrongly typed, wrongly shaped or incomplete tensor.
    """
    problems = compare_tensors(sorted(folder.glob("*.safetensors")), describe(like), root=folder)
    if problems:
        # The comparison speaks of what was announced, which here is what the run needs.
        listed = "\n  ".join(problem.replace("the manifest", "this run") for problem in problems)
        raise CheckpointUnusable(f"{folder} does not hold the tensors of this run:\n  {listed}")
    target = {name: torch.empty_like(value.detach()) for name, value in like.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp_load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:
            cause = min(error.failures.items())[1][0]
            raise CheckpointUnusable(f"{folder} could not be read: {cause!r}") from error
    return target


def optimizer_state(optimizer: Optimizer, names: Mapping[str, Parameter]) -> tuple[dict[str, Tensor], list[str]]:
    """AdamW's state under flat names, and the parameters that have any, sorted.

    A parameter that never had a gradient has no state: it is left out and so not listed, and nothing is made up for it.
    The tensors are the optimizer's own, not copies.
    """
    _check_names(optimizer, names)
    entries = sorted(name for name, parameter in names.items() if optimizer.state.get(parameter))
    tensors = {}
    for name in entries:
        state = optimizer.state[names[name]]
        if set(state) != set(MOMENTS):
            raise ValueError(f"the optimizer keeps {sorted(state)} for {name}, and only {sorted(MOMENTS)} can be saved")
        tensors.update({_key(name, moment): state[moment] for moment in MOMENTS})
    return tensors, entries


def optimizer_like(names: Mapping[str, Parameter], entries: Iterable[str]) -> dict[str, Tensor]:
    """Stand-ins for `load`: what the state of `entries` looks like. Raises CheckpointUnusable for unknown entries."""
    like = {}
    for name in _known(names, entries):
        parameter = names[name].detach()
        like.update({_key(name, moment): parameter for moment in MOMENTS[:2]})
        like[_key(name, "step")] = torch.zeros((), dtype=torch.float32)
    return like


def load_optimizer(
    optimizer: Optimizer, names: Mapping[str, Parameter], tensors: Mapping[str, Tensor], entries: Sequence[str]
) -> None:
    """Give the optimizer exactly the state of `entries`; every other parameter starts without any.

    Hyperparameters stay as they are. The optimizer keeps `tensors` themselves, so they must not be used again.
    """
    _check_names(optimizer, names)
    state = {name: {moment: tensors[_key(name, moment)] for moment in MOMENTS} for name in _known(names, entries)}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {id(parameter): i for i, parameter in enumerate(ordered)}
    optimizer.load_state_dict(
        {
            "state": {index[id(names[name])]: moments for name, moments in state.items()},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _known(names: Mapping[str, Parameter], entries: Iterable[str]) -> list[str]:
    unknown = sorted(set(entries) - set(names))
    if unknown:
        raise CheckpointUnusable(f"the checkpoint has optimizer state for unknown parameters: {', '.join(unknown)}")
    return sorted(entries)


def _check_names(optimizer: Optimizer, names: Mapping[str, Parameter]) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held != {id(parameter) for parameter in names.values()} or len(held) != len(names):
        raise ValueError("the names do not cover the optimizer's parameters one to one")


def _key(name: str, moment: str) -> str:
    return f"optim.{name}.{moment}"
