"""Where a rank's step goes: seconds of named spans that follow one another without gap or overlap.

Watches the seams of the roles from outside, for `bench` alone; a run is never watched. On a GPU the marks are events of
the rank's own stream, so that nothing waits for the device in the middle of a step and a span ends when its kernels do.
What runs beside the step, in another thread or on another stream, is counted by itself and never into the sum.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from nftctl.model import shard
from nftctl.model.shard import CountedAllGather
from nftctl.reward import client, cosmos_wire
from nftctl.roles.build import Roles

BETWEEN = "between"
"""Of a rank's step, the time between two of its stages: the driver, messages, waiting for the other ranks."""
REST = "rest"
"""Of a stage, what belongs to none of its watched parts."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one rank.

    seconds   by `stage/part`, in the order in which they first began; their sum is the rank's whole step
    beside    by name, of work that ran beside the step
    rows      rows denoised, by `stage/part`
    gathers, gathered_bytes   all-gathers of weights, and the bytes that they made whole
    """

    seconds: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    gathers: int = 0
    gathered_bytes: int = 0


class Clock:
    """Marks on one timeline; the time between two of them belongs to the innermost span that is open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._thread = threading.get_ident()
        self._stream: Any = torch.cuda.current_stream(device) if self._cuda else None
        self._open: list[str] = []
        self._marks: list[tuple[Any, str]] = []
        self._beside: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what happens inside as `name`; a stage's name begins with a slash."""
        if self._cuda and torch.cuda.is_current_stream_capturing():
            yield  # what is recorded now runs later, and not by itself
            return
        if self._elsewhere():
            with self._aside(name):
                yield
            return
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def _elsewhere(self) -> bool:
        if threading.get_ident() != self._thread:
            return True
        if not self._cuda:
            return False
        return bool(torch.cuda.current_stream(self._device) != self._stream)

    @contextmanager
    def _aside(self, name: str) -> Iterator[None]:
        on_gpu = self._cuda and threading.get_ident() == self._thread
        begin = self._now() if on_gpu else time.perf_counter()
        try:
            yield
        finally:
            self._beside.append((name.strip("/"), begin, self._now() if on_gpu else time.perf_counter()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        made: Any = torch.cuda.Event
        event = made(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _mark(self) -> None:
        self._marks.append((self._now(), self.label()))

    def label(self) -> str:
        """`stage/part` of the innermost open span."""
        stages = [name for name in self._open if name.startswith("/")]
        if not stages:
            return BETWEEN
        part = self._open[-1]
        return f"{stages[-1][1:]}/{REST if part.startswith('/') else part}"

    def adopt_thread(self) -> None:
        """The calling thread, and its stream, are those that the step runs on."""
        self._thread = threading.get_ident()
        if self._cuda:
            self._stream = torch.cuda.current_stream(self._device)

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds on the timeline and beside it since the last reading. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for (begin, label), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            seconds[label] = seconds.get(label, 0.0) + _between(begin, end)
        beside: dict[str, float] = {}
        for name, begin, end in self._beside:
            beside[name] = beside.get(name, 0.0) + _between(begin, end)
        self._marks, self._beside = [], []
        return seconds, beside


def _kind() -> str:
    """A forward that a backward will follow, or one that none will, wherever in a step it is made."""
    return "policy" if torch.is_grad_enabled() else "forward"


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end) - begin
    return float(begin.elapsed_time(end)) / 1e3


class MeteredAllGather(CountedAllGather):
    """Also adds up the bytes that were made whole."""

    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        self.calls = calls
        self.bytes = 0

    def __call__(self, output_tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        self.bytes += output_tensor.nbytes
        return super().__call__(output_tensor, *rest, **named)


class Watch:
    """The seams of one rank's roles, each replaced by itself inside a span until `remove`."""

    def __init__(self, roles: Roles, device: torch.device) -> None:
        self.clock = Clock(device)
        self._denoiser = roles.family.denoiser
        self._undo: list[Callable[[], None]] = []
        self._rows: dict[str, int] = {}
        self._before = (0, 0)
        self.meter = self._meter()
        self._stages(roles)
        self._parts(roles)

    def _stages(self, roles: Roles) -> None:
        for owner, name, stage in (
            (roles.rollout, "sample", "sample"),
            (roles.policy, "prepare", "prepare"),
            (roles.rollout, "hand_over", "reward"),
            (roles.reward, "collect", "reward"),
            (roles.replay, "commit", "commit"),
            (roles.policy, "train", "train"),
        ):
            self._put(owner, name, functools.partial(self._stage, getattr(owner, name), stage))

    def _stage(self, work: Callable[..., Any], stage: str, *given: Any, **named: Any) -> Any:
        if stage == "sample":
            self.clock.adopt_thread()  # Ray may serve an actor's calls from another thread than it was made in
        with self.clock.span(f"/{stage}"):
            return work(*given, **named)

    def _parts(self, roles: Roles) -> None:
        family, copies = roles.family, roles.policy.copies
        self._watch_forward()
        self._span(torch.autograd, "backward", "backward")
        self._span(shard, "gather", "gather")
        self._span(shard, "release", "gather")
        self._span(family.encoder, "encode", "prompts")
        self._span(family.decoder, "begin", "decode")
        self._span(roles.reward, "submit", "submit")
        for name in ("reduce_and_clip", "stepped", "average", "refresh_old"):
            self._span(copies, name, "optimizer")
        self._span(roles.policy.optimizer, "step", "optimizer")
        # Images are encoded on threads of the reward role.
        self._span(client, "encode_request", "image encoding")
        self._span(cosmos_wire, "encode_task", "image encoding")

    def _watch_forward(self) -> None:
        """Every way into the denoiser's forward, with what FSDP hangs around it."""
        compiled = "_compiled_call_impl"
        if getattr(self._denoiser, compiled, None) is not None:
            self._put(self._denoiser, compiled, functools.partial(self._forward, getattr(self._denoiser, compiled)))
            return
        self._put(self._denoiser, "forward", functools.partial(self._forward, self._denoiser.forward))
        opened: list[Any] = []

        def enter(*_: Any) -> None:
            opened.append(self.clock.span(_kind()))
            opened[-1].__enter__()

        def leave(*_: Any) -> None:
            opened.pop().__exit__(None, None, None)

        first = self._denoiser.register_forward_pre_hook(enter, prepend=True)
        last = self._denoiser.register_forward_hook(leave, always_call=True)
        self._undo += [first.remove, last.remove]

    def _forward(self, work: Callable[..., Any], *given: Any, **named: Any) -> Any:
        before = self._denoiser.forwards
        with self.clock.span(_kind()):
            answer = work(*given, **named)
            label = self.clock.label()
        self._rows[label] = self._rows.get(label, 0) + self._denoiser.forwards - before
        return answer

    def _span(self, owner: Any, name: str, part: str) -> None:
        work = getattr(owner, name)

        @functools.wraps(work)
        def timed(*given: Any, **named: Any) -> Any:
            with self.clock.span(part):
                return work(*given, **named)

        self._put(owner, name, timed)

    def _put(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner).get(name)
        if name in vars(owner):
            self._undo.append(lambda: setattr(owner, name, own))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def _meter(self) -> MeteredAllGather | None:
        """Count bytes where FSDP2 gathers; None where the denoiser is not sharded by it."""
        sharding = self._denoiser.sharding
        if sharding is None:
            return None
        meter, units = MeteredAllGather(sharding.all_gather.calls), list(sharding.units)
        self._give(units, meter)
        before = sharding.all_gather
        sharding.all_gather = meter

        def back() -> None:
            before.calls = meter.calls
            sharding.all_gather = before
            self._give(units, before)

        self._undo.append(back)
        return meter

    @staticmethod
    def _give(units: list[FSDPModule], all_gather: CountedAllGather) -> None:
        for unit in units:
            comm: Any = all_gather
            unit.set_custom_all_gather(comm)

    def read(self) -> StepTimes:
        """The step since the last reading, or since the watch began."""
        seconds, beside = self.clock.read()
        rows, self._rows = self._rows, {}
        now = (0, 0) if self.meter is None else (self.meter.calls, self.meter.bytes)
        calls, gathered = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        return StepTimes(seconds, beside, rows, calls, gathered)

    def remove(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()
