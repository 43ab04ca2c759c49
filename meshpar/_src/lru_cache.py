"""Caches with a bound on their number of entries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A mapping with at most ``max_entries`` entries; adding one more evicts the least recently used entry.

    A lookup hashes its key once and writes one integer, because long keys are expensive to hash and lookups are frequent.
    Evicting takes time linear in the number of entries; an entry is worth caching only if making it takes longer than that.

    Threads may read and write one cache concurrently. An eviction that races with another one may evict an entry more.
    """

    __slots__ = ("_clock", "_entries", "_max_entries")

    def __init__(self, max_entries: int):
        self._max_entries = max_entries
        self._entries: dict[K, list] = {}  # key -> [value, time of the last use]
        self._clock = itertools.count()

    def get(self, key: K) -> V | None:
        """The value of a key, which becomes the most recently used; None: it has none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = next(self._clock)
        return entry[0]

    def put(self, key: K, value: V) -> V:
        """Store a value, and return it."""
        self._entries[key] = [value, next(self._clock)]
        while len(self._entries) > self._max_entries:
            oldest = min(list(self._entries.items()), key=lambda item: item[1][1])[0]
            self._entries.pop(oldest, None)
        return value

    def setdefault(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key; if it has none, that which ``make`` returns, which is stored."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found

    def clear(self) -> None:
        self._entries.clear()

    def latest(self) -> V | None:
        """The most recently used value; None: the cache is empty."""
        return max(list(self._entries.values()), key=lambda entry: entry[1], default=[None])[0]

    def __len__(self) -> int:
        return len(self._entries)
