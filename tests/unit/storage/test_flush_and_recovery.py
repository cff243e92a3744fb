"""What was flushed survives, what was not comes back from the journal, and nothing else is left behind."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from storage_cases import (
    SMALL,
    TOPIC_ID,
    aborted_by,
    batch_at,
    fetch,
    flush,
    plan,
    put,
    put_with_aborts,
    some_batches,
)

from semel.errors import CorruptionError, StorageError
from semel.storage.memory import MemoryDisk
from semel.storage.partition import Flushed, PartitionStore
from semel.storage.settings import LogSettings
from semel.storage.store import Store
from semel.testing.simdisk import SimDisk
from semel.wire.batch import read_header

DIRECTORY = Path("/segments")
SEEDS = int(os.environ.get("TEST_SIMULATION_SEEDS", "15"))


def open_partition(disk: SimDisk | MemoryDisk) -> PartitionStore:
    return Store(disk, DIRECTORY).partition(TOPIC_ID, 0)


def recover(
    partition: PartitionStore,
    journal: list[bytes],
    flushed: Flushed | None,
    log_start_offset: int = 0,
    settings: LogSettings = SMALL,
) -> None:
    """What the broker does at a start. As if a snapshot had every marker: nothing is told of aborts."""
    partition.restore(flushed, log_start_offset)
    for batch in journal:
        if flushed is None or read_header(batch).base_offset >= flushed.end_offset:
            put(partition, [batch], settings)
    partition.trim(log_start_offset)


def end_of(batches: list[bytes]) -> int:
    return read_header(batches[-1]).last_offset + 1


@pytest.mark.parametrize("seed", [*range(SEEDS), 588, 636, 640, 819])
def test_recovery_brings_back_the_same_log_from_any_flush(seed: int) -> None:
    """Whatever the settings were: each life may cut the log into segments in its own way."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    disk = SimDisk(seed)
    partition = open_partition(disk)
    journal = some_batches(seed, 80, transactions=True)
    aborted = aborted_by(journal)
    written = 0
    recorded: Flushed | None = None
    for _ in range(6):
        settings = LogSettings(segment_bytes=chance.randint(400, 2000), index_interval_bytes=200)
        upto = chance.randint(written, len(journal))
        put_with_aborts(partition, journal[written:upto], aborted, settings)
        written = upto
        if chance.random() < 0.7 and partition.begin_flush() is not None:
            flush_again(partition)
            if chance.random() < 0.7:
                recorded = partition.flushed
        if chance.random() < 0.5:
            disk.crash()
            partition = open_partition(disk)
            recover(partition, journal[:written], recorded, settings=settings)
            assert_same_log(partition, journal[:written])
    disk.crash()
    partition = open_partition(disk)
    recover(partition, journal, recorded)
    assert_same_log(partition, journal)
    assert_no_strays(disk, partition)


def flush_again(partition: PartitionStore) -> None:
    """Finish the flush that is under way."""
    job = partition._flush
    assert job is not None
    job.run()
    partition.finish_flush(job)


def assert_same_log(partition: PartitionStore, journal: list[bytes]) -> None:
    assert fetch(partition, 0) == journal
    assert partition.end_offset == partition.revealed_offset
    for batch in journal[:: max(1, len(journal) // 10)]:
        offset = read_header(batch).base_offset
        assert fetch(partition, offset)[0] == batch
    aborted = list(aborted_by(journal).values())
    for start in range(0, partition.end_offset, 7):
        for end in (start + 1, start + 20, partition.end_offset):
            expected = [txn for txn in aborted if txn.first_offset < end and txn.last_offset >= start]
            assert partition.aborted_in(start, end) == expected


def assert_no_strays(disk: SimDisk | MemoryDisk, partition: PartitionStore) -> None:
    names = disk.listdir(partition.directory)
    assert [name for name in names if name.endswith(".log")] == [
        segment.path.name for segment in partition.segments
    ]
    assert set(names) <= {
        path.name for segment in partition.segments for path in (segment.path, segment.index_path)
    }
    for segment in partition.segments:
        assert disk.open(segment.path).size() == segment.size


def test_what_lies_past_the_flushed_size_is_not_believed() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, [batch_at(0), batch_at(1)])
    flush(partition)
    put(partition, [batch_at(2, value=b"lost")])
    recovered = open_partition(disk)
    recover(recovered, [batch_at(2, value=b"kept")], partition.flushed)
    assert fetch(recovered, 2) == [batch_at(2, value=b"kept")]
    assert_no_strays(disk, recovered)


def test_segments_that_the_journal_does_not_have_are_deleted() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, [batch_at(0)])
    flush(partition)
    put(partition, some_more(1, 50))
    assert len(partition.segments) > 3
    recovered = open_partition(disk)
    recover(recovered, [], partition.flushed)
    assert fetch(recovered, 0) == [batch_at(0)]
    assert len(recovered.segments) == 1
    assert_no_strays(disk, recovered)


def some_more(offset: int, count: int) -> list[bytes]:
    return [batch_at(offset + i, value=b"x" * 100) for i in range(count)]


def test_a_partition_that_was_never_flushed_comes_from_the_journal_alone() -> None:
    disk = MemoryDisk()
    journal = some_batches(seed=1, count=40)
    put(open_partition(disk), [batch_at(0, 9, value=b"x" * 90), *some_more(9, 70)])
    recovered = open_partition(disk)
    recover(recovered, journal, None)
    assert fetch(recovered, 0) == journal
    assert_no_strays(disk, recovered)


def test_a_restored_partition_goes_on_where_it_ended() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    batches = some_batches(seed=2, count=40)
    put(partition, batches)
    flush(partition)
    bases = [segment.base_offset for segment in partition.segments]
    recovered = open_partition(disk)
    recover(recovered, [], partition.flushed)
    more = some_more(end_of(batches), 3)
    put(recovered, more)
    put(partition, more)
    assert fetch(recovered, 0) == batches + more
    assert [segment.base_offset for segment in recovered.segments] == [
        segment.base_offset for segment in partition.segments
    ]
    assert len(bases) > 5


def test_a_lost_flushed_file_is_corruption_and_not_an_empty_log() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, [batch_at(0), batch_at(1)])
    flush(partition)
    disk.unlink(partition.segments[0].path)
    recovered = open_partition(disk)
    with pytest.raises(CorruptionError, match="missing or shorter"):
        recover(recovered, [], partition.flushed)


def test_a_cut_flushed_file_is_corruption() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, [batch_at(0), batch_at(1)])
    flush(partition)
    disk.open(partition.segments[0].path).truncate(10)
    with pytest.raises(CorruptionError, match="missing or shorter"):
        recover(open_partition(disk), [], partition.flushed)


def test_a_missing_first_segment_is_corruption() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, some_more(0, 50))
    flush(partition)
    disk.unlink(partition.segments[0].path)
    with pytest.raises(CorruptionError, match="should begin at 0"):
        recover(open_partition(disk), [], partition.flushed)


def test_a_missing_segment_in_the_middle_is_corruption_when_it_is_read() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, some_more(0, 50))
    flush(partition)
    disk.unlink(partition.segments[2].path)
    recovered = open_partition(disk)
    recover(recovered, [], partition.flushed)
    with pytest.raises(CorruptionError, match=f"no segment {partition.segments[2].base_offset}"):
        fetch(recovered, 0)


def test_files_deleted_after_the_snapshot_was_taken_are_not_missed() -> None:
    """The log start moved, durably, after the snapshot; its files are gone; then the process died."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    journal = some_more(0, 30)
    put(partition, journal[:5])
    flush(partition)
    recorded = partition.flushed
    put(partition, journal[5:])
    partition.delete_below(partition.segments[3].base_offset).run()
    log_start = partition.segments[0].base_offset
    recovered = open_partition(disk)
    recovered.restore(recorded, 0)
    put(recovered, journal[5:])
    recovered.delete_below(log_start).run()
    recovered.trim(log_start)
    assert fetch(recovered, log_start) == journal[log_start:]
    assert_no_strays(disk, recovered)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_lost_index_is_made_again(store: Store, step: int) -> None:
    partition = store.partition(TOPIC_ID, 0)
    journal = some_batches(seed=3, count=100, transactions=True)
    put_with_aborts(partition, journal, aborted_by(journal))
    flush(partition)
    for segment in partition.segments[::-step]:
        store.disk.unlink(segment.index_path)
    recovered = Store(store.disk, store.directory).partition(TOPIC_ID, 0)
    recover(recovered, [], partition.flushed)
    assert_same_log(recovered, journal)


@pytest.mark.parametrize("byte", [0, 5, 20, 30, 75, 100, -1])
def test_a_damaged_index_is_made_again(byte: int) -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    journal = some_batches(seed=4, count=60, transactions=True)
    put_with_aborts(partition, journal, aborted_by(journal))
    flush(partition)
    for segment in partition.segments:
        file = disk.open(segment.index_path)
        at = byte % file.size()
        file.pwritev([bytes([file.pread(1, at)[0] ^ 0xFF])], at)
    recovered = open_partition(disk)
    recover(recovered, [], partition.flushed)
    assert_same_log(recovered, journal)


def test_an_index_is_used_and_not_made_again() -> None:
    disk = SimDisk(seed=5)
    partition = open_partition(disk)
    batches = some_batches(seed=5, count=200)
    put(partition, batches, LogSettings(segment_bytes=10_000))
    flush(partition)
    recovered = open_partition(disk)
    recover(recovered, [], partition.flushed)
    before = disk.faults.counts["read"]
    assert fetch(recovered, 0)[0] == batches[0]
    # For each segment: its index, one look at the batch that is wanted, and its records.
    assert disk.faults.counts["read"] - before <= 4 * len(recovered.segments)


def test_index_blocks_of_a_lost_life_are_never_believed() -> None:
    """A flush that was not recorded left blocks about batches that the journal lost (durability `os`)."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    settings = LogSettings(index_interval_bytes=0)
    put(partition, [batch_at(0)], settings)
    flush(partition)
    recorded = partition.flushed
    put(partition, [batch_at(1, value=b"a" * 50), batch_at(2, value=b"a" * 10)], settings)
    flush(partition)
    put(partition, [batch_at(3)], settings)
    flush(partition)
    second = open_partition(disk)
    other = [batch_at(1, value=b"b" * 10), batch_at(2, value=b"b" * 50)]
    recover(second, other, recorded, settings=settings)
    flush(second)
    index = second.segments[0].index
    assert index is not None and disk.open(second.segments[0].index_path).size() == index.file_bytes
    third = open_partition(disk)
    recover(third, [], second.flushed)
    assert fetch(third, 0) == [batch_at(0), *other]
    assert fetch(third, 2) == other[1:]


def test_readers_of_the_old_store_read_on_while_the_new_one_is_restored() -> None:
    """Also if the settings changed meanwhile, which would put the batches into other segments."""
    disk = MemoryDisk()
    old = open_partition(disk)
    journal = some_batches(seed=6, count=60)
    put(old, journal[:20])
    flush(old)
    put(old, journal[20:])
    kept_region = old.read(0, 500, 10_000)
    new = old.store.successor().partition(TOPIC_ID, 0)
    new.restore(old.flushed, 0)
    for batch in journal[20:]:
        put(new, [batch], LogSettings(segment_bytes=400))
        assert fetch(old, 0) == journal
    new.trim(0)
    assert fetch(old, 0) == journal
    assert fetch(new, 0) == journal
    assert [s.base_offset for s in new.segments] == [s.base_offset for s in old.segments]
    assert kept_region is not None and kept_region.load() == b"".join(journal)[:500]


def test_jobs_of_a_retired_store_leave_the_files_alone() -> None:
    disk = MemoryDisk()
    old = open_partition(disk)
    put(old, some_more(0, 30))
    flush_job = old.begin_flush()
    delete_job = old.delete_below(20)
    drop_job = old.store.drop_topic(TOPIC_ID)
    names = disk.listdir(old.directory)
    old.store.successor()
    assert flush_job is not None
    flush_job.run()
    delete_job.run()
    drop_job.run()
    assert disk.listdir(old.directory) == names


def test_a_failed_flush_counts_for_nothing() -> None:
    disk = SimDisk(seed=7)
    partition = open_partition(disk)
    put(partition, [batch_at(0)])
    job = partition.begin_flush()
    disk.faults.fail_next("sync")
    assert job is not None
    with pytest.raises(StorageError, match="cannot sync"):
        job.run()
    assert partition.flushed is None


def test_a_flush_is_begun_once_and_only_if_there_is_something_new() -> None:
    partition = open_partition(MemoryDisk())
    assert partition.begin_flush() is None
    put(partition, [batch_at(0)])
    job = partition.begin_flush()
    assert job is not None and partition.begin_flush() is None
    put(partition, [batch_at(1)])
    job.run()
    partition.finish_flush(job)
    assert partition.flushed == Flushed(0, len(batch_at(0)), 1)
    flush(partition)
    assert partition.begin_flush() is None


def test_what_is_not_revealed_is_not_flushed() -> None:
    partition = open_partition(MemoryDisk())
    first, second = batch_at(0), batch_at(1)
    partition.store.write(plan(partition, [first, second]))
    partition.reveal(1)
    flush(partition)
    assert partition.flushed == Flushed(0, len(first), 1)


def test_a_short_write_is_an_error() -> None:
    disk = SimDisk(seed=8)
    partition = open_partition(disk)
    disk.faults.shorten(1, 20)
    with pytest.raises(StorageError, match="only 20 were taken"):
        put(partition, [batch_at(0)])


def test_files_of_dropped_and_unknown_topics_are_removed(store: Store) -> None:
    topics = [bytes([i]) * 16 for i in range(3)]
    for topic_id in topics:
        put(store.partition(topic_id, 0), [batch_at(0)])
        put(store.partition(topic_id, 1), [batch_at(0)])
    store.drop_topic(topics[0]).run()
    assert store.disk.listdir(store.directory) == [topics[1].hex(), topics[2].hex()]
    later = Store(store.disk, store.directory)
    later.finish_recovery({topics[1]}).run()
    assert later.disk.listdir(later.directory) == [topics[1].hex()]
