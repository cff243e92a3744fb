"""The settings of a topic that its logs obey, under Kafka's names and with Kafka's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DAY_MS: Final = 24 * 60 * 60 * 1000
LONG_MAX: Final = 2**63 - 1
UNLIMITED: Final = -1
"""As a retention: keep for ever."""

DELETE: Final = "delete"
COMPACT: Final = "compact"


@dataclass(slots=True, frozen=True)
class LogSettings:
    """How the log of a partition is cut into segments, and what of it is kept."""

    segment_bytes: int = 1024 * 1024 * 1024
    segment_ms: int = 7 * DAY_MS
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = UNLIMITED
    cleanup_policy: frozenset[str] = frozenset((DELETE,))
    delete_retention_ms: int = DAY_MS
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = LONG_MAX
    index_interval_bytes: int = 4096

    @property
    def roll_ms(self) -> int:
        """How much time a segment may span: what is to be compacted in time must be closed in time."""
        return min(self.segment_ms, self.max_compaction_lag_ms) if self.compacts else self.segment_ms

    @property
    def deletes(self) -> bool:
        return DELETE in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        return COMPACT in self.cleanup_policy
