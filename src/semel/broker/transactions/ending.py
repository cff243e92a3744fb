"""How a transaction ends: markers, offsets and state, all in one decision."""

from __future__ import annotations

from semel.broker.core import Broker
from semel.broker.entries import Append, Entry
from semel.broker.group_messages import TxnOffsetsEnded
from semel.broker.journal_messages import ProducerIdsReserved
from semel.broker.topics import Partition
from semel.broker.transaction_messages import TransactionEnded
from semel.broker.transactions.state import MAX_EPOCH, NO_EPOCH, NO_PRODUCER_ID, Transaction
from semel.wire.batch import read_header
from semel.wire.records import build_end_marker


class Identity:
    """A producer id and an epoch, with the entry that reserves the id if it is a new one.

    A decision with such an entry must be on disk before its answer leaves, whatever the durability: no id is
    given twice.
    """

    __slots__ = ("epoch", "producer_id", "reserved")

    def __init__(self, producer_id: int, epoch: int, reserved: ProducerIdsReserved | None = None) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.reserved = reserved

    @property
    def must_sync(self) -> bool:
        return self.reserved is not None


def raised(broker: Broker, transaction: Transaction) -> Identity:
    """The identity after the transaction's: the next epoch, or epoch 0 of a new id where there is no next."""
    if transaction.epoch < MAX_EPOCH and broker.producer_ids.may_raise(transaction.producer_id):
        return Identity(transaction.producer_id, transaction.epoch + 1)
    return fresh(broker)


def fresh(broker: Broker) -> Identity:
    producer_id, reserved = broker.producer_ids.take()
    return Identity(producer_id, 0, reserved)


def end_entries(
    broker: Broker,
    transaction: Transaction,
    *,
    commit: bool,
    successor: Identity | None,
    by_broker: bool,
    now_ms: int,
) -> list[Entry]:
    """The whole end of a transaction. Without a successor the identity stays, as version 1 commits have it.

    Markers of a raised epoch carry it, so that a late batch is refused at the partition, too.
    """
    identity = successor or Identity(transaction.producer_id, transaction.epoch)
    marker_epoch = identity.epoch
    if identity.producer_id != transaction.open_producer_id:
        marker_epoch = transaction.open_epoch + 1  # Higher than any batch of the old id has.
    entries: list[Entry] = []
    if successor is not None and successor.reserved is not None:
        entries.append(successor.reserved)
    for topic_id, index in transaction.partitions:
        partition = broker.catalog.partition_by_id(topic_id, index)
        if partition is not None:  # Otherwise its topic was deleted meanwhile, with all that it held.
            entries.append(
                marker(
                    broker,
                    partition,
                    transaction.open_producer_id,
                    marker_epoch,
                    commit=commit,
                    now_ms=now_ms,
                )
            )
    for group_id in transaction.groups:
        group = broker.groups.by_id.get(group_id)
        # A group that was named but got no offsets has nothing to end; it may not even exist.
        if group is not None and transaction.open_producer_id in group.offsets.pending:
            entries.append(
                TxnOffsetsEnded(group_id=group_id, producer_id=transaction.open_producer_id, committed=commit)
            )
    entries.append(
        TransactionEnded(
            transactional_id=transaction.transactional_id,
            committed=commit,
            by_broker=by_broker,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            last_producer_id=transaction.producer_id if successor is not None else NO_PRODUCER_ID,
            last_epoch=transaction.epoch if successor is not None else NO_EPOCH,
            updated_ms=now_ms,
        )
    )
    return entries


def marker(
    broker: Broker,
    partition: Partition,
    producer_id: int,
    producer_epoch: int,
    *,
    commit: bool,
    now_ms: int,
    base_offset: int | None = None,
) -> Append:
    """The control batch that ends a producer's transaction in one partition."""
    batch = memoryview(
        build_end_marker(
            commit=commit,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            coordinator_epoch=broker.leader_epoch,
            timestamp=now_ms,
            base_offset=partition.log.end_offset if base_offset is None else base_offset,
            leader_epoch=broker.leader_epoch,
        )
    )
    return Append(partition.topic.topic_id, partition.index, read_header(batch), batch)
