"""Batches, and a partition that is written and read as the broker does it, in a few calls."""

from __future__ import annotations

import random
from collections.abc import Iterable

from semel.log.partition import AbortedTransaction, PartitionLog
from semel.storage.partition import PartitionStore, Placement
from semel.storage.settings import LogSettings
from semel.wire.batch import BatchHeader, iter_batches, place_batch, read_header
from semel.wire.records import Record, build_batch, build_end_marker, read_end_marker, read_records

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


def flush(partition: PartitionStore) -> None:
    job = partition.begin_flush()
    assert job is not None
    job.run()
    partition.finish_flush(job)


def some_batches(seed: int, count: int, *, transactions: bool = False) -> list[bytes]:
    """Batches of different sizes that follow each other; with `transactions`, of three producers."""
    chance = random.Random(seed)
    batches = []
    offset = 0
    opened: set[int] = set()
    for _ in range(count):
        producer_id = chance.randint(1, 3)
        if opened and chance.random() < 0.3:
            ended = opened.pop()
            batches.append(marker_at(offset, ended, commit=chance.random() < 0.5))
            offset += 1
            continue
        records = chance.randint(1, 5)
        batches.append(
            batch_at(
                offset,
                records,
                value=chance.randbytes(chance.randint(0, 150)),
                timestamp=chance.randint(1_000, 2_000),
                producer_id=producer_id if transactions else -1,
                transactional=transactions,
            )
        )
        if transactions:
            opened.add(producer_id)
        offset += records
    return batches


def aborted_by(batches: Iterable[bytes]) -> dict[int, AbortedTransaction]:
    """What each aborting marker makes unreadable, by the marker's offset: what the log would say."""
    log = PartitionLog()
    aborted = {}
    for batch in batches:
        header = read_header(batch)
        marker = read_end_marker(batch) if header.is_control else None
        if marker is None:
            log.append(header)
            continue
        ended = log.append_marker(header, marker.coordinator_epoch, marker.commit)
        if ended is not None:
            aborted[header.base_offset] = ended
    return aborted


def put_with_aborts(
    partition: PartitionStore,
    batches: list[bytes],
    aborted: dict[int, AbortedTransaction],
    settings: LogSettings = SMALL,
) -> None:
    """Append, write and reveal, and say what the markers abort."""
    for batch in batches:
        put(partition, [batch], settings, aborted.get(read_header(batch).base_offset))
