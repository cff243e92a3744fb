"""Writing one task's rows in an epoch that another process may own.

A writer gathers rows, finds their partitions, claims those that are new to it, and sends record batches that
are encoded straight from the Arrow columns. Rules:

- A partition is claimed before anything is sent to it (`semel.sinks.kafka.claims`).
- Rows of one partition keep their order. Rows without a key go, a handful at a time, to the partitions that
  are the task's own: task i of n has those with p mod n = i.
- A row that no batch can hold, whose topic is null or whose partition does not exist is bad. It fails the
  writer, or goes to the dead-letter topic in the same transaction.
- The writer never commits and never aborts: every error is for the owner. After one, or a cancellation, it
  gives no receipt: nobody knows which of its rows are there.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.metadata import TopicPartition
from semel.client.partition_writer import PartitionWriter, SharedWriter
from semel.client.producer import ProducerOptions
from semel.client.shared_transaction import TransactionHandle
from semel.errors import BrokerError, FencedError, SemelError
from semel.sinks.errors import SinkError, WriteFailed
from semel.sinks.joining import join
from semel.sinks.kafka.bad_rows import BadRows, DeadLetters, find_oversize, take, unfit
from semel.sinks.kafka.claim_service import Claims, LocalClaims, RemoteClaims
from semel.sinks.kafka.markers import MarkerStore, other_than
from semel.sinks.kafka.rows import (
    RecordLayout,
    RecordRows,
    as_batches,
    column,
    now_ms,
    order_by_partition,
    read_partitions,
    read_rows,
    read_topics,
)
from semel.sinks.kafka.topics import TOPIC_NAME, TopicShape
from semel.sinks.metrics import SinkMetrics
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.service import ServiceAddress, require_shared
from semel.sinks.sink import Rows, Writer, WriterPlan
from semel.wire.batch import InvalidBatch
from semel.wire.columns import Ints
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode
from semel.wire.partitioner import NO_PARTITION, partition_column

# Rows are encoded and sent so many at a time, at least (or at the end) and at most: enough for good batches,
# few enough to keep the broker busy meanwhile.
ENOUGH_ROWS: Final = 8 * 1024
ENOUGH_ROWS_A_PARTITION: Final = 4 * 1024
CHUNK_ROWS: Final = 16 * 1024
# Large rows are sent before there are enough of them: they are in memory, and again while they are encoded.
ENOUGH_BYTES: Final = 64 * 1024 * 1024
# What a broker says of rows, or of this user, each time.
FINAL_REFUSALS: Final = frozenset(
    {ErrorCode.INVALID_RECORD, ErrorCode.INVALID_TIMESTAMP, ErrorCode.TOPIC_AUTHORIZATION_FAILED}
)


@dataclass(slots=True, frozen=True)
class WriterSettings:
    """What stays the same from epoch to epoch."""

    sink_id: str
    topic: str
    dead_letter_topic: str | None
    layout: RecordLayout
    codec: Codec
    connection: ConnectionOptions
    transaction_timeout_ms: int
    max_buffered: int
    topics: Mapping[str, TopicShape] = field(default_factory=dict)

    @property
    def takes_turns(self) -> bool:
        """Whether rows say where they go: then any writer may have rows for any partition.

        Otherwise each writer has partitions of its own, and keeps them.
        """
        layout = self.layout
        return layout.key is not None or layout.partition is not None or layout.topic is not None


class HomeAccess(NamedTuple):
    """What writers in the owner's process have in common with it."""

    claims: LocalClaims
    cluster: Cluster
    metrics: SinkMetrics


class KafkaPlan(WriterPlan):
    """One epoch, for its writers. It can be pickled if the sink is shared, and leaves `home` behind."""

    def __init__(
        self,
        place: Place,
        handle: TransactionHandle,
        settings: WriterSettings,
        service: ServiceAddress | None,
        home: HomeAccess | None = None,
    ) -> None:
        self.place = place
        self.handle = handle
        self.settings = settings
        self.service = service
        self._home = home

    def __reduce__(self) -> tuple[object, ...]:
        return KafkaPlan, (self.place, self.handle, self.settings, require_shared(self.service))

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> "KafkaWriter":
        return KafkaWriter(self, task, attempt, tasks, self._home)


class KafkaWriter(Writer):
    """One attempt of one task."""

    def __init__(self, plan: KafkaPlan, task: int, attempt: str, tasks: int, home: HomeAccess | None) -> None:
        self.plan = plan
        self._settings = plan.settings
        self._home = home
        self._claims: Claims = home.claims if home is not None else self._remote_claims()
        self._claimant = Attempt.new(plan.place, task, attempt)
        self._tasks = tasks
        self._metrics = SinkMetrics() if home is None else home.metrics
        self._shared: SharedWriter | None = None
        self._partitions: dict[TopicPartition, PartitionWriter] = {}
        self._held: set[TopicPartition] = set()
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0
        self._unflushed_rows = 0
        self._rows_taken = 0
        self._next_own = 0
        self._shapes: dict[str, TopicShape | None] = {**plan.settings.topics}
        self._dead_letters = 0
        self._is_over = False

    async def write(self, rows: Rows) -> None:
        self._require_usable()
        try:
            for batch in as_batches(rows):
                for start in range(0, batch.num_rows, CHUNK_ROWS):
                    await self._take(batch.slice(start, CHUNK_ROWS))
        except BaseException:
            self._is_over = True
            raise

    async def finish(self) -> Receipt:
        self._require_usable()
        self._is_over = True
        await self._send_gathered()
        await self._flush()
        try:
            for where in list(self._held):
                await self._give_back(where)
        except SemelError as error:
            raise await self._failed(error) from error
        parts = {str(where): writer.records_written for where, writer in self._partitions.items()}
        written_bytes = sum(writer.bytes_written for writer in self._partitions.values())
        await self.cancel()
        return Receipt(
            self.plan.place,
            self._claimant.task,
            self._claimant.attempt,
            sum(parts.values()) - self._dead_letters,
            written_bytes,
            self._dead_letters,
            parts,
        )

    async def cancel(self) -> None:
        self._is_over = True
        self._gathered = []
        self._count_buffered(0)
        shared, self._shared = self._shared, None
        try:
            await self._claims.leave(self._claimant)
        finally:  # the owner may be gone, and its loop with it
            if shared is not None:
                await shared.close()

    def _require_usable(self) -> None:
        if self._is_over:
            raise WriteFailed(
                f"{self._claimant} is finished or cancelled, or has failed: writers are used once. If it has "
                f"given no receipt, its epoch is to be aborted"
            )

    # Gathering

    async def _take(self, batch: pa.RecordBatch) -> None:
        """Small batches are gathered until there are enough rows for good record batches."""
        self._gathered.append(batch)
        self._gathered_rows += batch.num_rows
        self._gathered_bytes += batch.nbytes
        self._count_buffered(self._unflushed_rows + batch.num_rows)
        enough_rows = min(self._enough_rows, self._settings.max_buffered)
        if self._gathered_rows >= enough_rows or self._gathered_bytes >= ENOUGH_BYTES:
            await self._send_gathered()
        if self._unflushed_rows >= self._settings.max_buffered:
            await self._flush()

    def _count_buffered(self, rows: int) -> None:
        self._metrics.buffered_rows += rows - self._unflushed_rows
        self._unflushed_rows = rows

    async def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        self._gathered_rows = self._gathered_bytes = 0
        for batch in _joined(gathered):
            first_row = self._rows_taken
            self._rows_taken += batch.num_rows
            try:
                await self._send(batch, first_row)
            except SemelError as error:
                raise await self._failed(error) from error

    async def _flush(self) -> None:
        """Waits for the broker, inside the transaction."""
        if self._shared is None:
            return
        try:
            await self._shared.flush()
        except SemelError as error:
            raise await self._failed(error) from error
        self._count_buffered(0)

    async def _failed(self, error: SemelError) -> SinkError:
        if isinstance(error, SinkError):
            return error
        if isinstance(error, FencedError):
            markers = MarkerStore(self._settings.sink_id, self._settings.topic)
            run = self.plan.place.run
            owner = None if self._shared is None else await markers.last_owner(self._shared.cluster, run)
            if (successor := other_than(run, owner)) is not None:
                return markers.fenced_out(successor, error)
            return WriteFailed(
                f"{self._claimant} writes in a transaction that is over: its owner has ended it, or the "
                f"broker has, after transaction_timeout ({self._settings.transaction_timeout_ms} ms; smaller "
                f"epochs take less: maxOffsetsPerTrigger). {error}"
            )
        if isinstance(error, BrokerError) and error.code in FINAL_REFUSALS:
            return WriteFailed(f"rows of {self._claimant} cannot be written: {error}", is_permanent=True)
        return WriteFailed(f"{self._claimant} could not write: {error}")

    # Sending

    async def _send(self, batch: pa.RecordBatch, first_row: int) -> None:
        numbers = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
        name = self._settings.layout.topic
        if name is None:
            await self._send_to(self._settings.topic, batch, numbers)
            return
        topics, codes = read_topics(column(batch, name, "topic"), name)
        for code, topic in enumerate(topics):
            indexes = np.flatnonzero(codes == code)
            if len(indexes):
                whole = len(indexes) == batch.num_rows
                await self._send_to(topic, batch if whole else take(batch, indexes), numbers[indexes])

    async def _send_to(self, topic: str | None, batch: pa.RecordBatch, numbers: Ints) -> None:
        """Rows of one topic: the bad ones out, the others in runs of one partition."""
        rows = read_rows(batch, self._settings.layout)
        shape = None if topic is None else await self._shape(topic)
        bad = BadRows()
        if topic is None or shape is None:
            reason = "its topic is null" if topic is None else f"there is no topic {topic!r}"
            for index in range(batch.num_rows):
                bad.add(index, reason)
            await self._reject(bad, rows, numbers, topic)
            return
        partitions = self._targets(batch, rows, topic, shape, bad)
        find_oversize(rows, shape.max_batch_bytes, bad)
        order: Ints | None = None
        if len(bad):
            await self._reject(bad, rows, numbers, topic)
            order = bad.good(batch.num_rows)
            partitions = partitions[order]
        regrouped, runs = order_by_partition(partitions)
        if regrouped is not None:
            order = regrouped if order is None else order[regrouped]
        if order is not None:
            rows = read_rows(take(batch, order), self._settings.layout)
        writes = [
            self._write_run(TopicPartition(topic, partition), rows.slice(start, stop), shape)
            for partition, start, stop in runs
        ]
        # In whatever order the turns come, so that nobody waits for one partition with another in hand.
        await _all_or_none([asyncio.create_task(write) for write in writes])

    async def _write_run(self, where: TopicPartition, rows: RecordRows, shape: TopicShape) -> None:
        await self._take_turn(where)
        await self._encode_run(where, rows, shape)
        if self._settings.takes_turns:
            await self._give_back(where)

    async def _encode_run(self, where: TopicPartition, rows: RecordRows, shape: TopicShape) -> None:
        try:
            await self._partitions[where].write_columns(
                rows.values, rows.keys, rows.timestamps, rows.headers, max_batch_bytes=shape.max_batch_bytes
            )
        except InvalidBatch as error:
            raise unfit(where, error) from error

    async def _shape(self, topic: str) -> TopicShape | None:
        """As the owner has counted it. Who counts for itself may find more partitions than others have, and
        put a key elsewhere.
        """
        if not TOPIC_NAME.fullmatch(topic):
            return None  # there can be none, and brokers hang up on who asks for very long ones
        if topic not in self._shapes:
            self._shapes[topic] = await self._claims.shape(self._claimant, topic)
        return self._shapes[topic]

    def _targets(
        self, batch: pa.RecordBatch, rows: RecordRows, topic: str, shape: TopicShape, bad: BadRows
    ) -> Ints:
        """Where each row goes: as its partition column says, else by its key, else to one of our own."""
        name = self._settings.layout.partition
        partitions = np.full(batch.num_rows, NO_PARTITION, np.int64)
        if name is not None:
            partitions = read_partitions(column(batch, name, "partition"), name, NO_PARTITION)
            outside = (partitions < NO_PARTITION) | (partitions >= shape.partition_count)
            for index in np.flatnonzero(outside).tolist():
                bad.add(
                    index,
                    f"it is for partition {partitions[index]}, and there are {shape.partition_count}",
                )
        if rows.keys is not None and (partitions == NO_PARTITION).any():
            by_key = partition_column(rows.keys, shape.partition_count)
            partitions = by_key if name is None else np.where(partitions == NO_PARTITION, by_key, partitions)
        homeless = partitions == NO_PARTITION
        if homeless.any():
            partitions = np.where(homeless, self._own_partition(topic, shape), partitions)
        return partitions

    def _own_partition(self, topic: str, shape: TopicShape) -> int:
        """One of the partitions that are this task's own, another each time."""
        own = range(self._claimant.task % self._tasks, shape.partition_count, self._tasks)
        if not own and self._settings.takes_turns:
            return self._claimant.task % shape.partition_count
        if not own:
            raise WriteFailed(
                f"task {self._claimant.task} of {self._tasks} has rows without a key, and topic {topic!r} "
                f"has only {shape.partition_count} partitions, each written by one task: coalesce to "
                f"{shape.partition_count} tasks, or give the topic more partitions",
                is_permanent=True,
            )
        self._next_own += 1
        return own[(self._next_own - 1) % len(own)]

    async def _reject(self, bad: BadRows, rows: RecordRows, numbers: Ints, topic: str | None) -> None:
        """Bad rows fail the writer, or become dead letters in the same transaction."""
        dead_letter_topic = self._settings.dead_letter_topic
        if dead_letter_topic is None:
            raise bad.fail(rows, numbers, topic)
        shape = await self._shape(dead_letter_topic)
        if shape is None:
            raise WriteFailed(f"the dead-letter topic {dead_letter_topic!r} does not exist")
        origin = [
            ("semel.sink", self._settings.sink_id.encode()),
            ("semel.epoch", b"%d" % self.plan.place.epoch),
            ("semel.task", b"%d" % self._claimant.task),
            ("semel.topic", (topic or "").encode()),
        ]
        letters = DeadLetters(bad, rows, numbers, origin, shape.max_batch_bytes)
        values, keys = letters.columns()
        where = TopicPartition(dead_letter_topic, self._own_partition(dead_letter_topic, shape))
        timestamps = np.full(len(values), now_ms(), np.int64)
        await self._write_run(where, RecordRows(values, keys, timestamps, letters.headers), shape)
        self._dead_letters += len(bad)

    # Turns

    def _remote_claims(self) -> RemoteClaims:
        return RemoteClaims(require_shared(self.plan.service), self._settings.transaction_timeout_ms / 1000)

    async def _take_turn(self, where: TopicPartition) -> None:
        if where in self._held:
            return
        shared = await self._open()
        keeps = not self._settings.takes_turns
        sequence = await self._claims.take(self._claimant, where, keeps=keeps)
        self._held.add(where)
        writer = self._partitions[where] = shared.partition(where.topic, where.partition)
        writer.begin_at(sequence)

    async def _give_back(self, where: TopicPartition) -> None:
        """What is for the partition is acknowledged first: whoever has it next goes on from there."""
        writer = self._partitions[where]
        await writer.flush()
        await self._claims.give(self._claimant, where, writer.next_sequence)
        self._held.discard(where)

    @property
    def _enough_rows(self) -> int:
        """Enough for good batches: where rows are for all partitions, for each of them."""
        if not self._settings.takes_turns:
            return ENOUGH_ROWS
        shape = self._settings.topics.get(self._settings.topic)
        return max(ENOUGH_ROWS, ENOUGH_ROWS_A_PARTITION * (1 if shape is None else shape.partition_count))

    async def _open(self) -> SharedWriter:
        if self._shared is None:
            self._shared = SharedWriter(self.plan.handle, self._producer_options(), self._settings.connection)
            await self._shared.open()
        return self._shared

    def _producer_options(self) -> ProducerOptions:
        return ProducerOptions(
            codec=self._settings.codec, delivery_timeout_ms=self._settings.transaction_timeout_ms
        )


async def _all_or_none(writes: "list[asyncio.Task[None]]") -> None:
    """Gives up with the first that fails: another may wait for a writer that has failed, too, and that waits
    for the partition that failed here. Only a writer that leaves tells the others.
    """
    try:
        await asyncio.gather(*writes)
    except BaseException:
        for write in writes:
            write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)
        raise


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """As one; as several, if they differ in type or are more than fits into a column of Arrow's."""
    if len(batches) < 2:
        return batches
    tables = join([pa.Table.from_batches([batch]) for batch in batches])
    return [batch for table in tables for batch in table.combine_chunks().to_batches()]
