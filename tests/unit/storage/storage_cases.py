"""Batches, and a partition that is written and read as the broker does it, in a few calls."""

from __future__ import annotations

from collections.abc import Iterable

from semel.log.partition import AbortedTransaction
from semel.storage.partition import PartitionStore, Placement
from semel.storage.settings import LogSettings
from semel.wire.batch import BatchHeader, iter_batches, place_batch, read_header
from semel.wire.records import Record, build_batch, build_end_marker, read_records

TOPIC_ID = bytes(range(16))
SMALL = LogSettings(segment_bytes=1000, index_interval_bytes=200)


def batch_at(
    offset: int,
    count: int = 1,
    *,
    value: bytes | None = b"value",
    key: bytes | None = None,
    timestamp: int = 1_000,
    producer_id: int = -1,
    sequence: int = 0,
    transactional: bool = False,
    codec: int = 0,
) -> bytes:
    """`count` records from `offset` on, each a millisecond after the one before."""
    records = [Record(key, value, timestamp + i) for i in range(count)]
    return records_at(
        offset, records, producer_id=producer_id, sequence=sequence, transactional=transactional, codec=codec
    )


def records_at(
    offset: int,
    records: list[Record],
    *,
    producer_id: int = -1,
    sequence: int = 0,
    transactional: bool = False,
    codec: int = 0,
) -> bytes:
    batch = build_batch(
        records,
        codec=codec,
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=sequence if producer_id >= 0 else -1,
        transactional=transactional,
    )
    place_batch(batch, offset, 1)
    return bytes(batch)


def marker_at(offset: int, producer_id: int, *, commit: bool, timestamp: int = 1_000) -> bytes:
    return bytes(
        build_end_marker(
            commit=commit,
            producer_id=producer_id,
            producer_epoch=0,
            coordinator_epoch=0,
            timestamp=timestamp,
            base_offset=offset,
            leader_epoch=1,
        )
    )


def plan(
    partition: PartitionStore,
    batches: Iterable[bytes],
    settings: LogSettings = SMALL,
    aborted: AbortedTransaction | None = None,
) -> list[Placement]:
    return [
        partition.append(batch, read_header(batch), settings=settings, aborted=aborted) for batch in batches
    ]


def put(
    partition: PartitionStore,
    batches: Iterable[bytes],
    settings: LogSettings = SMALL,
    aborted: AbortedTransaction | None = None,
) -> None:
    """Append, write and reveal."""
    partition.store.write(plan(partition, batches, settings, aborted))
    partition.reveal(partition.end_offset)


def fetch(partition: PartitionStore, offset: int, end_offset: int | None = None) -> list[bytes]:
    """All whole batches from the one that holds `offset` on, as a reader that asks again gets them."""
    end = partition.revealed_offset if end_offset is None else end_offset
    batches: list[bytes] = []
    while (region := partition.read(offset, 1 << 20, end)) is not None:
        got = [(header, bytes(batch)) for header, batch in iter_batches(region.load())]
        assert sum(len(batch) for _, batch in got) == len(region)
        batches.extend(batch for _, batch in got)
        offset = got[-1][0].last_offset + 1
    return batches


def fetch_records(partition: PartitionStore, offset: int, end_offset: int | None = None) -> list[Record]:
    return [
        record
        for batch in fetch(partition, offset, end_offset)
        if not read_header(batch).is_control
        for record in read_records(batch)
    ]


def headers(batches: Iterable[bytes]) -> list[BatchHeader]:
    return [read_header(batch) for batch in batches]
