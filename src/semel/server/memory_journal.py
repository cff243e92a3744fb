"""The journal of a broker in memory: there is none, and everything is released at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from semel.disk import Buffer


class MemoryJournal:
    """Counts groups, and hands their batches straight to the segments, which are in memory too."""

    def __init__(self, after_sync: Callable[[list[object]], None]) -> None:
        self._after_sync = after_sync
        self.end = 0

    @property
    def released(self) -> int:
        return self.end

    def append(
        self, entries: Sequence[Sequence[Buffer]], *, sync: bool = False, attachment: object = None
    ) -> int:
        self.end += 1
        if attachment is not None:
            self._after_sync([attachment])
        return self.end
