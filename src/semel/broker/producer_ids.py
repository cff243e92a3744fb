"""Producer ids, each given once and never again.

Ids come from blocks. A block is reserved in the journal, on disk, before the first id of it is given; after a
restart the rest of a block is skipped.
"""

from __future__ import annotations

from typing import Final

from semel.broker.journal_messages import ProducerIdsReserved

BLOCK_IDS: Final = 1000


class ProducerIds:
    """Gives ids and says when the journal must hold a new block first."""

    __slots__ = ("_next", "end")

    def __init__(self) -> None:
        self.end = 0
        """Ids below this may have been given; the journal says so."""
        self._next = 0

    def take(self) -> tuple[int, ProducerIdsReserved | None]:
        """An id, and the entry that must be journaled with it if it opens a block."""
        producer_id = self._next
        self._next += 1
        if producer_id < self.end:
            return producer_id, None
        return producer_id, ProducerIdsReserved(end_id=producer_id + BLOCK_IDS)

    def reserve(self, end: int) -> None:
        self.end = max(self.end, end)

    def skip_given(self) -> None:
        """After a replay: whatever the journal has reserved may have been given."""
        self._next = self.end
