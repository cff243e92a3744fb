"""Record batches that are encoded in one process and sent by another.

Where rows are shuffled by their partition, it is cheaper to shuffle record batches than rows: they are
encoded before the shuffle, with the identity of the epoch's transaction, and travel as a few large blobs. Who
sends them knows how many records came before, and sets the sequence.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from semel.client.metadata import TopicPartition
from semel.sinks.kafka.bad_rows import BadRows, find_oversize, take, unfit
from semel.sinks.kafka.rows import RecordRows, order_by_partition, read_rows
from semel.sinks.kafka.writer import KafkaPlan
from semel.wire.batch import InvalidBatch
from semel.wire.columns import Ints, build_batches


def can_encode_early(plan: KafkaPlan) -> bool:
    """Whether all that a writer decides is known before the shuffle."""
    settings = plan.settings
    return settings.layout.topic is None and settings.dead_letter_topic is None


def encode_rows(
    plan: KafkaPlan, batch: pa.RecordBatch, partitions: Ints, first_row: int
) -> Iterator[tuple[int, bytearray]]:
    """The record batches of these rows, with the partition of each; their sequences begin at 0."""
    settings = plan.settings
    shape = settings.topics[settings.topic]
    rows = read_rows(batch, settings.layout)
    bad = BadRows()
    find_oversize(rows, shape.max_batch_bytes, bad)
    for index in np.flatnonzero((partitions < 0) | (partitions >= shape.partition_count)).tolist():
        bad.add(index, f"it is for partition {partitions[index]}, and there are {shape.partition_count}")
    if len(bad):
        numbers = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
        raise bad.fail(rows, numbers, settings.topic)
    order, runs = order_by_partition(partitions)
    if order is not None:
        rows = read_rows(take(batch, order), settings.layout)
    for partition, start, stop in runs:
        for encoded in _encode_run(plan, rows.slice(start, stop), partition, shape.max_batch_bytes):
            yield partition, encoded


def _encode_run(plan: KafkaPlan, rows: RecordRows, partition: int, max_batch_bytes: int) -> list[bytearray]:
    settings = plan.settings
    try:
        return build_batches(
            rows.values,
            rows.keys,
            rows.timestamps,
            rows.headers,
            max_batch_bytes=max_batch_bytes,
            codec=settings.codec,
            producer_id=plan.handle.producer_id,
            producer_epoch=plan.handle.producer_epoch,
            base_sequence=0,
            transactional=True,
        )
    except InvalidBatch as error:
        raise unfit(TopicPartition(settings.topic, partition), error) from error
