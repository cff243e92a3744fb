"""Which epochs were committed, are under way, or failed: a short memory for people and metrics."""

import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

REMEMBERED_EPOCHS: Final = 1_000


class Fate(Enum):
    IN_FLIGHT = "in flight"
    COMMITTED = "committed"
    SKIPPED = "skipped"  # it was committed before, and its marker said so
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class TrackedEpoch:
    """One attempt at one epoch."""

    epoch: int
    fate: Fate
    begun: float
    ended: float | None = None
    rows: int = 0
    bytes: int = 0
    reason: str = ""


class EpochTracker:
    """The last attempts, oldest first."""

    def __init__(self) -> None:
        self._epochs: deque[TrackedEpoch] = deque(maxlen=REMEMBERED_EPOCHS)
        self.last_committed: int | None = None

    def begun(self, epoch: int) -> None:
        """An attempt at the epoch begins; it is in flight until one of the calls below."""
        self._epochs.append(TrackedEpoch(epoch, Fate.IN_FLIGHT, time.time()))

    def skipped(self, epoch: int) -> None:
        """The epoch was asked for, and the marker said that it is committed."""
        now = time.time()
        self._epochs.append(TrackedEpoch(epoch, Fate.SKIPPED, now, now))
        self.last_committed = epoch

    def committed(self, epoch: int, rows: int, size_bytes: int) -> None:
        """The attempt in flight has made so many rows visible."""
        tracked = self._end(Fate.COMMITTED)
        tracked.rows, tracked.bytes = rows, size_bytes
        self.last_committed = epoch

    def aborted(self, reason: str = "") -> None:
        """The attempt in flight was dropped."""
        self._end(Fate.ABORTED).reason = reason

    def failed(self, reason: str) -> None:
        """The sink failed, and with it the attempt in flight, if there is one."""
        if self.in_flight:
            self._end(Fate.FAILED).reason = reason

    def _end(self, fate: Fate) -> TrackedEpoch:
        tracked = self._epochs[-1]
        tracked.fate, tracked.ended = fate, time.time()
        return tracked

    @property
    def epochs(self) -> list[TrackedEpoch]:
        """The last attempts, up to `REMEMBERED_EPOCHS`, oldest first."""
        return list(self._epochs)

    @property
    def in_flight(self) -> list[TrackedEpoch]:
        """The attempts that are under way: one at most, or none."""
        return [tracked for tracked in self._epochs if tracked.fate is Fate.IN_FLIGHT]
