"""WriteTxnMarkers (27): an operator ends a transaction that hangs in a partition.

A transaction that the coordinator has open is aborted as a whole, and its producer fenced: a marker in one
partition would tear it. Committing it by hand is refused. What no coordinator knows gets the marker that
was asked for.
"""

from __future__ import annotations

import logging
from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Append, Entry
from semel.broker.topics import Partition
from semel.broker.transactions.ending import end_entries, marker, raised
from semel.wire.errors import ErrorCode
from semel.wire.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

log = logging.getLogger(__name__)

_RAISES_EPOCH: Final = 2


def write_txn_markers(broker: Broker, request: WriteTxnMarkersRequest, caller: Caller, now: Now) -> Decision:
    writing = _Writing(broker, now.wall_ms)
    results = [
        WritableTxnMarkerResult(producer_id=wanted.producer_id, topics=writing.write(wanted))
        for wanted in request.markers
    ]
    return Decision(WriteTxnMarkersResponse(markers=results), writing.entries, sync=writing.must_sync)


class _Writing:
    """The markers of one request; several may go to one partition, one after the other."""

    def __init__(self, broker: Broker, now_ms: int) -> None:
        self._broker = broker
        self._now_ms = now_ms
        self._ends: dict[Partition, int] = {}
        self._ended: set[int] = set()
        self.entries: list[Entry] = []
        self.must_sync = False

    def write(self, wanted: WritableTxnMarker) -> list[WritableTxnMarkerTopicResult]:
        return [
            WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=[
                    WritableTxnMarkerPartitionResult(
                        partition_index=index, error_code=self._write(wanted, topic.name, index)
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in wanted.topics
        ]

    def _write(self, wanted: WritableTxnMarker, name: str, index: int) -> ErrorCode:
        partition = self._broker.catalog.partition(name, index)
        if partition is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if wanted.producer_id in self._ended:
            return ErrorCode.NONE
        if self._refuses_epoch(partition, wanted):
            return ErrorCode.INVALID_PRODUCER_EPOCH
        transaction = self._broker.transactions.by_producer_id.get(wanted.producer_id)
        if transaction is not None and transaction.is_open:
            if wanted.transaction_result:
                return ErrorCode.INVALID_TXN_STATE
            if self._ends:
                return (
                    ErrorCode.OPERATION_NOT_ATTEMPTED
                )  # Offsets of this request are given already; ask alone.
            self._abort_whole(wanted.producer_id)
            return ErrorCode.NONE
        log.info(
            "writing the %s marker that was asked for (WriteTxnMarkers) to %s-%d: producer %d epoch %d",
            "commit" if wanted.transaction_result else "abort",
            name,
            index,
            wanted.producer_id,
            wanted.producer_epoch,
        )
        base_offset = self._ends.get(partition, partition.log.end_offset)
        entry = marker(
            self._broker,
            partition,
            wanted.producer_id,
            wanted.producer_epoch,
            commit=wanted.transaction_result,
            now_ms=self._now_ms,
            base_offset=base_offset,
        )
        self._ends[partition] = base_offset + 1
        self.entries.append(entry)
        return ErrorCode.NONE

    def _refuses_epoch(self, partition: Partition, wanted: WritableTxnMarker) -> bool:
        producer = partition.log.producers.get(wanted.producer_id)
        if producer is None:
            return False
        if wanted.transaction_version >= _RAISES_EPOCH:
            return wanted.producer_epoch <= producer.epoch
        return wanted.producer_epoch < producer.epoch

    def _abort_whole(self, producer_id: int) -> None:
        broker = self._broker
        transaction = broker.transactions.by_producer_id[producer_id]
        log.info(
            "aborting the transaction of %r: a marker was asked for (WriteTxnMarkers), %d partitions, "
            "producer %d epoch %d",
            transaction.transactional_id,
            len(transaction.partitions),
            transaction.open_producer_id,
            transaction.open_epoch,
        )
        successor = raised(broker, transaction)
        self.must_sync |= successor.must_sync
        entries = end_entries(
            broker,
            transaction,
            commit=False,
            successor=successor,
            by_broker=True,
            now_ms=self._now_ms,
        )
        for entry in entries:
            if isinstance(entry, Append):
                partition = broker.catalog.partition_by_id(entry.topic_id, entry.index)
                assert partition is not None
                self._ends[partition] = entry.header.last_offset + 1
        self.entries += entries
        self._ended.add(producer_id)
