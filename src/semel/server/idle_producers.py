"""Which producers a partition may forget: those that have been silent for long, by their clock and by ours.

The time of a batch is its client's. Whoever copies last year's records writes year-old batches today, and to
forget it between a batch and its retry would let the retry in a second time. So a producer must also have
written nothing between two looks that lie far enough apart by the broker's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from semel.broker.decision import Now
from semel.broker.topics import Partition

QUIET_MS: Final = 15 * 60 * 1000
"""Longer than any client goes on sending a batch again."""


class IdleProducers:
    """Looks at partitions from time to time, and remembers where they ended then."""

    def __init__(self, limit_ms: int) -> None:
        self._limit_ms = limit_ms
        self._quiet_ms = min(limit_ms, QUIET_MS)
        self._looks: dict[Partition, tuple[int, int]] = {}
        """When a partition was looked at, and its end offset."""

    def look(self, partition: Partition, now: Now) -> list[int]:
        """The producers that the partition may forget."""
        looked_ms, end_offset = self._looks.get(partition, (None, 0))
        if looked_ms is not None and now.monotonic_ms - looked_ms < self._quiet_ms:
            return []
        self._looks[partition] = (now.monotonic_ms, partition.log.end_offset)
        return partition.log.idle_producers(now.wall_ms - self._limit_ms, end_offset)

    def keep(self, partitions: Iterable[Partition]) -> None:
        """These are all that there are: forget the others."""
        self._looks = {
            partition: self._looks[partition] for partition in partitions if partition in self._looks
        }
