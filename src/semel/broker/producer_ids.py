"""Producer ids, each given once and never again.

Ids come from blocks. A block is reserved in the journal, on disk, before the first id of it is given; after a
restart the rest of a block is skipped.

Neither is an epoch of an id given twice. With durability=os the end of a transaction tells a raised epoch
before that is on disk, and a power failure may take the raise back. So in a journal that was ever written in
that way the next raise of an id from before the start gives a new id.
"""

from __future__ import annotations

from typing import Final

from semel.broker.journal_messages import ProducerIdsReserved

BLOCK_IDS: Final = 1000


class ProducerIds:
    """Gives ids and says when the journal must hold a new block first."""

    __slots__ = ("_first", "_next", "end", "epochs_unsynced")

    def __init__(self) -> None:
        self.end = 0
        """Ids below this may have been given; the journal says so."""
        self.epochs_unsynced = False
        """Whether epochs may have been told that did not reach the disk."""
        self._next = 0
        self._first = 0
        """Ids from here on were given since the start."""

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
        self._next = self._first = self.end

    def may_raise(self, producer_id: int) -> bool:
        """Whether the next epoch of an id is sure to be one that nobody was told."""
        return not self.epochs_unsynced or producer_id >= self._first
