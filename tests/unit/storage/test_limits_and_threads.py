"""Idle partitions cost little, caches stay within their limits, threads do not get in each other's way."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path

from storage_cases import TOPIC_ID, batch_at, fetch, flush, plan, put, some_batches

from semel.disk import OsDisk
from semel.storage.memory import MemoryDisk
from semel.storage.partition import Placement
from semel.storage.settings import LogSettings, StorageSettings
from semel.storage.store import Store
from semel.wire.batch import read_header

MAX_IDLE_BYTES = 2_000
"""What a partition at rest may take: 10,000 of them fit into 20 MB."""


def test_an_idle_partition_takes_little_memory() -> None:
    disk = MemoryDisk()
    store = Store(disk, Path("/segments"))
    count = 200
    for i in range(count):
        partition = store.partition(TOPIC_ID, i)
        put(partition, [batch_at(j) for j in range(5)], LogSettings())
        flush(partition)
    flushed = [store.partition(TOPIC_ID, i).flushed for i in range(count)]
    gc.collect()
    tracemalloc.start()
    restored = Store(disk, Path("/segments"))
    for i in range(count):
        partition = restored.partition(TOPIC_ID, i)
        partition.restore(flushed[i], 0)
        partition.trim(0)
    gc.collect()
    restored_bytes, _ = tracemalloc.get_traced_memory()
    for i in range(count):
        put(restored.partition(TOPIC_ID, i), [batch_at(5)], LogSettings())
    gc.collect()
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert restored_bytes / count < MAX_IDLE_BYTES
    assert used_bytes / count < MAX_IDLE_BYTES + 500


def test_indexes_of_closed_segments_come_and_go() -> None:
    settings = StorageSettings(max_index_bytes=5_000)
    partition = Store(MemoryDisk(), Path("/segments"), settings).partition(TOPIC_ID, 0)
    batches = some_batches(seed=1, count=120)
    put(partition, batches)
    flush(partition)
    for _ in range(2):
        for i, batch in enumerate(batches):
            assert fetch(partition, read_header(batch).base_offset)[:3] == batches[i : i + 3]
    resident = [segment for segment in partition.segments if segment.index is not None]
    assert len(partition.store.indexes) < 6 < len(partition.segments)
    assert len(resident) <= len(partition.store.indexes) + 1


def test_readers_writers_and_flushes_share_few_open_files(tmp_path: Path) -> None:
    """As in the broker: the loop places, reveals and reads, one thread writes, another one flushes."""
    store = Store(OsDisk(), tmp_path / "segments", StorageSettings(max_open_files=2))
    partitions = [store.partition(TOPIC_ID, i) for i in range(4)]
    batches = some_batches(seed=2, count=150)
    writer = Worker()
    flusher = Worker()
    flushes = 0
    for number, batch in enumerate(batches):
        placed: list[Placement] = []
        for partition in partitions:
            placed += plan(partition, [batch])
        writer.run(lambda placements=placed: store.write(placements))
        for partition in partitions:
            first = read_header(batches[max(0, number - 20)]).base_offset
            assert fetch(partition, first) == batches[max(0, number - 20) : number]
        writer.wait()
        for partition in partitions:
            partition.reveal(partition.end_offset)
        if number % 5 == 0:
            job = partitions[number % 4].begin_flush()
            assert job is not None
            flusher.run(job.run)
            assert fetch(partitions[number % 4], 0) == batches[: number + 1]
            flusher.wait()
            partitions[number % 4].finish_flush(job)
            flushes += 1
    assert flushes > 20
    assert len(store.files) <= 2
    for partition in partitions:
        assert fetch(partition, 0) == batches


class Worker:
    """Runs one thing at a time in a thread, and passes on what it raises."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, work: object) -> None:
        assert callable(work)

        def target() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=target)
        self._thread.start()

    def wait(self) -> None:
        assert self._thread is not None
        self._thread.join(30)
        if self._error is not None:
            raise self._error
