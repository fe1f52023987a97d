"""Forwards of a denoiser as recordings: CUDA graphs that a GPU runs through without waiting for the interpreter.

At a small image's size the interpreter needs longer to launch a layer than a GPU needs to compute it. A shape of batch
is recorded the second time it comes, with the backward where one follows, and played from then on; prompts of other
lengths play the same recording, padded where nothing reads. Owns the recordings and the memory of what goes in and out.
A recording holds addresses, so it is good only while the weights stay where they are: whole, frozen, in one copy.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nftctl.profile.schema import Model

if TYPE_CHECKING:
    from nftctl.model.family import Conditioning, Denoiser, Reading

log = logging.getLogger("nftctl.model")

RECORDINGS = 24
"""Most shapes that are recorded; further ones are computed kernel by kernel."""
ROOM = 1.25
"""Of what a recording keeps, how much has to be free of memory that the run has ever needed."""


def wanted(model: Model, *, device: torch.device, deterministic: bool) -> bool:
    """Whether `model.cuda_graphs` asks for recordings on this device."""
    return model.cuda_graphs == "auto" and device.type == "cuda" and not deterministic


class Graph(Protocol):
    """Work that can be done again on the same memory."""

    def replay(self) -> None: ...


@dataclass
class _Inputs:
    """Where a recording reads from: static memory, and whose prompts are in it."""

    x: Tensor
    sigma: Tensor
    reading: Reading
    source: weakref.ref[Conditioning] | None = None

    def load(self, x: Tensor, sigma: Tensor, reading: Reading, source: Conditioning) -> None:
        self.x.copy_(x)
        self.sigma.copy_(sigma)
        if self.source is not None and self.source() is source:
            return
        for here, given in zip(self.reading, reading, strict=True):
            if isinstance(here, Tensor) and isinstance(given, Tensor):
                here.copy_(given)
        self.source = weakref.ref(source)


@dataclass
class _Backward:
    """Reads the gradient of v, leaves those of the trained parameters."""

    graph: Graph
    grad_v: Tensor
    grads: Sequence[Tensor | None]


@dataclass
class _Recording:
    """One shape's forward and, where gradients are wanted, its backward.

    turn   counts the forwards played; what a backward needs is overwritten by the next one
    """

    inputs: _Inputs
    forward: Graph
    v: Tensor
    backward: _Backward | None = None
    turn: int = 0


class _Played(torch.autograd.Function):
    """A recorded forward as one node of autograd; its backward is the recorded one."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *_parameters: Tensor) -> Tensor:
        recording.forward.replay()
        recording.turn += 1
        ctx.recording, ctx.turn = recording, recording.turn
        return recording.v.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recording: _Recording = ctx.recording
        backward = recording.backward
        if backward is None or recording.turn != ctx.turn:
            raise RuntimeError("this forward was a recording's, which has been played again since")
        backward.grad_v.copy_(grads[0])
        backward.graph.replay()
        # Theirs is the recording's memory, which the next forward writes into.
        return (None, *(None if grad is None else grad.clone() for grad in backward.grads))


class Recorder:
    """The recordings of one denoiser. `tape` makes them; tests bring one that needs no GPU."""

    def __init__(self, denoiser: Denoiser, tape: Tape | None = None) -> None:
        self._denoiser = denoiser
        self._tape = tape or Tape()
        self._trained = [p for p in denoiser.parameters() if p.requires_grad]
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._met: dict[tuple[Any, ...], int] = {}
        self._gathering = -1
        self.played = 0
        """Rows that came from recordings so far."""

    @property
    def recordings(self) -> int:
        """How many there are."""
        return len(self._recordings)

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """What the denoiser's own `velocity` returns; its weights have to be whole."""
        denoiser = self._denoiser
        reading = denoiser.reading(x, conditioning, fixed=True)
        if reading is None:
            return denoiser.velocity(x, sigma, denoiser.reading(x, conditioning) or ())
        self._forget_if_moved()
        key = self._key(x, reading)
        recording = self._recordings.get(key)
        if recording is None:
            if key not in self._met or not self._fits(x, self._met[key]):
                return self._first(key, x, sigma, reading)
            recording = self._record(key, x, sigma, reading)
        recording.inputs.load(x, sigma, reading, conditioning)
        self.played += x.shape[0]
        if torch.is_grad_enabled():
            v: Tensor = _Played.apply(recording, *self._trained)  # type: ignore[no-untyped-call]
            return v
        recording.forward.replay()
        return recording.v.clone()

    def _forget_if_moved(self) -> None:
        """Weights that were given back and gathered again lie elsewhere."""
        sharding = self._denoiser.sharding
        gathering = 0 if sharding is None else sharding.gathering
        if gathering != self._gathering:
            self._recordings.clear()
            self._gathering = gathering

    def _key(self, x: Tensor, reading: Reading) -> tuple[Any, ...]:
        form = tuple((tuple(part.shape), part.dtype) if isinstance(part, Tensor) else part for part in reading)
        denoiser = self._denoiser
        return (tuple(x.shape), form, denoiser.copy_in_use, denoiser.lowered, torch.is_grad_enabled())

    def _fits(self, x: Tensor, kept: int) -> bool:
        return len(self._recordings) < RECORDINGS and self._tape.free(x.device) >= ROOM * kept

    def _first(self, key: tuple[Any, ...], x: Tensor, sigma: Tensor, reading: Reading) -> Tensor:
        """Kernel by kernel: what is compiled is compiled now, and what a recording will keep is seen."""
        before = self._tape.allocated(x.device)
        v = self._denoiser.velocity(x, sigma, reading)
        inputs = sum(part.nbytes for part in reading if isinstance(part, Tensor))
        saved = self._tape.allocated(x.device) - before if torch.is_grad_enabled() else 0
        self._met[key] = inputs + max(saved, self._working(x))
        return v

    def _working(self, x: Tensor) -> int:
        """Bytes of activations that a forward holds at a time, by rule of thumb: two dozen token arrays."""
        tokens = self._denoiser.tokens((x.shape[1], x.shape[2], x.shape[3], x.shape[4]))
        return 24 * x.shape[0] * tokens * self._denoiser.width * 2

    def _record(self, key: tuple[Any, ...], x: Tensor, sigma: Tensor, reading: Reading) -> _Recording:
        held = tuple(part.clone() if isinstance(part, Tensor) else part for part in reading)
        inputs = _Inputs(x.detach().clone(), sigma.clone(), held)
        denoiser, tape = self._denoiser, self._tape
        trains = torch.is_grad_enabled()
        graph, v = tape.record(lambda: denoiser.velocity(inputs.x, inputs.sigma, inputs.reading), trains=trains)
        recording = _Recording(inputs, graph, v.detach())
        if trains:
            grad_v = torch.zeros_like(v)
            backward, grads = tape.record(
                lambda: torch.autograd.grad(v, self._trained, grad_v, allow_unused=True), trains=True
            )
            recording.backward = _Backward(backward, grad_v, grads)
        self._recordings[key] = recording
        log.info("recorded a forward of %d rows%s", x.shape[0], " and its backward" if recording.backward else "")
        return recording


class Tape:
    """CUDA graphs. Forwards without a backward share their working memory, and so do those with one."""

    def __init__(self) -> None:
        self._pools: dict[bool, Any] = {}

    def record(self, work: Any, *, trains: bool) -> tuple[Graph, Any]:
        """Record `work`, which is not done now; returns its graph, and what it will leave, in the graph's memory."""
        if trains not in self._pools:
            self._pools[trains] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on decoding and watching collectives meanwhile.
        with torch.cuda.graph(graph, pool=self._pools[trains], capture_error_mode="thread_local"):
            left = work()
        return graph, left

    def free(self, device: torch.device) -> int:
        """Bytes of the device that this process has never needed."""
        return int(torch.cuda.mem_get_info(device)[0])

    def allocated(self, device: torch.device) -> int:
        """Bytes in use."""
        return int(torch.cuda.memory_allocated(device))
