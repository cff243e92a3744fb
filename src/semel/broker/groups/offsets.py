"""The offsets of one group: those committed, and those that open transactions hold.

Every write of an offset has a number, counted per group in the order of the journal. A transaction writes
when its TxnOffsetCommit arrives, not when it ends: its offset takes effect at the commit, and only if nothing
was written for that partition after it. An abort drops it. Topics are known by id, so a new topic never
inherits the offsets of a deleted one of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from semel.broker.group_messages import (
    OffsetsCommitted,
    OffsetsRemoved,
    PendingPart,
    StoredOffset,
    TopicOffsets,
    TxnOffsetsEnded,
    TxnOffsetsPending,
)

NO_EXPIRY: Final = -1


class CommittedOffset:
    """Where a group goes on reading, and when and in which order that was said."""

    __slots__ = ("committed_at_ms", "expires_at_ms", "leader_epoch", "metadata", "offset", "write")

    def __init__(
        self,
        offset: int,
        leader_epoch: int,
        metadata: str,
        committed_at_ms: int,
        expires_at_ms: int,
        write: int,
    ) -> None:
        self.offset = offset
        self.leader_epoch = leader_epoch
        self.metadata = metadata
        self.committed_at_ms = committed_at_ms
        self.expires_at_ms = expires_at_ms
        """Set by clients of old that name their own retention, or NO_EXPIRY."""
        self.write = write


class PendingOffsets:
    """What one open transaction will commit."""

    __slots__ = ("offsets", "producer_epoch")

    def __init__(self, producer_epoch: int) -> None:
        self.producer_epoch = producer_epoch
        self.offsets: dict[tuple[bytes, int], CommittedOffset] = {}


class GroupOffsets:
    """The offsets of a group, by topic id and partition; changed by entries only."""

    __slots__ = ("_holders", "committed", "pending", "writes")

    def __init__(self) -> None:
        self.committed: dict[bytes, dict[int, CommittedOffset]] = {}
        self.pending: dict[int, PendingOffsets] = {}
        """By producer id."""
        self.writes = 0
        self._holders: dict[tuple[bytes, int], set[int]] = {}
        """Which producers have an offset pending for a partition."""

    def __bool__(self) -> bool:
        return bool(self.committed or self.pending)

    def get(self, topic_id: bytes, index: int) -> CommittedOffset | None:
        of_topic = self.committed.get(topic_id)
        return None if of_topic is None else of_topic.get(index)

    def is_pending(self, topic_id: bytes, index: int) -> bool:
        """Whether an open transaction may still move this offset."""
        return (topic_id, index) in self._holders

    def commit(self, entry: OffsetsCommitted) -> None:
        self.writes += 1
        for topic in entry.topics:
            of_topic = self.committed.setdefault(topic.topic_id, {})
            for part in topic.partitions:
                of_topic[part.index] = CommittedOffset(
                    part.offset,
                    part.leader_epoch,
                    part.metadata,
                    entry.committed_at_ms,
                    entry.expires_at_ms,
                    self.writes,
                )

    def hold(self, entry: TxnOffsetsPending) -> None:
        self.writes += 1
        pending = self.pending.get(entry.producer_id)
        if pending is None:
            pending = self.pending[entry.producer_id] = PendingOffsets(entry.producer_epoch)
        pending.producer_epoch = entry.producer_epoch
        for key, offset in _written(entry.topics, entry.committed_at_ms, self.writes):
            pending.offsets[key] = offset
            self._holders.setdefault(key, set()).add(entry.producer_id)

    def end(self, entry: TxnOffsetsEnded) -> None:
        """The transaction has ended: its offsets take effect unless a later write was there first, or are
        dropped.
        """
        pending = self.pending.pop(entry.producer_id, None)
        if pending is None:
            return
        for key, offset in pending.offsets.items():
            self._release(key, entry.producer_id)
            if entry.committed:
                topic_id, index = key
                of_topic = self.committed.setdefault(topic_id, {})
                known = of_topic.get(index)
                if known is None or known.write < offset.write:
                    of_topic[index] = offset

    def remove(self, entry: OffsetsRemoved) -> None:
        """Forget these offsets, pending ones too: the removal is the later write."""
        for topic in entry.topics:
            of_topic = self.committed.get(topic.topic_id, {})
            for index in topic.indexes:
                of_topic.pop(index, None)
                self._drop_pending((topic.topic_id, index))
            if not of_topic:
                self.committed.pop(topic.topic_id, None)

    def _drop_pending(self, key: tuple[bytes, int]) -> None:
        for producer_id in self._holders.pop(key, ()):
            pending = self.pending[producer_id]
            del pending.offsets[key]
            if not pending.offsets:
                del self.pending[producer_id]

    def _release(self, key: tuple[bytes, int], producer_id: int) -> None:
        holders = self._holders[key]
        holders.discard(producer_id)
        if not holders:
            del self._holders[key]

    # Snapshots.

    def stored(self) -> list[StoredOffset]:
        return [
            _stored(topic_id, index, offset)
            for topic_id, of_topic in self.committed.items()
            for index, offset in of_topic.items()
        ]

    def stored_pending(self) -> list[PendingPart]:
        return [
            PendingPart(
                producer_id=producer_id,
                producer_epoch=pending.producer_epoch,
                offsets=[
                    _stored(topic_id, index, offset) for (topic_id, index), offset in pending.offsets.items()
                ],
            )
            for producer_id, pending in self.pending.items()
        ]

    def load(self, writes: int, offsets: list[StoredOffset], pending: list[PendingPart]) -> None:
        self.writes = writes
        for stored in offsets:
            self.committed.setdefault(stored.topic_id, {})[stored.index] = _loaded(stored)
        for part in pending:
            held = self.pending[part.producer_id] = PendingOffsets(part.producer_epoch)
            for stored in part.offsets:
                key = (stored.topic_id, stored.index)
                held.offsets[key] = _loaded(stored)
                self._holders.setdefault(key, set()).add(part.producer_id)


def _written(
    topics: list[TopicOffsets], committed_at_ms: int, write: int
) -> Iterator[tuple[tuple[bytes, int], CommittedOffset]]:
    for topic in topics:
        for part in topic.partitions:
            yield (
                (topic.topic_id, part.index),
                CommittedOffset(
                    part.offset, part.leader_epoch, part.metadata, committed_at_ms, NO_EXPIRY, write
                ),
            )


def _stored(topic_id: bytes, index: int, offset: CommittedOffset) -> StoredOffset:
    return StoredOffset(
        topic_id=topic_id,
        index=index,
        offset=offset.offset,
        leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
        committed_at_ms=offset.committed_at_ms,
        expires_at_ms=offset.expires_at_ms,
        write=offset.write,
    )


def _loaded(stored: StoredOffset) -> CommittedOffset:
    return CommittedOffset(
        stored.offset,
        stored.leader_epoch,
        stored.metadata,
        stored.committed_at_ms,
        stored.expires_at_ms,
        stored.write,
    )
