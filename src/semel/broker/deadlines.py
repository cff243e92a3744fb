"""Deadlines in monotonic time: a timer wheel, not a scan. Whoever sets one is asked when it has come.

Time is cut into slots, and a deadline lies in the slot of its time. Setting, moving and cancelling one touch
no other, and asking what has come looks at the slots that have passed since it was last asked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SLOT_MS: Final = 50
"""About how often the wheel is turned: then no slot is looked at more than twice."""


class Deadlines(Generic[K]):
    """At most one deadline a key; setting it again moves it."""

    __slots__ = ("_at", "_next", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, dict[K, int]] = {}
        """The slots that hold anything, by their number: each key with its time."""
        self._at: dict[K, int] = {}
        """The slot of each key."""
        self._next = 0
        """The first slot that has not passed."""

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at_ms: int) -> None:
        self.cancel(key)
        number = max(at_ms // SLOT_MS, self._next)
        self._at[key] = number
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
        slot[key] = at_ms

    def cancel(self, key: K) -> None:
        number = self._at.pop(key, None)
        if number is not None:
            slot = self._slots[number]
            del slot[key]
            if not slot:
                del self._slots[number]

    def due(self, now_ms: int, at_most: int | None = None) -> list[K]:
        """The keys whose time has come, no more than asked for; their deadlines are gone.

        Slot by slot, and within a slot in the order in which they were set.
        """
        due = list(islice(self._ripe(now_ms), at_most))
        for key in due:
            self.cancel(key)
        return due

    def _ripe(self, now_ms: int) -> Iterator[K]:
        current = now_ms // SLOT_MS
        for number in self._passed(current):
            for key, at_ms in self._slots[number].items():
                if at_ms <= now_ms:
                    yield key
            self._next = number
        self._next = max(self._next, current)

    def _passed(self, current: int) -> list[int]:
        """The slots that hold anything up to the current one, oldest first."""
        if current - self._next < len(self._slots):
            return [number for number in range(self._next, current + 1) if number in self._slots]
        # The wheel stood still for longer than all of its slots: look which of them have passed.
        return sorted(number for number in self._slots if number <= current)
