"""One partition: where it begins and ends, who writes to it, and what readers may see.

The log has two ends. `end_offset` is where the next batch goes; it moves when a batch is applied. What
readers see moves later, when the batch is durable (`reveal`): the *high watermark* is the durable end, and
a transaction counts as open for readers until its marker is durable, even if its data already is.

    0 ... shown_start_offset ... last_stable_offset ... high_watermark ... end_offset
          durable start          first open transaction  durable            applied

An open transaction is known by its first offset here. First offsets only grow, so the dictionaries below
are ordered by construction and their first key is the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from semel.log.producers import ProducerState, RememberedBatch
from semel.wire.batch import BatchHeader
from semel.wire.errors import ErrorCode


@dataclass(slots=True, frozen=True)
class AbortedTransaction:
    """A range of offsets in which the records of one producer must be skipped by read_committed readers."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


@dataclass(slots=True, frozen=True)
class EpochStart:
    """The first offset that was written under a leader epoch."""

    epoch: int
    start_offset: int


class PartitionLog:
    """The state of one partition, a pure function of the entries applied to it."""

    __slots__ = (
        "end_offset",
        "epochs",
        "high_watermark",
        "log_start_offset",
        "open_transactions",
        "producers",
        "shown_start_offset",
        "unstable",
    )

    def __init__(self) -> None:
        self.log_start_offset = 0
        self.shown_start_offset = 0
        self.end_offset = 0
        self.high_watermark = 0
        self.epochs: list[EpochStart] = []
        self.producers: dict[int, ProducerState] = {}
        self.open_transactions: dict[int, int] = {}
        """Producer id to the first offset of its transaction, as applied."""
        self.unstable: dict[int, int] = {}
        """First offset to producer id of every transaction that readers must still take for open."""

    # What readers may see.

    @property
    def last_stable_offset(self) -> int:
        for first_offset in self.unstable:
            # Deleting records may pass an open transaction: nothing below the start counts.
            return min(max(first_offset, self.shown_start_offset), self.high_watermark)
        return self.high_watermark

    def end_of_epoch(self, epoch: int) -> EpochStart:
        """The newest epoch at or below `epoch`, and where it ended: what OffsetForLeaderEpoch answers."""
        end_offset = self.high_watermark
        for known in reversed(self.epochs):
            if known.epoch <= epoch:
                return EpochStart(known.epoch, max(end_offset, self.shown_start_offset))
            end_offset = known.start_offset
        if self.epochs and epoch >= 0:
            # Older than all that is left: it ended where the first one known began. To say "unknown" would
            # make a consumer believe that its records are gone, and reset it.
            return EpochStart(epoch, max(end_offset, self.shown_start_offset))
        return EpochStart(-1, -1)

    def epoch_at(self, offset: int) -> int:
        """The leader epoch that the record at `offset` was written under, -1 if unknown."""
        for known in reversed(self.epochs):
            if known.start_offset <= offset:
                return known.epoch
        return -1

    # Deciding.

    def duplicate_of(self, header: BatchHeader) -> RememberedBatch | None:
        producer = self.producers.get(header.producer_id)
        return None if producer is None else producer.duplicate_of(header)

    def refuses(self, header: BatchHeader) -> ErrorCode | None:
        """Why the producer's next batch may not be appended; duplicates are asked for first."""
        producer = self.producers.get(header.producer_id)
        return None if producer is None else producer.refuses(header)

    # Applying.

    def append(self, header: BatchHeader) -> None:
        """Apply a batch whose offset and leader epoch have been placed."""
        self._advance(header)
        if header.producer_id < 0:
            return
        producer = self.producers.get(header.producer_id)
        if producer is None:
            producer = self.producers[header.producer_id] = ProducerState(
                header.producer_id, header.producer_epoch
            )
        if header.base_sequence >= 0:
            producer.remember(header)
        if header.is_transactional and header.producer_id not in self.open_transactions:
            self.open_transactions[header.producer_id] = header.base_offset
            self.unstable[header.base_offset] = header.producer_id

    def append_marker(
        self, header: BatchHeader, coordinator_epoch: int, commit: bool
    ) -> AbortedTransaction | None:
        """Apply the marker that ends a producer's transaction; tells what an abort makes unreadable."""
        self._advance(header)
        producer = self.producers.get(header.producer_id)
        if producer is None:
            producer = self.producers[header.producer_id] = ProducerState(
                header.producer_id, header.producer_epoch
            )
        producer.end_transaction(header.producer_epoch, coordinator_epoch, header.max_timestamp)
        first_offset = self.open_transactions.pop(header.producer_id, None)
        if first_offset is None or commit:
            return None
        stable = next(iter(self.open_transactions.values()), header.base_offset + 1)
        return AbortedTransaction(header.producer_id, first_offset, header.base_offset, stable)

    def _advance(self, header: BatchHeader) -> None:
        self.end_offset = header.last_offset + 1
        if not self.epochs or self.epochs[-1].epoch < header.leader_epoch:
            self.epochs.append(EpochStart(header.leader_epoch, header.base_offset))

    def move_start(self, offset: int) -> None:
        """Retention or DeleteRecords: forget what lies below. May pass an open transaction."""
        self.log_start_offset = max(self.log_start_offset, offset)
        while len(self.epochs) > 1 and self.epochs[1].start_offset <= self.log_start_offset:
            del self.epochs[0]

    def idle_producers(self, limit_ms: int, offset: int) -> list[int]:
        """Those without an open transaction whose last batch is older than `limit_ms` and below `offset`."""
        return [
            producer.producer_id
            for producer in self.producers.values()
            if producer.last_timestamp_ms < limit_ms
            and (not producer.batches or producer.batches[-1].base_offset < offset)
            and producer.producer_id not in self.open_transactions
        ]

    def forget_producers(self, producer_ids: Iterable[int]) -> None:
        for producer_id in producer_ids:
            self.producers.pop(producer_id, None)

    # Showing.

    def reveal(self, end_offset: int) -> None:
        """What lies below `end_offset` is durable."""
        self.high_watermark = max(self.high_watermark, end_offset)

    def reveal_start(self, offset: int) -> None:
        """That the log begins at `offset` is durable: readers below it may be told so."""
        self.shown_start_offset = max(self.shown_start_offset, offset)

    def reveal_end(self, first_offset: int) -> None:
        """The marker of the transaction that began at `first_offset` is durable."""
        self.unstable.pop(first_offset, None)
