"""Writing in a transaction that another process owns.

A process gets a `TransactionHandle` and opens a `SharedWriter` with it, and from that a `PartitionWriter` for
each partition that it writes to. Nobody else may write to that partition at the same time: two writers with
the same sequences would be taken for one that repeats itself, so that the records of the second are lost
without an error. Writers that take turns tell each other how far the sequences have come (`begin_at`).

    async with SharedWriter(handle) as writer:
        partition = writer.partition("orders", 3)
        await partition.write(records)
        await writer.flush()

Nothing is visible, and nothing is certain, until `flush` has returned; then the owner may commit. A writer
never aborts and never commits. An error (Abortable, Fenced) is for the owner: the transaction is spoiled.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.coordinator import PRODUCE_VERSIONS
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer, ProducerOptions, TransactionScope
from semel.client.shared_transaction import TransactionHandle
from semel.wire.batch import read_header
from semel.wire.columns import DEFAULT_MAX_BATCH_BYTES, BinaryColumn, Ints, build_batches
from semel.wire.records import Headers, Record, build_batch


class SharedWriter:
    """A process's part in a shared transaction. Use it as an async context manager."""

    def __init__(
        self,
        handle: TransactionHandle,
        options: ProducerOptions | None = None,
        connection_options: ConnectionOptions | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        """With a `cluster` its connections are used, and stay open in the end."""
        self.handle = handle
        self._owns_cluster = cluster is None
        self.cluster = cluster or Cluster(handle.bootstrap, connection_options)
        scope = TransactionScope(
            handle.transactional_id, handle.identity, PRODUCE_VERSIONS[handle.version], _joined_by_owner
        )
        self._producer = Producer(self.cluster, options, scope)
        self._partitions: dict[TopicPartition, PartitionWriter] = {}

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connects, trying again for a while: a broker may be starting."""
        if self._owns_cluster:
            await self.cluster.retry(self.cluster.connect)

    async def close(self) -> None:
        """Stops; what was not flushed may or may not be in the transaction. Idempotent."""
        await self._producer.abandon()
        if self._owns_cluster:
            await self.cluster.close()

    def partition(self, topic: str, partition: int) -> "PartitionWriter":
        """The writer of one partition: the same each time."""
        where = TopicPartition(topic, partition)
        writer = self._partitions.get(where)
        if writer is None:
            writer = self._partitions[where] = PartitionWriter(self._producer, self.handle, where)
        return writer

    async def flush(self) -> None:
        """Waits until everything is acknowledged."""
        await self._producer.flush()


class PartitionWriter:
    """Writes batches to one partition, in order, a few of them in flight."""

    __slots__ = ("_handle", "_producer", "bytes_written", "records_written", "where")

    def __init__(self, producer: Producer, handle: TransactionHandle, where: TopicPartition) -> None:
        self._producer = producer
        self._handle = handle
        self.where = where
        self.records_written = 0
        self.bytes_written = 0

    @property
    def next_sequence(self) -> int:
        """The base sequence of the next batch."""
        return self._producer.next_sequence(self.where)

    async def write(self, records: Sequence[Record]) -> None:
        """Writes records as one batch, waiting for room if there is none."""
        await self._producer.wait_for_room()
        self._queue(
            build_batch(
                records,
                codec=self._producer.options.codec,
                producer_id=self._handle.producer_id,
                producer_epoch=self._handle.producer_epoch,
                base_sequence=self.next_sequence,
                transactional=True,
            )
        )

    async def write_columns(
        self,
        values: BinaryColumn,
        keys: BinaryColumn | None = None,
        timestamps: Ints | int | None = None,
        headers: Sequence[Headers] | None = None,
        *,
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    ) -> None:
        """Writes columns as batches of at most so many bytes. Without timestamps the time is now."""
        await self._producer.wait_for_room()
        batches = build_batches(
            values,
            keys,
            int(time.time() * 1000) if timestamps is None else timestamps,
            headers,
            max_batch_bytes=max_batch_bytes,
            codec=self._producer.options.codec,
            producer_id=self._handle.producer_id,
            producer_epoch=self._handle.producer_epoch,
            base_sequence=self.next_sequence,
            transactional=True,
        )
        for batch in batches:
            self._queue(batch)

    def begin_at(self, sequence: int) -> None:
        """Goes on where another writer's turn has ended: at its `next_sequence` after its `flush`."""
        self._producer.begin_at(self.where, sequence)

    async def flush(self) -> None:
        """Waits until everything for this partition is acknowledged."""
        await self._producer.flush(self.where)

    def _queue(self, batch: bytearray) -> None:
        self._producer.queue_encoded(self.where, batch)
        self.records_written += read_header(batch).record_count
        self.bytes_written += len(batch)


async def _joined_by_owner(where: TopicPartition) -> None:
    """On version 1 the owner has added the partition; on version 2 its first batch does."""
