"""Batches go to segments and come back, from any offset, as far as they are revealed."""

from __future__ import annotations

from pathlib import Path

import pytest
from storage_cases import SMALL, TOPIC_ID, batch_at, fetch, marker_at, plan, put, some_batches

from semel.disk import Disk
from semel.errors import StorageError
from semel.log.partition import AbortedTransaction
from semel.storage.partition import PartitionStore
from semel.storage.settings import LogSettings, StorageSettings
from semel.storage.store import Store
from semel.wire.batch import read_header


def test_every_offset_is_found_in_every_segment(partition: PartitionStore) -> None:
    batches = some_batches(seed=1, count=100)
    put(partition, batches)
    assert len(partition.segments) > 10
    for i, batch in enumerate(batches):
        header = read_header(batch)
        for offset in range(header.base_offset, header.last_offset + 1):
            assert fetch(partition, offset) == batches[i:]


def test_reads_end_before_the_batch_at_the_end_offset(partition: PartitionStore) -> None:
    batches = some_batches(seed=2, count=60)
    put(partition, batches)
    for i, batch in enumerate(batches):
        assert fetch(partition, 0, read_header(batch).base_offset) == batches[:i]


def test_nothing_is_read_before_it_is_revealed(partition: PartitionStore) -> None:
    first, second = some_batches(seed=3, count=2)
    partition.store.write(plan(partition, [first, second]))
    assert partition.read(0, 1000, 100) is None
    end_of_first = read_header(second).base_offset
    partition.reveal(end_of_first)
    assert fetch(partition, 0, 100) == [first]
    assert partition.read(end_of_first, 1000, 100) is None
    partition.reveal(partition.end_offset)
    assert fetch(partition, 0, 100) == [first, second]


def test_a_read_is_cut_at_max_bytes_within_a_batch(partition: PartitionStore) -> None:
    first, second = batch_at(0, value=b"x" * 100), batch_at(1, value=b"y" * 100)
    put(partition, [first, second])
    region = partition.read(0, len(first) + 30, 2)
    assert region is not None
    assert region.load() == first + second[:30]


def test_the_first_batch_is_whole_only_if_asked_for(partition: PartitionStore) -> None:
    first, second = batch_at(0, value=b"x" * 100), batch_at(1, value=b"y" * 100)
    put(partition, [first, second])
    whole = partition.read(0, 1, 2, at_least_one=True)
    cut = partition.read(1, 50, 2, at_least_one=False)
    assert whole is not None and whole.load() == first
    assert cut is not None and cut.load() == second[:50]
    assert partition.read(0, 0, 2, at_least_one=False) is None


def test_the_first_batch_is_whole_also_where_the_index_must_be_searched(partition: PartitionStore) -> None:
    batches = some_batches(seed=4, count=40)
    put(partition, batches)
    for batch in batches:
        region = partition.read(read_header(batch).last_offset, 1, 10_000, at_least_one=True)
        assert region is not None and region.load() == batch


def test_a_segment_rolls_before_it_gets_too_large(partition: PartitionStore) -> None:
    put(partition, some_batches(seed=5, count=100))
    assert all(segment.size <= SMALL.segment_bytes for segment in partition.segments)
    ends = [segment.end_offset for segment in partition.segments]
    assert [segment.base_offset for segment in partition.segments] == [0, *ends[:-1]]


def test_a_batch_larger_than_a_segment_gets_one_of_its_own(partition: PartitionStore) -> None:
    batches = [batch_at(0), batch_at(1, value=b"x" * 5000), batch_at(2)]
    put(partition, batches)
    assert [segment.base_offset for segment in partition.segments] == [0, 1, 2]
    assert fetch(partition, 0) == batches


def test_a_segment_rolls_when_its_first_batch_is_too_old_by_the_time_of_the_records(
    partition: PartitionStore,
) -> None:
    settings = LogSettings(segment_ms=10)
    put(partition, [batch_at(0, timestamp=100), batch_at(1, timestamp=110)], settings)
    assert len(partition.segments) == 1
    put(partition, [batch_at(2, timestamp=111)], settings)
    assert [segment.base_offset for segment in partition.segments] == [0, 2]


def test_a_region_outlives_its_place_among_the_open_files(disk: Disk, tmp_path: Path) -> None:
    store = Store(disk, tmp_path / "segments", StorageSettings(max_open_files=2))
    batches = [batch_at(0, value=bytes([i]) * 50) for i in range(10)]
    regions = []
    for i, batch in enumerate(batches):
        partition = store.partition(TOPIC_ID, i)
        put(partition, [batch])
        regions.append(partition.read(0, 1000, 1))
    assert len(store.files) == 2
    assert [region.load() for region in regions if region is not None] == batches


def test_offsets_cannot_go_back(partition: PartitionStore) -> None:
    put(partition, [batch_at(0, 5)])
    with pytest.raises(StorageError, match="below the end 5"):
        plan(partition, [batch_at(4)])


def test_nothing_is_on_disk_before_the_first_append(partition: PartitionStore) -> None:
    assert partition.read(0, 1000, 10) is None
    assert partition.aborted_in(0, 10) == []
    assert not partition.store.disk.exists(partition.store.directory)


def test_aborted_transactions_are_found_where_they_overlap(partition: PartitionStore) -> None:
    aborted = []
    for i in range(30):
        first = i * 3
        put(partition, [batch_at(first, 2, producer_id=7, transactional=True, value=b"x" * 60)])
        aborted.append(AbortedTransaction(7, first, first + 2, first + 3))
        put(partition, [marker_at(first + 2, 7, commit=False)], aborted=aborted[-1])
    assert len(partition.segments) > 3
    for start in range(0, 90):
        for end in range(start + 1, 91):
            expected = [txn for txn in aborted if txn.first_offset < end and txn.last_offset >= start]
            assert partition.aborted_in(start, end) == expected
