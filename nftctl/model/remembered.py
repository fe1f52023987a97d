"""A bounded memory of encoded prompts, least recently used first to go, and an encoder that lives behind one.

Owns the order in which prompts are run: one at a time, each once, all that are missing in one visit of the weights.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar, cast

from nftctl.model.family import Conditioning
from nftctl.model.residence import Residence

# Cosmos3-Nano leaves 19 MB a prompt of 128 tokens: 4 GiB remember about two hundred. SD3 leaves 3 MB a prompt.
CACHE_BYTES = 4 << 30

log = logging.getLogger("nftctl.model")


class Sized(Protocol):
    """Something that knows its size."""

    @property
    def nbytes(self) -> int: ...


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Sized)


class Remembered(Generic[Key, Value]):
    """Values by key, within `limit` bytes. The newest value is kept even where it alone is larger."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.made = 0
        """Values that were really computed."""
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._held = 0

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of `key`, from memory or from `make`."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        self.made += 1
        self._values[key] = value
        self._held += value.nbytes
        while self._held > self.limit and len(self._values) > 1:
            self._held -= self._values.popitem(last=False)[1].nbytes
        return value


class RememberingEncoder(ABC, Generic[Key, Value]):
    """A frozen encoder with a memory of the prompts that it has run.

    Each prompt runs alone, so what it leaves does not depend, bit for bit, on which prompts came with it.
    """

    def __init__(self, residence: Residence, cache_bytes: int) -> None:
        self._residence = residence
        self._remembered: Remembered[Key, Value] = Remembered(cache_bytes)

    @property
    def encoded(self) -> int:
        """Prompts really encoded so far."""
        return self._remembered.made

    @property
    def visits(self) -> int:
        """Times that the weights had to be on the device for it."""
        return self._residence.visits

    def check(self, prompt: str, *, negative: bool = False) -> None:
        """Refuse a prompt that cannot be encoded; encodes nothing."""

    def visit(self) -> AbstractContextManager[None]:
        """Calls of `encode` inside are one visit of the weights."""
        return self._residence.visit()

    def encode(
        self, prompts: Sequence[str], *, negative: bool = False, ahead: Sequence[str] = ()
    ) -> list[Conditioning]:
        """Return what each prompt leaves, in order; equal prompts share one object.

        Where any of them has to be run, prompts of `ahead` are run too, as far as the memory can hold them.
        """
        before = self.encoded
        with self.visit():
            found = {prompt: self._one(prompt, negative) for prompt in dict.fromkeys(prompts)}
            if self.encoded > before:
                self._look_ahead(ahead, negative, found)
        if self.encoded > before:
            log.info("%d prompts encoded, visit %d of the prompt encoder", self.encoded - before, self.visits)
        return [cast(Conditioning, found[prompt]) for prompt in prompts]

    def _look_ahead(self, ahead: Sequence[str], negative: bool, found: dict[str, Value]) -> None:
        held = sum(value.nbytes for value in found.values())
        for prompt in dict.fromkeys(ahead):
            if held >= self._remembered.limit:
                break
            if prompt not in found:
                held += self._one(prompt, negative).nbytes

    def _one(self, prompt: str, negative: bool) -> Value:
        return self._remembered.get(self._key(prompt, negative), lambda: self._made(prompt, negative))

    def _made(self, prompt: str, negative: bool) -> Value:
        self._residence.arrive()
        return self._run(prompt, negative)

    @abstractmethod
    def _key(self, prompt: str, negative: bool) -> Key:
        """What one result serves."""

    @abstractmethod
    def _run(self, prompt: str, negative: bool) -> Value:
        """Run one prompt, with the weights there."""
