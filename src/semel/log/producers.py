"""What a partition remembers of its idempotent producers, and how it judges the next batch.

Rules, for a batch of (producer id, epoch, first sequence, last sequence):

- An epoch below the producer's is refused: INVALID_PRODUCER_EPOCH. That is the fence.
- A higher epoch starts anew and must begin at sequence 0 (KIP-360: a producer without a transactional id
  may raise its own epoch).
- The same first *and* last sequence as one of the last five batches is a duplicate: it is answered with the
  offset that it got the first time.
- The next sequence in line is accepted. Sequences wrap from 2^31 - 1 to 0.
- A range wholly below the oldest remembered batch was written, but its offset is forgotten:
  DUPLICATE_SEQUENCE_NUMBER. Anything else is a gap: OUT_OF_ORDER_SEQUENCE_NUMBER.
- A producer that the partition has no state for may begin anywhere: its state may have expired.
"""

from __future__ import annotations

from typing import Final

from semel.wire.batch import BatchHeader
from semel.wire.errors import ErrorCode

REMEMBERED_BATCHES: Final = 5
_SEQUENCES: Final = 1 << 31
_HALF: Final = 1 << 30


class RememberedBatch:
    """Enough of a batch to recognise it when it comes again, and to answer as the first time."""

    __slots__ = ("append_time_ms", "base_offset", "first_sequence", "last_sequence")

    def __init__(
        self, first_sequence: int, last_sequence: int, base_offset: int, append_time_ms: int
    ) -> None:
        self.first_sequence = first_sequence
        self.last_sequence = last_sequence
        self.base_offset = base_offset
        self.append_time_ms = append_time_ms

    @property
    def last_offset(self) -> int:
        return self.base_offset + (self.last_sequence - self.first_sequence) % _SEQUENCES


class ProducerState:
    """One producer as one partition sees it."""

    __slots__ = ("batches", "coordinator_epoch", "epoch", "last_timestamp_ms", "producer_id")

    def __init__(self, producer_id: int, epoch: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.batches: list[RememberedBatch] = []
        self.last_timestamp_ms = -1
        self.coordinator_epoch = -1

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else -1

    def duplicate_of(self, header: BatchHeader) -> RememberedBatch | None:
        """The remembered batch that `header` repeats, if any."""
        if header.producer_epoch != self.epoch:
            return None
        for batch in self.batches:
            if batch.first_sequence == header.base_sequence and batch.last_sequence == header.last_sequence:
                return batch
        return None

    def refuses(self, header: BatchHeader) -> ErrorCode | None:
        """Why a batch that is no duplicate may not be appended, or None if it may."""
        if header.producer_epoch < self.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        first = header.base_sequence
        if header.producer_epoch > self.epoch:
            return None if first == 0 else ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        if first == (self.last_sequence + 1) % _SEQUENCES:
            return None
        if self.batches and is_before(header.last_sequence, self.batches[0].first_sequence):
            return ErrorCode.DUPLICATE_SEQUENCE_NUMBER
        return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def remember(self, header: BatchHeader) -> None:
        if header.producer_epoch != self.epoch:
            self.epoch = header.producer_epoch
            self.batches = []
        append_time_ms = header.max_timestamp if header.has_append_time else -1
        self.batches.append(
            RememberedBatch(header.base_sequence, header.last_sequence, header.base_offset, append_time_ms)
        )
        if len(self.batches) > REMEMBERED_BATCHES:
            del self.batches[0]
        self.last_timestamp_ms = header.max_timestamp

    def end_transaction(self, epoch: int, coordinator_epoch: int, timestamp_ms: int) -> None:
        """A marker of a higher epoch (KIP-890) fences at the partition, too: a late batch is refused here."""
        if epoch > self.epoch:
            self.epoch = epoch
            self.batches = []
        self.coordinator_epoch = coordinator_epoch
        self.last_timestamp_ms = timestamp_ms


def is_before(sequence: int, other: int) -> bool:
    """Whether `sequence` precedes `other` on the circle of sequences."""
    return 0 < (other - sequence) % _SEQUENCES < _HALF
