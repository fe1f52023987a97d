"""A bounded memory of encoded prompts, least recently used first to go. Refuses nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

# Cosmos3-Nano leaves 19 MB a prompt of 128 tokens: 4 GiB remember about two hundred. SD3 leaves 3 MB a prompt.
CACHE_BYTES = 4 << 30


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
