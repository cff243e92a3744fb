"""The parts of a snapshot: the catalog, each partition, group and transaction, written and loaded again.

A part begins with its kind. The messages are in `semel/broker/schema`; kinds are for ever, as those of
entries are.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from semel.broker.core import Broker
from semel.broker.group_messages import GroupPart
from semel.broker.groups.group import Group
from semel.broker.journal_messages import (
    CatalogPart,
    Config,
    EpochPart,
    FlushedPart,
    OpenTransactionPart,
    PartitionPart,
    ProducerPart,
    QuotaPart,
    QuotaSet,
    RememberedBatchPart,
    TopicPart,
)
from semel.broker.quotas import quota_set
from semel.broker.topics import Partition
from semel.broker.transaction_messages import TransactionPart
from semel.broker.transactions.state import Transaction
from semel.errors import CorruptionError
from semel.log.partition import EpochStart, PartitionLog
from semel.log.producers import ProducerState, RememberedBatch
from semel.storage.partition import Flushed

Part: TypeAlias = CatalogPart | PartitionPart | GroupPart | TransactionPart

_CATALOG: Final = 1
_PARTITION: Final = 2
_GROUP: Final = 3
_TRANSACTION: Final = 4
_VERSION: Final = 0


def encode_catalog(broker: Broker) -> bytearray:
    part = CatalogPart(
        producer_ids_end=broker.producer_ids.end,
        topics=[
            TopicPart(
                topic_id=topic.topic_id,
                name=topic.name,
                partitions=len(topic.partitions),
                configs=[Config(name=name, value=value) for name, value in topic.configs.items()],
            )
            for topic in broker.catalog
        ],
        quotas=[_quota_part(quota_set(*quota)) for quota in broker.quotas.by_entity.items()],
        epochs_unsynced=broker.producer_ids.epochs_unsynced,
    )
    return _encoded(_CATALOG, part)


def _quota_part(quota: QuotaSet) -> QuotaPart:
    return QuotaPart(entity=quota.entity, values=quota.values)


def load_catalog(broker: Broker, part: CatalogPart) -> None:
    broker.producer_ids.reserve(part.producer_ids_end)
    broker.producer_ids.epochs_unsynced = part.epochs_unsynced
    for topic in part.topics:
        configs = {config.name: config.value for config in topic.configs}
        broker.catalog.create(topic.name, topic.topic_id, topic.partitions, configs)
    for quota in part.quotas:
        broker.quotas.set(QuotaSet(entity=quota.entity, values=quota.values))


def encode_partition(partition: Partition, flushed: Flushed | None) -> bytearray:
    log = partition.log
    part = PartitionPart(
        topic_id=partition.topic.topic_id,
        index=partition.index,
        log_start_offset=log.log_start_offset,
        end_offset=log.end_offset,
        epochs=[EpochPart(epoch=known.epoch, start_offset=known.start_offset) for known in log.epochs],
        producers=[_producer_part(producer) for producer in log.producers.values()],
        open_transactions=[
            OpenTransactionPart(producer_id=producer_id, first_offset=first_offset)
            for producer_id, first_offset in log.open_transactions.items()
        ],
        flushed=None
        if flushed is None
        else FlushedPart(segment_base=flushed.segment_base, size=flushed.size, end_offset=flushed.end_offset),
    )
    return _encoded(_PARTITION, part)


def _producer_part(producer: ProducerState) -> ProducerPart:
    return ProducerPart(
        producer_id=producer.producer_id,
        epoch=producer.epoch,
        coordinator_epoch=producer.coordinator_epoch,
        last_timestamp_ms=producer.last_timestamp_ms,
        batches=[
            RememberedBatchPart(
                first_sequence=batch.first_sequence,
                last_sequence=batch.last_sequence,
                base_offset=batch.base_offset,
                append_time_ms=batch.append_time_ms,
            )
            for batch in producer.batches
        ],
    )


def load_partition(log: PartitionLog, part: PartitionPart) -> None:
    log.move_start(part.log_start_offset)
    log.end_offset = part.end_offset
    log.epochs = [EpochStart(known.epoch, known.start_offset) for known in part.epochs]
    for known in part.producers:
        producer = log.producers[known.producer_id] = ProducerState(known.producer_id, known.epoch)
        producer.coordinator_epoch = known.coordinator_epoch
        producer.last_timestamp_ms = known.last_timestamp_ms
        producer.batches = [
            RememberedBatch(
                batch.first_sequence, batch.last_sequence, batch.base_offset, batch.append_time_ms
            )
            for batch in known.batches
        ]
    for transaction in part.open_transactions:
        log.open_transactions[transaction.producer_id] = transaction.first_offset
        log.unstable[transaction.first_offset] = transaction.producer_id


def flushed_in(part: PartitionPart) -> Flushed | None:
    flushed = part.flushed
    return None if flushed is None else Flushed(flushed.segment_base, flushed.size, flushed.end_offset)


def encode_group(group: Group) -> bytearray:
    return _encoded(_GROUP, group.part())


def encode_transaction(transaction: Transaction) -> bytearray:
    return _encoded(_TRANSACTION, transaction.part())


def _encoded(kind: int, part: Part) -> bytearray:
    out = bytearray((kind, _VERSION))
    part.encode(out, _VERSION, [])
    return out


def decode_part(stored: memoryview) -> Part:
    match stored[0]:
        case 1:
            return CatalogPart.decode(stored, 2, stored[1])[0]
        case 2:
            return PartitionPart.decode(stored, 2, stored[1])[0]
        case 3:
            return GroupPart.decode(stored, 2, stored[1])[0]
        case 4:
            return TransactionPart.decode(stored, 2, stored[1])[0]
        case kind:
            raise CorruptionError(
                f"the snapshot holds a part of kind {kind}: it was written by a newer release"
            )
