"""Deadlines in monotonic time: a heap, not a scan. Whoever sets one is asked when it has come."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline a key; setting it again moves it.

    A moved or cancelled deadline stays in the heap until its time, and is then passed over.
    """

    __slots__ = ("_at", "_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, K]] = []
        self._at: dict[K, tuple[int, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at_ms: int) -> None:
        self._count += 1
        self._at[key] = (at_ms, self._count)
        heappush(self._heap, (at_ms, self._count, key))
        if len(self._heap) > 64 + 2 * len(self._at):
            self._rebuild()

    def cancel(self, key: K) -> None:
        self._at.pop(key, None)

    def due(self, now_ms: int, at_most: int | None = None) -> list[K]:
        """The keys whose time has come, earliest first, no more than asked for; their deadlines are gone."""
        keys: list[K] = []
        while self._heap and self._heap[0][0] <= now_ms and len(keys) != at_most:
            at_ms, count, key = heappop(self._heap)
            if self._at.get(key) == (at_ms, count):
                del self._at[key]
                keys.append(key)
        return keys

    def _rebuild(self) -> None:
        """Heartbeats move a deadline again and again: forget where it was."""
        self._heap = [(at_ms, count, key) for key, (at_ms, count) in self._at.items()]
        self._heap.sort()
