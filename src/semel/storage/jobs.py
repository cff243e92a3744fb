"""Work on files that takes long: flushing and deleting. Begun and finished on the loop, run by a worker.

A job holds all that it needs, so it touches nothing that the loop may be changing. What it does to names in a
directory happens under the store's `names` lock and only while the store is not retired: after a failed write
another store is restored over the same files, and from then on they are that one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from semel.storage.files import SegmentFile
from semel.storage.segment import Segment

if TYPE_CHECKING:
    from semel.storage.partition import Flushed, PartitionStore
    from semel.storage.store import Store


class FlushedSegment:
    """A segment with bytes that are not known to be on disk, and the news for its index file."""

    __slots__ = ("block", "file", "index_at", "segment")

    def __init__(self, segment: Segment, file: SegmentFile, block: bytes, index_at: int) -> None:
        self.segment = segment
        self.file = file
        self.block = block
        self.index_at = index_at


class FlushJob:
    """Makes all that was revealed of a partition durable in its segments."""

    __slots__ = ("flushed", "has_new_names", "partition", "parts")

    def __init__(
        self, partition: PartitionStore, flushed: Flushed, parts: list[FlushedSegment], has_new_names: bool
    ) -> None:
        self.partition = partition
        self.flushed = flushed
        self.parts = parts
        self.has_new_names = has_new_names

    def run(self) -> None:
        """Raises StorageError if the disk fails: nothing counts as flushed then, and the broker recovers."""
        store = self.partition.store
        for part in self.parts:
            part.file.fdatasync()
        for part in self.parts:
            with store.names:
                if not (store.is_retired or part.segment.is_gone):
                    self._write_index(part)
        if self.has_new_names:
            with store.names:
                if store.is_retired or store.is_dropped(self.partition):
                    return
                self._sync_names()

    def _sync_names(self) -> None:
        store = self.partition.store
        directory = self.partition.directory
        store.disk.fsync_dir(directory)
        if not self.partition.has_durable_directory:
            store.disk.fsync_dir(directory.parent)
            store.disk.fsync_dir(store.directory)
            store.disk.fsync_dir(store.directory.parent)

    def _write_index(self, part: FlushedSegment) -> None:
        disk = self.partition.store.disk
        path = part.segment.index_path
        file = SegmentFile(disk.open(path, writable=True) if disk.exists(path) else disk.create(path))
        if file.size() > part.index_at:
            # Blocks from before a recovery. They must be gone for certain before others can follow: a block
            # that describes bytes which were lost may not come back after one that it seems to continue.
            file.truncate(part.index_at)
            file.fdatasync()
        # A block that a crash loses is made again from the segment, so it is not synced.
        file.write([part.block], part.index_at)


class DeleteJob:
    """Removes the files of segments that have left the log. What a crash leaves of them, `trim` finds."""

    __slots__ = ("_paths", "_store")

    def __init__(self, store: Store, segments: Sequence[Segment]) -> None:
        self._store = store
        self._paths = [path for segment in segments for path in (segment.path, segment.index_path)]

    def __len__(self) -> int:
        return len(self._paths)

    def run(self) -> None:
        for path in self._paths:
            with self._store.names:
                if self._store.is_retired:
                    return
                if self._store.disk.exists(path):
                    self._store.disk.unlink(path)


class DropJob:
    """Removes the directories of topics that are gone."""

    __slots__ = ("_directories", "_store")

    def __init__(self, store: Store, directories: Sequence[Path]) -> None:
        self._store = store
        self._directories = directories

    def run(self) -> None:
        for directory in self._directories:
            self._remove(directory)

    def _remove(self, directory: Path) -> None:
        disk = self._store.disk
        with self._store.names:
            if self._store.is_retired or not disk.exists(directory):
                return
            for partition in disk.listdir(directory):
                for name in disk.listdir(directory / partition):
                    disk.unlink(directory / partition / name)
                disk.rmdir(directory / partition)
            disk.rmdir(directory)
