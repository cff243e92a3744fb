"""Offsets by time agree with a look at every record, in whatever order the timestamps are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from storage_cases import SMALL, TOPIC_ID, batch_at, put, records_at

from semel.storage.memory import MemoryDisk
from semel.storage.partition import PartitionStore
from semel.storage.store import Store
from semel.storage.times import TimestampedOffset
from semel.wire.batch import stamp_append_time
from semel.wire.records import Record, read_records

timestamps = st.lists(st.lists(st.integers(-1, 60), min_size=1, max_size=4), min_size=1, max_size=30)


def partition_of(times: list[list[int]], value: bytes) -> tuple[PartitionStore, list[Record]]:
    partition = Store(MemoryDisk(), Path("/segments")).partition(TOPIC_ID, 0)
    batches = []
    offset = 0
    for in_batch in times:
        batches.append(records_at(offset, [Record(None, value, timestamp) for timestamp in in_batch]))
        offset += len(in_batch)
    put(partition, batches, SMALL)
    return partition, [record for batch in batches for record in read_records(batch)]


@given(timestamps, st.integers(0, 61), st.integers(0, 120), st.integers(0, 120))
@settings(max_examples=150, deadline=None)
def test_the_first_record_at_or_after_a_time(
    times: list[list[int]], wanted: int, start: int, end: int
) -> None:
    partition, records = partition_of(times, b"x" * 60)
    end = end_of_some_batch(times, end)
    found = partition.offset_for_time(wanted, start, end)
    expected = [record for record in records if record.timestamp >= wanted and start <= record.offset < end]
    assert found == (TimestampedOffset(expected[0].offset, expected[0].timestamp) if expected else None)


@given(timestamps, st.integers(0, 120), st.integers(0, 120))
@example([[0, 0, 0], [0, 0, 0, 0], [0, 0, 0, -1]], 10, 8)
@settings(max_examples=150, deadline=None)
def test_the_first_record_with_the_largest_time(times: list[list[int]], start: int, end: int) -> None:
    partition, records = partition_of(times, b"x" * 60)
    end = end_of_some_batch(times, end)
    found = partition.max_timestamp(start, end)
    visible = [record for record in records if start <= record.offset < end]
    expected = max(visible, key=lambda record: (record.timestamp, -record.offset), default=None)
    assert found == (TimestampedOffset(expected.offset, expected.timestamp) if expected else None)


def end_of_some_batch(times: list[list[int]], wanted: int) -> int:
    """Readers are bounded by the high watermark or the last stable offset: both are where a batch begins."""
    end = 0
    for in_batch in times:
        if end >= wanted:
            break
        end += len(in_batch)
    return end


@pytest.mark.parametrize("wanted", [0, 5_000, 5_001])
def test_append_time_is_the_time_of_every_record(partition: PartitionStore, wanted: int) -> None:
    batch = bytearray(batch_at(0, 3, timestamp=1))
    stamp_append_time(batch, 5_000)
    put(partition, [bytes(batch)])
    expected = TimestampedOffset(0, 5_000) if wanted <= 5_000 else None
    assert partition.offset_for_time(wanted, 0, 3) == expected
    assert partition.max_timestamp(0, 3) == TimestampedOffset(0, 5_000)


def test_an_empty_partition_has_no_times(partition: PartitionStore) -> None:
    assert partition.offset_for_time(0, 0, 10) is None
    assert partition.max_timestamp(0, 10) is None


def test_a_batch_that_is_not_made_of_records_counts_as_one(partition: PartitionStore) -> None:
    broken = bytearray(batch_at(0, 3, timestamp=10))
    broken[61:] = b"\xff" * (len(broken) - 61)
    put(partition, [bytes(broken), batch_at(3, timestamp=5)])
    assert partition.offset_for_time(11, 0, 4) == TimestampedOffset(0, 12)
    assert partition.max_timestamp(1, 4) == TimestampedOffset(1, 12)
