"""What runs in the tasks of Spark: a task's rows become a receipt, or the error that spoils the epoch.

An error of the sink travels as a value, so that the owner knows its class and Spark does not try the task
again. Where each output may be written by one attempt only (Kafka), a later attempt sends nothing. It reads
its input to the end first: if it was the user's code that failed the first attempt, it fails again there,
and that is the error to be shown.

Executors import this module, and with it `semel.sinks`, `semel.client` and `semel.wire` alone.
"""

import pickle
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from semel.client.loop_thread import LoopThread
from semel.sinks.errors import SinkError, WriteFailed
from semel.sinks.kafka.encoded import encode_rows
from semel.sinks.kafka.rows import RecordLayout, binary_column, column, read_partitions
from semel.sinks.kafka.writer import KafkaPlan, KafkaWriter
from semel.sinks.receipts import Receipt
from semel.sinks.sink import Writer, WriterPlan
from semel.wire.columns import Ints
from semel.wire.partitioner import NO_PARTITION, partition_column, partition_for_key

OUTCOME_COLUMN: Final = "outcome"
OUTCOME_SCHEMA: Final = f"{OUTCOME_COLUMN} binary"
TARGET_COLUMN: Final = "__semel_target"
ENCODED_COLUMN: Final = "__semel_encoded"
ENCODED_SCHEMA: Final = f"{TARGET_COLUMN} int, {ENCODED_COLUMN} binary"
# Topics are spread over tasks by a hash of their names, from 0 to this.
TOPIC_HASHES: Final = 1 << 20


class WriteTask:
    """Writes the rows of one task; for `mapInArrow`.

    `grace_s` is how long a second attempt waits before it spoils the epoch: with speculation the first one
    may be alive, and is to win.
    """

    __slots__ = ("_grace_s", "_is_once", "_plan", "_tasks")

    def __init__(self, plan: WriterPlan, tasks: int, *, is_once: bool, grace_s: float) -> None:
        self._plan = plan
        self._tasks = tasks
        self._is_once = is_once
        self._grace_s = grace_s

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One row: the pickled receipt or error."""
        context = TaskContext.get()
        assert context is not None
        is_refused = self._is_once and context.attemptNumber() > 0
        outcome = self._refuse(context, batches) if is_refused else self._write(context, batches)
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(outcome)], pa.binary())], [OUTCOME_COLUMN])

    def _write(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> Receipt | SinkError:
        attempt = f"{context.stageId()}.{context.taskAttemptId()}"
        writer = self._plan.writer(context.partitionId(), attempt, tasks=self._tasks)
        thread = LoopThread("semel writer")
        try:
            for batch in batches:
                thread.run(self._take(writer, batch))
            return thread.run(writer.finish())
        except SinkError as error:
            return error
        finally:
            thread.run(writer.cancel())
            thread.close()

    async def _take(self, writer: Writer, batch: pa.RecordBatch) -> None:
        await writer.write(batch)

    def _refuse(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> WriteFailed:
        for _ in batches:
            pass
        time.sleep(self._grace_s)
        return WriteFailed(
            f"task {context.partitionId()} was tried again (attempt {context.attemptNumber()}), and its "
            "first attempt may have written: the epoch is run again as a whole"
        )


class SendTask(WriteTask):
    """The same for what `EncodeTask` has made of the rows."""

    __slots__ = ()

    async def _take(self, writer: Writer, batch: pa.RecordBatch) -> None:
        assert isinstance(writer, KafkaWriter)
        targets = batch.column(TARGET_COLUMN).to_pylist()
        encoded = batch.column(ENCODED_COLUMN)
        for row, target in enumerate(targets):
            blob = encoded[row].as_buffer()
            if target < 0:
                raise pickle.loads(blob)
            await writer.write_encoded(target, bytearray(blob))


class TargetTask:
    """Adds to each row the number of who writes it; for `mapInArrow`, before a shuffle.

    That is the row's partition of the output topic or, where rows name their topics, a hash of the topic.
    Rows without a key or a partition go where their task says: a row must have the same target whenever it
    is computed.
    """

    __slots__ = ("_layout", "_own_topic", "_partition_count")

    def __init__(self, layout: RecordLayout, own_topic: str, partition_count: int) -> None:
        self._layout = layout
        self._own_topic = partition_for_key(own_topic.encode(), TOPIC_HASHES)
        self._partition_count = partition_count

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        homeless = context.partitionId() % self._partition_count
        for batch in batches:
            targets = self.targets(batch, homeless)
            yield batch.append_column(TARGET_COLUMN, pa.array(targets, pa.int32()))

    def targets(self, batch: pa.RecordBatch, homeless: int) -> Ints:
        layout = self._layout
        if layout.topic is not None:
            names = binary_column(column(batch, layout.topic, "topic"), layout.topic)
            topics = partition_column(names, TOPIC_HASHES)
            # Rows that name no topic go to the sink's own.
            return np.where(topics < 0, self._own_topic, topics)
        targets = np.full(batch.num_rows, NO_PARTITION, np.int64)
        if layout.key is not None:
            keys = binary_column(column(batch, layout.key, "key"), layout.key)
            targets = partition_column(keys, self._partition_count)
        if layout.partition is not None:
            given = read_partitions(
                column(batch, layout.partition, "partition"), layout.partition, NO_PARTITION
            )
            # What is out of range is refused by who encodes the row, and says which it was.
            targets = np.where(given == NO_PARTITION, targets, given)
        return np.where(targets == NO_PARTITION, homeless, targets)


class EncodeTask(TargetTask):
    """Makes record batches of a task's rows, with the partition of each; for `mapInArrow`, before a shuffle.

    A row that no record batch can hold becomes the pickled error, with the partition -1.
    """

    __slots__ = ("_plan",)

    def __init__(self, plan: KafkaPlan) -> None:
        settings = plan.settings
        super().__init__(settings.layout, settings.topic, settings.topics[settings.topic].partition_count)
        self._plan = plan

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        homeless = context.partitionId() % self._partition_count
        first_row = 0
        for batch in batches:
            yield self._encode(batch, self.targets(batch, homeless), first_row)
            first_row += batch.num_rows

    def _encode(self, batch: pa.RecordBatch, targets: Ints, first_row: int) -> pa.RecordBatch:
        partitions: list[int] = []
        blobs: list[bytes | bytearray] = []
        try:
            for partition, encoded in encode_rows(self._plan, batch, targets, first_row):
                partitions.append(partition)
                blobs.append(encoded)
        except SinkError as error:
            partitions, blobs = [NO_PARTITION], [pickle.dumps(error)]
        columns = [pa.array(partitions, pa.int32()), pa.array(blobs, pa.binary())]
        return pa.RecordBatch.from_arrays(columns, [TARGET_COLUMN, ENCODED_COLUMN])
