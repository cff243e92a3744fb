"""Compaction keeps the last record of every key and all that a reader would miss, wherever it is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_cases import (
    TOPIC_ID,
    aborted_by,
    batch_at,
    fetch,
    flush,
    marker_at,
    put,
    put_with_aborts,
    records_at,
)

from semel.disk import Disk
from semel.errors import StorageError
from semel.storage.memory import MemoryDisk
from semel.storage.partition import PartitionStore
from semel.storage.settings import COMPACT, DELETE, LogSettings, StorageSettings
from semel.storage.store import Store
from semel.testing.simdisk import PowerLoss, SimDisk
from semel.wire.batch import check_crc, iter_batches, read_header
from semel.wire.records import Record, read_end_marker, read_records

DIRECTORY = Path("/segments")
DELETE_RETENTION_MS = 1_000
COMPACTED = LogSettings(
    segment_bytes=600,
    index_interval_bytes=100,
    cleanup_policy=frozenset((COMPACT,)),
    delete_retention_ms=DELETE_RETENTION_MS,
    min_cleanable_dirty_ratio=0.0,
)

MERGING = replace(COMPACTED, segment_bytes=3_000)
"""For neighbours to be put together."""


def open_partition(disk: Disk, store_settings: StorageSettings | None = None) -> PartitionStore:
    return Store(disk, DIRECTORY, store_settings).partition(TOPIC_ID, 0)


def close_segments(partition: PartitionStore) -> None:
    """Begin a new segment, and let a snapshot record the flush of all before it."""
    filler = batch_at(partition.end_offset, key=b"filler", value=b"x" * COMPACTED.segment_bytes)
    put(partition, [filler], COMPACTED)
    flush(partition)
    assert partition.flushed is not None
    partition.flush_recorded(partition.flushed)


def compact(
    partition: PartitionStore,
    now_ms: int = 0,
    log_settings: LogSettings = COMPACTED,
    last_stable_offset: int | None = None,
    last_batches: dict[int, int] | None = None,
) -> bool:
    """Run a compaction to its end; False if there was nothing to do."""
    stable = partition.revealed_offset if last_stable_offset is None else last_stable_offset
    job = partition.begin_compaction(now_ms, log_settings, stable, last_batches or {})
    if job is None:
        return False
    while job is not None:
        job.run()
        job = partition.finish_compaction(job)
    return True


def keyed(offset: int, *pairs: tuple[str, str | None], producer_id: int = -1, codec: int = 0) -> bytes:
    """A batch of records; with a producer, in a transaction."""
    records = [
        Record(key.encode(), None if value is None else value.encode(), 1_000 + offset + i)
        for i, (key, value) in enumerate(pairs)
    ]
    return records_at(
        offset, records, producer_id=producer_id, transactional=producer_id >= 0, codec=codec, sequence=offset
    )


def committed(partition: PartitionStore, offset: int = 0) -> list[Record]:
    """What a consumer with read_committed gets: it goes by the aborted transactions and the markers."""
    pending = partition.aborted_in(offset, partition.revealed_offset)
    pending.sort(key=lambda txn: txn.first_offset)
    aborted: set[int] = set()
    records = []
    for batch in fetch(partition, offset):
        header = read_header(batch)
        check_crc(batch, header)
        while pending and pending[0].first_offset <= header.last_offset:
            aborted.add(pending.pop(0).producer_id)
        if header.is_control:
            marker = read_end_marker(batch)
            if marker is not None and not marker.commit:
                aborted.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in aborted):
            records.extend(record for record in read_records(batch) if record.offset >= offset)
    return records


def latest(records: list[Record]) -> dict[bytes | None, bytes | None]:
    return {record.key: record.value for record in records}


def values(records: list[Record]) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for record in records if record.key != b"filler"]


# What stays.


def test_only_the_last_record_of_a_key_stays_at_its_offset(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(
        partition,
        [keyed(0, ("a", "1"), ("b", "1")), keyed(2, ("a", "2")), keyed(3, ("c", "1"), ("a", "3"))],
        COMPACTED,
    )
    close_segments(partition)
    assert compact(partition)
    assert values(committed(partition)) == [(1, b"b", b"1"), (3, b"c", b"1"), (4, b"a", b"3")]


def test_every_offset_can_still_be_asked_for(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, ("a" if i % 3 else "b", str(i))) for i in range(60)], COMPACTED)
    close_segments(partition)
    assert compact(partition)
    kept = values(committed(partition))
    assert [offset for offset, _, _ in kept] == [57, 59]
    for offset in range(60):
        assert values(committed(partition, offset)) == [record for record in kept if record[0] >= offset]


def test_small_segments_become_one(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, ("a", "x" * 100)) for i in range(60)], COMPACTED)
    close_segments(partition)
    before = len(partition.segments)
    while compact(partition):
        put(partition, [keyed(partition.end_offset, ("b", "1"))], COMPACTED)
        close_segments(partition)
        if len(partition.segments) < before // 3:
            break
    assert len(partition.segments) < before // 3
    names = [name for name in store.disk.listdir(partition.directory) if name.endswith(".log")]
    assert names == [segment.path.name for segment in partition.segments]


@pytest.mark.parametrize("codec", range(5))
def test_batches_keep_their_codec_and_are_whole(store: Store, codec: int) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(
        partition,
        [keyed(0, ("a", "1"), ("b", "2"), codec=codec), keyed(2, ("a", "3"), codec=codec)],
        COMPACTED,
    )
    close_segments(partition)
    assert compact(partition)
    first = read_header(fetch(partition, 0)[0])
    assert (first.base_offset, first.last_offset, first.record_count, first.codec) == (0, 1, 1, codec)
    assert values(committed(partition)) == [(1, b"b", b"2"), (2, b"a", b"3")]


def test_a_batch_without_changes_stays_byte_for_byte(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    batches = [keyed(0, ("a", "1"), ("b", "2"), codec=1), keyed(2, ("c", "3"))]
    put(partition, batches, COMPACTED)
    close_segments(partition)
    file = partition.segments[0].file
    assert compact(partition)
    assert fetch(partition, 0)[:2] == batches
    assert partition.segments[0].file is file


def test_a_producers_last_batch_stays_empty(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    batches = [records_at(i, [Record(b"a", b"1", 5)], producer_id=7, sequence=i) for i in range(3)]
    put(partition, [*batches, keyed(3, ("a", "2"))], COMPACTED)
    close_segments(partition)
    assert compact(partition, last_batches={7: 2})
    first = read_header(fetch(partition, 0)[0])
    assert (first.base_offset, first.last_offset, first.record_count) == (2, 2, 0)
    assert (first.producer_id, first.producer_epoch, first.base_sequence) == (7, 0, 2)


def test_the_last_batch_of_all_stays_so_that_readers_get_past_it(store: Store) -> None:
    """Readers wait below an open transaction: where they wait, something must tell them the next offset."""
    partition = store.partition(TOPIC_ID, 0)
    batches = [keyed(i, ("a", "x" * 100), producer_id=5) for i in range(20)]
    put(partition, batches, COMPACTED)
    close_segments(partition)
    end_offset = partition.segments[-1].base_offset
    marker = marker_at(partition.end_offset, 5, commit=False)
    put_with_aborts(partition, [marker], aborted_by([*batches, marker]))
    assert compact(partition)
    last = fetch(partition, 0, end_offset)
    assert [read_header(batch).record_count for batch in last] == [0]
    assert read_header(last[0]).last_offset + 1 == end_offset


def test_records_without_a_key_go(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [batch_at(0, key=None), keyed(1, ("a", "1"))], COMPACTED)
    close_segments(partition)
    assert compact(partition)
    assert values(committed(partition)) == [(1, b"a", b"1")]


def test_what_is_not_made_of_records_is_kept(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    broken = bytearray(keyed(0, ("a", "1")))
    broken[61:] = b"\xff" * (len(broken) - 61)
    put(partition, [bytes(broken), keyed(1, ("a", "1")), keyed(2, ("a", "2"))], COMPACTED)
    close_segments(partition)
    assert compact(partition)
    assert [read_header(batch).base_offset for batch in fetch(partition, 0)] == [0, 2, 3]
    assert fetch(partition, 0)[0] == bytes(broken)


# Tombstones and markers.


def test_a_tombstone_goes_when_its_horizon_has_passed_and_not_before(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(0, ("a", "1")), keyed(1, ("b", "1"), ("a", None))], COMPACTED)
    close_segments(partition)
    assert compact(partition, now_ms=10_000)
    assert values(committed(partition)) == [(1, b"b", b"1"), (2, b"a", None)]
    header = read_header(fetch(partition, 0)[0])
    assert header.delete_horizon_ms == 10_000 + DELETE_RETENTION_MS
    assert [record.timestamp for record in committed(partition)][:2] == [1_001, 1_002]
    close_segments(partition)
    assert compact(partition, now_ms=10_999)
    assert values(committed(partition)) == [(1, b"b", b"1"), (2, b"a", None)]
    close_segments(partition)
    assert compact(partition, now_ms=11_000)
    assert values(committed(partition)) == [(1, b"b", b"1")]


def test_records_of_aborted_transactions_go_and_replace_nothing(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    batches = [keyed(0, ("a", "1")), keyed(1, ("a", "no"), producer_id=9), marker_at(2, 9, commit=False)]
    put_with_aborts(partition, batches, aborted_by(batches))
    close_segments(partition)
    assert compact(partition)
    assert values(committed(partition)) == [(0, b"a", b"1")]
    assert [read_header(batch).base_offset for batch in fetch(partition, 0)] == [0, 2, 3]


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_goes_a_horizon_after_the_last_batch_of_its_transaction(store: Store, commit: bool) -> None:
    partition = store.partition(TOPIC_ID, 0)
    batches = [keyed(0, ("a", "1"), producer_id=9), marker_at(1, 9, commit=commit), keyed(2, ("a", "2"))]
    put_with_aborts(partition, batches, aborted_by(batches))

    def offsets() -> list[int]:
        return [read_header(batch).base_offset for batch in fetch(partition, 0)][:3]

    close_segments(partition)
    assert compact(partition, now_ms=0)
    assert offsets() == [1, 2, 3]
    assert read_header(fetch(partition, 0)[0]).delete_horizon_ms is None
    close_segments(partition)
    assert compact(partition, now_ms=5_000)
    assert read_header(fetch(partition, 0)[0]).delete_horizon_ms == 5_000 + DELETE_RETENTION_MS
    assert bool(partition.aborted_in(0, 10)) is not commit
    close_segments(partition)
    assert compact(partition, now_ms=5_999)
    assert offsets()[0] == 1
    close_segments(partition)
    assert compact(partition, now_ms=6_000)
    assert offsets()[0] == 2
    assert partition.aborted_in(0, 10) == []


def test_a_reused_producer_is_not_taken_for_aborted_when_its_marker_is_gone(store: Store) -> None:
    """A reader that was told of an aborted transaction whose marker is gone would drop all that follows."""
    partition = store.partition(TOPIC_ID, 0)
    batches = [
        keyed(0, ("a", "no"), producer_id=9),
        marker_at(1, 9, commit=False),
        keyed(2, ("b", "1"), producer_id=9),
        marker_at(3, 9, commit=True),
    ]
    put_with_aborts(partition, batches, aborted_by(batches))
    for now_ms in (0, 10_000, 20_000, 30_000):
        close_segments(partition)
        assert compact(partition, now_ms=now_ms)
        assert values(committed(partition)) == [(2, b"b", b"1")]


def test_a_committed_record_replaces_one_after_the_producers_aborted_transaction(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    aborting = [keyed(2, ("a", "no"), producer_id=9), marker_at(3, 9, commit=False)]
    batches = [keyed(0, ("b", "1"), ("c", "1")), *aborting]
    put_with_aborts(partition, batches, aborted_by(batches))
    close_segments(partition)
    assert compact(partition)
    offset = partition.end_offset
    committing = [keyed(offset, ("b", "2"), producer_id=9), marker_at(offset + 1, 9, commit=True)]
    put(partition, committing, COMPACTED)
    close_segments(partition)
    assert compact(partition)
    assert values(committed(partition)) == [(1, b"c", b"1"), (offset, b"b", b"2")]


# What is left alone.


def test_nothing_above_the_last_stable_offset_is_touched(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    batches = [keyed(i, ("a", "x" * 200)) for i in range(20)]
    put(partition, batches, COMPACTED)
    close_segments(partition)
    stable = partition.segments[3].base_offset
    assert compact(partition, last_stable_offset=stable)
    assert [batch for batch in fetch(partition, stable) if batch in batches] == batches[stable:]
    assert values(committed(partition))[0][0] == stable - 1


def test_nothing_that_a_recovery_would_write_again_is_touched(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, ("a", "x" * 200)) for i in range(20)], COMPACTED)
    assert not compact(partition)
    flush(partition)
    assert not compact(partition)
    assert partition.flushed is not None
    partition.flush_recorded(partition.flushed)
    later = [keyed(i, ("a", "x" * 200)) for i in range(20, 40)]
    put(partition, later, COMPACTED)
    flush(partition)
    assert compact(partition)
    assert fetch(partition, 19)[-21:] == [keyed(19, ("a", "x" * 200)), *later]
    assert len(fetch(partition, 0)) < 25


def test_a_topic_that_only_deletes_is_never_compacted(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, ("a", "x" * 200)) for i in range(20)], COMPACTED)
    close_segments(partition)
    only_delete = LogSettings(cleanup_policy=frozenset((DELETE,)), min_cleanable_dirty_ratio=0.0)
    assert not compact(partition, log_settings=only_delete)


def test_records_stay_out_for_the_least_lag(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, ("a", "x" * 200)) for i in range(20)], COMPACTED)
    close_segments(partition)
    lagging = replace(COMPACTED, min_compaction_lag_ms=500)
    assert not compact(partition, now_ms=1_400, log_settings=lagging)
    assert compact(partition, now_ms=100_000, log_settings=lagging)


def test_a_mostly_clean_log_waits_but_not_for_ever(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, (f"k{i}", "x" * 200)) for i in range(20)], COMPACTED)
    close_segments(partition)
    assert compact(partition)
    put(partition, [keyed(partition.end_offset, ("k1", "x" * 300))], COMPACTED)
    close_segments(partition)
    patient = LogSettings(
        cleanup_policy=frozenset((COMPACT,)), min_cleanable_dirty_ratio=0.5, max_compaction_lag_ms=10_000
    )
    assert not compact(partition, now_ms=2_000, log_settings=patient)
    assert compact(partition, now_ms=20_000, log_settings=patient)
    assert not compact(partition, now_ms=20_000, log_settings=patient)


def test_compact_and_delete_together(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, (f"k{i}", "x" * 200)) for i in range(20)], COMPACTED)
    close_segments(partition)
    both = replace(COMPACTED, cleanup_policy=frozenset((COMPACT, DELETE)))
    assert compact(partition, log_settings=both)
    start = partition.retention_point(2_000, retention_ms=990, retention_bytes=-1, limit_offset=21)
    assert start is not None and 0 < start < 20
    partition.delete_below(start).run()
    assert [offset for offset, _, _ in values(committed(partition, start))] == list(range(start, 20))


def test_more_keys_than_fit_are_compacted_in_several_passes(store: Store) -> None:
    small = StorageSettings(max_key_map_bytes=200 * 7)
    partition = Store(store.disk, store.directory, small).partition(TOPIC_ID, 0)
    put(partition, [keyed(i, (f"k{i % 40}", "v")) for i in range(120)], COMPACTED)
    close_segments(partition)
    passes = 0
    while compact(partition):
        passes += 1
        assert passes < 100
    assert passes > 10
    assert [offset for offset, _, _ in values(committed(partition))] == list(range(80, 120))


def test_what_was_compacted_is_known_after_a_restart(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, (f"k{i % 5}", "x" * 50)) for i in range(40)], COMPACTED)
    close_segments(partition)
    assert compact(partition)
    restored = Store(store.disk, store.directory).partition(TOPIC_ID, 0)
    restored.restore(partition.flushed, 0)
    restored.trim(0)
    assert fetch(restored, 0) == fetch(partition, 0)
    assert restored.flushed is not None
    restored.flush_recorded(restored.flushed)
    assert not compact(restored)
    close_segments(restored)
    assert compact(restored)


def test_a_segment_that_compaction_emptied_needs_no_index_after_a_crash(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, ("a", "x" * 100)) for i in range(40)], COMPACTED)
    close_segments(partition)
    assert compact(partition)
    assert partition.segments[0].size == 0
    store.disk.unlink(partition.segments[0].index_path)
    restored = Store(store.disk, store.directory).partition(TOPIC_ID, 0)
    restored.restore(partition.flushed, 0)
    restored.trim(0)
    assert values(committed(restored)) == [(39, b"a", b"x" * 100)]


def test_deleting_waits_for_the_end_of_a_compaction(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, (f"k{i}", "x" * 200)) for i in range(20)], COMPACTED)
    close_segments(partition)
    job = partition.begin_compaction(0, COMPACTED, 100, {})
    assert job is not None
    job.run()
    partition.delete_below(10).run()
    assert partition.segments[0].base_offset == 0
    while job is not None:
        job = partition.finish_compaction(job)
        if job is not None:
            job.run()
    assert partition.segments[0].base_offset > 5
    assert values(committed(partition, 10))[0][0] == 10
    assert_sound(partition)


@pytest.mark.parametrize("disk", ["memory"], indirect=True)  # A hundred files synced tell no more.
def test_a_compaction_of_a_dropped_topic_ends_quietly(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, ("a", "x" * 400)) for i in range(200)], COMPACTED)
    close_segments(partition)
    job = partition.begin_compaction(0, COMPACTED, 1_000, {})
    assert job is not None
    job.run()
    assert partition.finish_compaction(job) is job
    store.drop_topic(TOPIC_ID).run()
    job.run()
    assert partition.finish_compaction(job) is None
    assert store.disk.listdir(store.directory) == []


def test_a_region_from_before_a_compaction_can_still_be_read(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    batches = [keyed(i, ("a", "x" * 200)) for i in range(20)]
    put(partition, batches, COMPACTED)
    close_segments(partition)
    region = partition.read(0, 10_000, 100)
    job = partition.begin_compaction(0, COMPACTED, 100, {})
    assert job is not None and region is not None
    job.run()
    assert region.load() == b"".join(batches[: len(region) // len(batches[0])])
    assert fetch(partition, 0)[:20] == batches, (
        "until the compaction is finished, readers see the old segments"
    )
    partition.finish_compaction(job)
    assert region.load() == b"".join(batches[: len(region) // len(batches[0])])


# Against a model.


@dataclass
class Step:
    """Something that happens to a partition."""

    kind: str
    producer_id: int = 0
    keys: tuple[int, ...] = ()
    is_tombstone: bool = False


steps = st.lists(
    st.one_of(
        st.builds(
            Step,
            st.just("append"),
            st.integers(-1, 2),
            st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
            st.booleans(),
        ),
        st.builds(Step, st.sampled_from(["commit", "abort"]), st.integers(0, 2)),
        st.builds(Step, st.just("compact")),
        st.builds(Step, st.just("restart")),
    ),
    min_size=5,
    max_size=60,
)


class Model:
    """The whole log as it was written, and what a reader must find of it."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.end_offset = 0

    def add(self, batch: bytes) -> bytes:
        self.batches.append(batch)
        self.end_offset = read_header(batch).last_offset + 1
        return batch

    def opened(self) -> set[int]:
        opened: set[int] = set()
        for batch in self.batches:
            header = read_header(batch)
            if header.is_control:
                opened.discard(header.producer_id)
            elif header.is_transactional:
                opened.add(header.producer_id)
        return opened

    def stable_offset(self) -> int:
        firsts: dict[int, int] = {}
        for batch in self.batches:
            header = read_header(batch)
            if header.is_control:
                firsts.pop(header.producer_id, None)
            elif header.is_transactional:
                firsts.setdefault(header.producer_id, header.base_offset)
        return min(firsts.values(), default=self.end_offset)

    def committed(self, end_offset: int) -> list[Record]:
        aborted = aborted_by(self.batches).values()
        return [
            record
            for batch in self.batches
            if not (header := read_header(batch)).is_control and header.base_offset < end_offset
            if not any(
                header.is_transactional
                and txn.producer_id == header.producer_id
                and txn.first_offset <= header.base_offset <= txn.last_offset
                for txn in aborted
            )
            for record in read_records(batch)
        ]


@given(steps, st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_readers_find_the_same_latest_values_as_in_the_whole_log(script: list[Step], key_map: int) -> None:
    disk = MemoryDisk()
    store_settings = StorageSettings(max_key_map_bytes=200 * (3 + 10 * key_map))
    partition = open_partition(disk, store_settings)
    model = Model()
    now_ms = 0
    for step in [*script, Step("compact"), Step("compact")]:
        now_ms += 400
        if step.kind == "append":
            value = None if step.is_tombstone else f"{model.end_offset}" + "x" * 60
            batch = keyed(
                model.end_offset, *[(f"k{key}", value) for key in step.keys], producer_id=step.producer_id
            )
            put(partition, [model.add(batch)], COMPACTED)
        elif step.kind in ("commit", "abort"):
            if step.producer_id in model.opened():
                model.add(marker_at(model.end_offset, step.producer_id, commit=step.kind == "commit"))
                put_with_aborts(partition, model.batches[-1:], aborted_by(model.batches))
        elif step.kind == "compact":
            if partition.begin_flush() is not None:
                job = partition._flush
                assert job is not None
                job.run()
                partition.finish_flush(job)
                assert partition.flushed is not None
                partition.flush_recorded(partition.flushed)
            compact(
                partition, now_ms, last_stable_offset=model.stable_offset(), last_batches=last_batches(model)
            )
        else:
            flushed = partition._recorded
            partition = open_partition(disk, store_settings)
            partition.restore(flushed, 0)
            for batch in model.batches:
                if flushed is None or read_header(batch).base_offset >= flushed.end_offset:
                    put(partition, [batch], COMPACTED)
            partition.trim(0)
        assert_like(partition, model)


def last_batches(model: Model) -> dict[int, int]:
    return {
        header.producer_id: header.last_offset
        for header in map(read_header, model.batches)
        if not header.is_control and header.producer_id >= 0
    }


def assert_like(partition: PartitionStore, model: Model) -> None:
    stable = model.stable_offset()
    whole = model.committed(stable)
    found = [record for record in committed(partition) if record.offset < stable]
    written = {record.offset: record for record in whole}
    assert all(written[record.offset] == record for record in found), (
        "a record that was never committed, or changed"
    )
    assert [record.offset for record in found] == sorted({record.offset for record in found})
    # A tombstone may be gone: then the key must be gone.
    expected = latest(whole)
    actual = latest(found)
    assert {key: value for key, value in actual.items() if value is not None} == {
        key: value for key, value in expected.items() if value is not None
    }
    assert all(expected[key] is None for key in actual if actual[key] is None)
    for producer_id, last_offset in last_batches(model).items():
        assert any(
            header.producer_id == producer_id and header.last_offset == last_offset
            for header in map(read_header, fetch(partition, last_offset)[:1])
        ), f"the last batch of producer {producer_id} is gone"


# Crashes.


def crash_case(disk: SimDisk) -> PartitionStore:
    partition = open_partition(disk, StorageSettings(max_open_files=1))
    batches = []
    for i in range(0, 36, 3):
        batches.append(keyed(i, (f"k{i % 4}", "x" * 80), producer_id=i % 2))
        batches.append(keyed(i + 1, (f"k{i % 5}", "y" * 80)))
        batches.append(marker_at(i + 2, i % 2, commit=i % 4 != 0))
    put_with_aborts(partition, batches, aborted_by(batches))
    close_segments(partition)
    return partition


def count_operations() -> int:
    disk = SimDisk(seed=0)
    partition = crash_case(disk)
    before = disk.faults.counts["any"]
    before_segments = len(partition.segments)
    assert compact(partition, log_settings=MERGING)
    assert len(partition.segments) <= before_segments // 2
    return disk.faults.counts["any"] - before


def assert_sound(partition: PartitionStore) -> None:
    """Every segment holds its own offsets, in order, and the directory holds nothing else."""
    disk = partition.store.disk
    names = disk.listdir(partition.directory)
    assert [name for name in names if name.endswith(".log")] == [s.path.name for s in partition.segments]
    assert not [name for name in names if name.endswith((".swap", ".cleaned"))]
    for segment in partition.segments:
        offset = segment.base_offset
        stored = disk.open(segment.path).pread(1 << 20, 0)
        for header, _ in iter_batches(stored):
            assert offset <= header.base_offset
            offset = header.last_offset + 1
        assert offset <= segment.end_offset


@pytest.mark.parametrize("seed", range(8))
def test_a_crash_at_any_step_leaves_the_old_or_the_new_segments_whole(seed: int) -> None:
    print(f"seed {seed}")
    for nth in range(1, count_operations() + 1):
        disk = SimDisk(seed=seed * 1000 + nth)
        partition = crash_case(disk)
        before = committed(partition)
        flushed = partition.flushed
        disk.faults.lose_power(disk.faults.counts["any"] + nth)
        with pytest.raises(PowerLoss):
            compact(partition, log_settings=MERGING)
        disk.crash()
        restored = open_partition(disk)
        restored.restore(flushed, 0)
        restored.trim(0)
        after = committed(restored)
        assert latest(after) == latest(before), f"operation {nth}"
        assert set(values(after)) <= set(values(before))
        assert_sound(restored)
        assert flushed is not None
        restored.flush_recorded(flushed)
        compact(restored, now_ms=1)
        assert latest(committed(restored)) == latest(before)


def test_a_failed_operation_leaves_something_to_go_on_with() -> None:
    broken = 0
    for nth in range(1, count_operations() + 1):
        disk = SimDisk(seed=nth)
        partition = crash_case(disk)
        before = committed(partition)
        disk.faults.fail("any", disk.faults.counts["any"] + nth)
        with pytest.raises(StorageError, match="cannot"):
            compact(partition, log_settings=MERGING)
        assert latest(committed(partition)) == latest(before), "readers of the old segments are not disturbed"
        compact(partition, log_settings=MERGING)
        if compact(partition, log_settings=MERGING):
            assert latest(committed(partition)) == latest(before)
            assert_sound(partition)
            continue
        broken += 1
        assert latest(committed(partition)) == latest(before), "nor later"
        successor = partition.store.successor().partition(TOPIC_ID, 0)
        successor.restore(partition.flushed, 0)
        assert latest(committed(partition)) == latest(before), "nor by a recovery"
        successor.trim(0)
        assert_sound(successor)
        assert latest(committed(successor)) == latest(before)
    assert broken


@pytest.mark.parametrize("disk", ["memory"], indirect=True)  # A hundred files synced tell no more.
def test_many_segments_take_several_runs(store: Store) -> None:
    partition = store.partition(TOPIC_ID, 0)
    put(partition, [keyed(i, (f"k{i % 7}", "x" * 400)) for i in range(200)], COMPACTED)
    close_segments(partition)
    runs = 0
    job = partition.begin_compaction(0, COMPACTED, partition.revealed_offset, {})
    while job is not None:
        job.run()
        runs += 1
        assert partition.begin_compaction(0, COMPACTED, partition.revealed_offset, {}) is job
        job = partition.finish_compaction(job)
    assert runs == 4
    assert [offset for offset, _, _ in values(committed(partition))] == list(range(193, 200))
