"""A bounded memory of encoded prompts, least recently used first to go, and an encoder that lives behind one.

Owns which prompts are run: each once, and all that a call lacks together, in one visit of the weights.
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

    def peek(self, key: Key) -> Value | None:
        """The value of `key` where it is remembered; does not count as a use."""
        return self._values.get(key)

    def get(
        self, keys: Sequence[Key], size: Callable[[Key], int], make: Callable[[list[Key]], Sequence[Value]]
    ) -> list[Value]:
        """The values of `keys`, no two of them equal, from memory or, for all that it lacks, from one call of `make`.

        They are used in this order: the last is the newest. What they will push out, by the `size` of each that is
        lacking, goes before they are made, so that old and new are never here together beyond the limit.
        """
        known = [key for key in keys if key in self._values]
        missing = [key for key in keys if key not in self._values]
        if missing:
            self._use(known)
            self._shrink(self.limit - sum(map(size, missing)), keep=len(known))
            fresh = make(missing)
            self._values.update(zip(missing, fresh, strict=True))
            self.made += len(missing)
            self._held += sum(value.nbytes for value in fresh)
        self._use(keys)
        found = [self._values[key] for key in keys]
        self._shrink(self.limit, keep=1)
        return found

    def _use(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._values.move_to_end(key)

    def _shrink(self, limit: int, keep: int) -> None:
        """Forget what is longest unused, but never the newest `keep`."""
        while self._held > limit and len(self._values) > keep:
            self._held -= self._values.popitem(last=False)[1].nbytes


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

    @property
    def needs_room(self) -> bool:
        """Whether a visit takes as much of the device as all of the weights."""
        return self._residence.needs_room

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
        before, wanted = self.encoded, list(dict.fromkeys(prompts))
        if any(self._remembered.peek(self._key(prompt, negative)) is None for prompt in wanted):
            wanted += self._next(ahead, wanted, negative)
        by_key = {self._key(prompt, negative): prompt for prompt in wanted}
        with self.visit():
            values = self._remembered.get(
                list(by_key),
                lambda key: self._bytes(by_key[key], negative),
                lambda missing: self._made([by_key[key] for key in missing], negative),
            )
        if self.encoded > before:
            log.info("%d prompts encoded, visit %d of the prompt encoder", self.encoded - before, self.visits)
        found = dict(zip(by_key, values, strict=True))
        return [cast(Conditioning, found[self._key(prompt, negative)]) for prompt in prompts]

    def _next(self, ahead: Sequence[str], wanted: Sequence[str], negative: bool) -> list[str]:
        """Those of `ahead` that are remembered together with the prompts that are wanted now."""
        chosen: list[str] = []
        if not ahead:
            return chosen
        held = sum(self._size(prompt, negative) for prompt in wanted)
        for prompt in dict.fromkeys(ahead):
            if held >= self._remembered.limit:
                break
            if prompt not in wanted:
                chosen.append(prompt)
                held += self._size(prompt, negative)
        return chosen

    def _size(self, prompt: str, negative: bool) -> int:
        known = self._remembered.peek(self._key(prompt, negative))
        return self._bytes(prompt, negative) if known is None else known.nbytes

    def _made(self, prompts: Sequence[str], negative: bool) -> list[Value]:
        self._residence.arrive()
        return self._run(prompts, negative)

    @abstractmethod
    def _key(self, prompt: str, negative: bool) -> Key:
        """What one result serves."""

    @abstractmethod
    def _bytes(self, prompt: str, negative: bool) -> int:
        """Size of what `_run` will leave of a prompt."""

    @abstractmethod
    def _run(self, prompts: Sequence[str], negative: bool) -> list[Value]:
        """Run prompts, each alone, during a visit that has begun."""
