"""Old segments go by age or by size, whole, and never what is still wanted."""

from __future__ import annotations

import os

import pytest
from storage_cases import TOPIC_ID, batch_at, fetch, plan, put

from semel.disk import OsDisk
from semel.storage.partition import PartitionStore
from semel.storage.store import Store

FOREVER = -1


@pytest.fixture
def aging(partition: PartitionStore) -> PartitionStore:
    """Ten segments of one batch each; the one at offset i is from the time 1000 * i."""
    put(partition, [batch_at(i, value=b"x" * 800, timestamp=1000 * i) for i in range(10)])
    assert [segment.base_offset for segment in partition.segments] == list(range(10))
    return partition


def point(
    partition: PartitionStore, now_ms: int = 0, *, age: int = FOREVER, size: int = FOREVER, limit: int = 100
) -> int | None:
    return partition.retention_point(now_ms, retention_ms=age, retention_bytes=size, limit_offset=limit)


def test_segments_go_when_their_newest_record_is_too_old(aging: PartitionStore) -> None:
    assert point(aging, 5000, age=5000) is None
    assert point(aging, 5001, age=5000) == 1
    assert point(aging, 9000, age=5000) == 4


def test_the_last_segment_goes_too_when_it_is_too_old(aging: PartitionStore) -> None:
    assert point(aging, 1_000_000, age=5000) == 10
    aging.delete_below(10).run()
    assert aging.segments == []
    assert aging.read(10, 1000, 10) is None
    put(aging, [batch_at(10)])
    assert fetch(aging, 10) == [batch_at(10)]
    assert aging.segments[0].base_offset == 10


def test_segments_go_while_the_rest_is_still_large_enough(aging: PartitionStore) -> None:
    size = aging.segments[0].size
    assert point(aging, size=10 * size) is None
    assert point(aging, size=9 * size + 1) is None
    assert point(aging, size=9 * size) == 1
    assert point(aging, size=0) == 10


def test_no_segment_goes_past_the_limit(aging: PartitionStore) -> None:
    assert point(aging, size=0, limit=3) == 3
    assert point(aging, 1_000_000, age=0, limit=0) is None


def test_without_a_retention_nothing_goes(aging: PartitionStore) -> None:
    assert point(aging, 10**15) is None


def test_a_segment_with_batches_under_way_stays(aging: PartitionStore) -> None:
    placements = plan(aging, [batch_at(10, value=b"", timestamp=9000)])
    assert placements[0].segment.base_offset == 9
    assert point(aging, 10**15, age=0, limit=100) == 9
    plan(aging, [batch_at(11, value=b"x" * 800)])
    aging.delete_below(10)
    assert [segment.base_offset for segment in aging.segments] == [9, 11]


def test_records_without_a_time_do_not_count_as_old(partition: PartitionStore) -> None:
    put(partition, [batch_at(i, value=b"x" * 800, timestamp=-1) for i in range(3)])
    assert point(partition, 10**15, age=0) is None
    put(
        partition,
        [batch_at(3, value=b"x" * 800, timestamp=1000), batch_at(4, value=b"x" * 800, timestamp=10**15)],
    )
    assert point(partition, 10**15, age=0) == 4


def test_deleting_removes_whole_segments_and_their_indexes(aging: PartitionStore) -> None:
    job = aging.begin_flush()
    assert job is not None
    job.run()
    aging.finish_flush(job)
    aging.delete_below(4).run()
    assert [segment.base_offset for segment in aging.segments] == [4, 5, 6, 7, 8, 9]
    names = aging.store.disk.listdir(aging.directory)
    assert sorted({int(name[:20]) for name in names}) == [4, 5, 6, 7, 8, 9]
    assert fetch(aging, 4) == fetch(aging, 0)


def test_a_log_start_within_a_segment_keeps_it(partition: PartitionStore) -> None:
    put(partition, [batch_at(0, 10)])
    assert len(partition.delete_below(9)) == 0
    assert len(partition.segments) == 1


def test_a_region_of_a_deleted_segment_can_still_be_read(aging: PartitionStore) -> None:
    region = aging.read(2, 10_000, 100)
    aging.delete_below(10).run()
    assert region is not None and region.load() == batch_at(2, value=b"x" * 800, timestamp=2000)


def test_age_is_known_again_after_a_restart(aging: PartitionStore) -> None:
    job = aging.begin_flush()
    assert job is not None
    job.run()
    aging.finish_flush(job)
    store = Store(aging.store.disk, aging.store.directory)
    restored = store.partition(TOPIC_ID, 0)
    restored.restore(aging.flushed, 0)
    restored.trim(0)
    assert point(restored, 9000, age=5000) == 4
    assert restored.size_bytes == aging.size_bytes


def test_a_file_is_closed_when_its_last_reader_is_done(aging: PartitionStore) -> None:
    if not isinstance(aging.store.disk, OsDisk):
        pytest.skip("only the operating system has descriptors")
    region = aging.read(2, 10_000, 100)
    assert region is not None
    fd = region.fileno()
    assert fd is not None
    aging.delete_below(10).run()
    assert os.fstat(fd).st_nlink == 0
    del region
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
